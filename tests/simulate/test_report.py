from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.core.models import PAPER_CURVES
from bftrainer.core.objective import efficiency
from bftrainer.core.trace import Trace, Window
from bftrainer.core.trainer import Trainer
from bftrainer.scheduler import Policy
from bftrainer.simulate.charts import binned, made_and_best, parts_of_bound, span_hours
from bftrainer.simulate.gantt import Gantt, GanttRecorder, Span, gantt_data, what_is_shown
from bftrainer.simulate.metrics import Breakdown, Metrics, measure
from bftrainer.simulate.replay import Replay, ReplaySettings, Timeline, TrainerSummary, replay
from bftrainer.simulate.report import write_report
from bftrainer.simulate.svg import shortened, time_ticks, value_ticks
from bftrainer.traces.synthetic.synth import synthesise

HOUR = 3600.0
SECTIONS = ("figures", "efficiency", "pool", "losses", "runs", "gantt", "settings")
NASTY = '<script>alert("1")</script>&amp;'


@cache
def summit() -> Trace:
    return synthesise("summit", nodes=64, hours=12, seed=1)


def workload(work: float = 2e7, gap_s: float = 300.0, number: int = 30, suffix: str = "") -> tuple[Trainer, ...]:
    start, models = summit().window.start, list(PAPER_CURVES)
    return tuple(
        Trainer(f"trial-{i}{suffix}", PAPER_CURVES[m], 1, 16, 20, 5, work, start + gap_s * i, model=m + suffix)
        for i in range(number)
        for m in (models[i % len(models)],)
    )


@dataclass(frozen=True)
class Run:
    replay: Replay
    metrics: Metrics
    gantt: Gantt

    def page(self, path: Path, **changes: Any) -> str:
        asked: dict[str, Any] = {
            "title": "A replay",
            "replay": self.replay,
            "metrics": self.metrics,
            "gantt": self.gantt,
            "settings": {"allocator": "exact"},
            "provenance": {"version": "1", "seed": None, "inputs": {"T.parquet": "abc"}},
        }
        write_report(path / "r.html", **(asked | changes))
        return (path / "r.html").read_text()


def ran(trainers: tuple[Trainer, ...], window: Window | None = None, settings: ReplaySettings | None = None) -> Run:
    settings = settings or ReplaySettings()
    recorder = GanttRecorder(window or summit().window, summit().nodes)
    result = replay(summit(), trainers, settings, recorder.watch)
    return Run(result, measure(result, trainers, settings.policy), recorder.finish(result))


@cache
def usual() -> Run:
    return ran(workload())


class Tags(HTMLParser):
    """Refuses tags that do not close in the order they were opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.handle_startendtag(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_has_every_section_and_every_tag_closes(tmp_path: Path) -> None:
    tags = Tags(usual().page(tmp_path))
    assert tuple(name for name in tags.ids if name in SECTIONS) == SECTIONS
    assert tags.seen.count("svg") == 2
    assert tags.seen.count("canvas") == 2
    assert tags.seen.count("script") == 2


def test_the_page_without_a_gantt_has_the_other_sections(tmp_path: Path) -> None:
    ids = Tags(usual().page(tmp_path, gantt=None)).ids
    assert [name for name in ids if name in SECTIONS] == [s for s in SECTIONS if s != "gantt"]
    assert "gantt-canvas" not in ids


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    page = usual().page(tmp_path)
    assert not re.search(r"https?://|src=|href=|@import|url\(", page)
    assert list(tmp_path.iterdir()) == [tmp_path / "r.html"]


def test_the_headline_figures_are_those_of_the_metrics(tmp_path: Path) -> None:
    run = usual()
    text = " ".join(Tags(run.page(tmp_path)).text)
    metrics = run.metrics
    for figure in (
        f"{metrics.efficiency:.4f}",
        f"{metrics.bound:.4f}",
        f"{metrics.completed} of 30",
        f"{metrics.eq_nodes:.1f}",
        f"{metrics.decision_ms['p50']:.2f} ms",
        f"{metrics.resource_integral_node_hours:.0f}",
    ):
        assert figure in text


def test_the_breakdown_as_printed_adds_up_to_the_bound_as_printed(tmp_path: Path) -> None:
    page = usual().page(tmp_path)
    losses = page[page.index('id="losses"') : page.index('id="runs"')]
    numbers = [Decimal(n) for n in re.findall(r'<td class="n">(-?\d\.\d{4})</td>', losses)]
    assert len(numbers) == 6
    assert sum(numbers[:-1]) == numbers[-1] == Decimal(f"{usual().metrics.bound:.4f}")


@given(st.floats(0, 1.5), st.tuples(*[st.floats(0, 0.3)] * 4))
def test_parts_add_up_as_printed_whatever_they_are(reached: float, lost: tuple[float, float, float, float]) -> None:
    bound = reached + sum(lost)
    metrics = replace(usual().metrics, efficiency=reached, bound=bound, breakdown=Breakdown(*lost))
    parts = parts_of_bound(metrics)
    assert sum(Decimal(part.printed) for part in parts) == Decimal(f"{bound:.4f}")
    assert all(abs(float(part.printed) - part.amount) < 1.001e-4 for part in parts)


def test_names_are_escaped_wherever_they_come_from(tmp_path: Path) -> None:
    run = ran(workload(suffix=NASTY))
    gantt = replace(run.gantt, spans=tuple(replace(span, node=f"{span.node}{NASTY}") for span in run.gantt.spans))
    page = run.page(
        tmp_path,
        title=NASTY,
        gantt=gantt,
        settings={NASTY: NASTY},
        provenance={NASTY: {NASTY: NASTY}, "list": [NASTY]},
        notes=[NASTY, "a path that is no text: \udcff", "a bell: \a"],
    )
    tags = Tags(page)
    assert tags.seen.count("script") == 2
    assert tags.text.count(NASTY) >= 5
    assert "<script>alert" not in page
    assert "\a" not in page


def test_an_unfinished_workload_is_said_to_be_so(tmp_path: Path) -> None:
    page = run_of("unfinished").page(tmp_path)
    done = sum(row.end is not None for row in run_of("unfinished").replay.trainers)
    assert 0 < done < 30
    assert f"did not finish before the trace ended: {done} of 30 trainers completed" in page
    assert "The workload finished" not in page


def test_a_finished_workload_is_said_to_be_so(tmp_path: Path) -> None:
    page = usual().page(tmp_path)
    assert "The workload finished: all 30 trainers completed" in page
    assert "did not finish" not in page


def test_a_workload_that_never_got_a_node_makes_a_page(tmp_path: Path) -> None:
    start = summit().window.start
    trainers = (Trainer("large", PAPER_CURVES["AlexNet"], 64, 64, work=1e9, submit=start),)
    run = ran(trainers)
    assert run.replay.outcome == 0
    page = run.page(tmp_path)
    assert [name for name in Tags(page).ids if name in SECTIONS] == list(SECTIONS)
    assert "No trainer ran on any node" in page
    assert not re.search(r"\bnan\b", page)


WINDOWS = {  # hours since the start of the trace
    "all": (0.0, 12.0),
    "middle": (3.1, 6.7),
    "a minute": (6.0, 6.02),
    "into the end": (8.0, 12.0),
    "begins before": (-1.0, 1.0),
}
RUNS = {  # the work of each trainer, the seconds from one to the next, and how to replay
    "busy": (2e7, 300.0, ReplaySettings()),
    "pauses": (2e7, 1400.0, ReplaySettings()),
    "pool events only": (2e7, 1400.0, ReplaySettings(decide_on="pool", accounting="paper")),
    "unfinished": (1e8, 300.0, ReplaySettings()),
}


def window_of(name: str) -> Window:
    start = summit().window.start
    first, last = WINDOWS[name]
    return Window(start + first * HOUR, start + last * HOUR)


@cache
def run_of(name: str, window: str = "all") -> Run:
    work, gap_s, settings = RUNS[name]
    return ran(workload(work, gap_s), window_of(window), settings)


def used_node_seconds(line: Timeline, window: Window) -> float:
    """From the timeline alone."""
    total = 0.0
    for (time, used), (until, _) in pairwise(zip(line.time.tolist(), line.used.tolist(), strict=True)):
        total += used * max(min(until, window.end) - max(time, window.start), 0.0)
    return total


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("window", WINDOWS)
def test_spans_never_overlap_on_a_node_and_are_the_node_seconds_used(run: str, window: str) -> None:
    found = run_of(run, window)
    gantt, spans = found.gantt, found.gantt.spans
    expected = used_node_seconds(found.replay.timeline, window_of(window))
    assert math.isclose(math.fsum(span.seconds for span in spans), expected, rel_tol=1e-9, abs_tol=1e-3)
    assert all(gantt.window.start <= span.start < span.end <= gantt.window.end for span in spans)
    for one, other in pairwise(spans):
        assert one.node != other.node or one.end <= other.start


def test_the_workload_with_pauses_has_some() -> None:
    used = run_of("pauses").replay.timeline.used
    # Else the cases above that are called so would show nothing.
    assert (used[1:-1] == 0).sum() > 10


@pytest.mark.parametrize("run", RUNS)
def test_a_span_is_marked_preempted_where_its_node_leaves_before_its_trainer_ends(run: str) -> None:
    found = run_of(run)
    idle = {(f.node, f.start, f.end, f.open) for f in summit().fragments()}
    ends = {row.name: row.end for row in found.replay.trainers}
    for span in found.gantt.spans:
        inside = [f for f in idle if f[0] == span.node and f[1] <= span.start and span.end <= f[2]]
        assert len(inside) == 1
        left = span.end == inside[0][2] and not inside[0][3] and span.end != ends[span.trainer]
        assert span.preempted == left
    assert any(span.preempted for span in found.gantt.spans)


def test_a_gantt_keeps_only_the_nodes_it_was_asked_for_and_their_order() -> None:
    nodes = summit().nodes[40:20:-1]
    recorder = GanttRecorder(summit().window, nodes)
    gantt = recorder.finish(replay(summit(), workload(), watch=recorder.watch))
    expected = [span for span in usual().gantt.spans if span.node in nodes]
    expected.sort(key=lambda span: nodes.index(span.node))
    assert list(gantt.spans) == expected


def test_a_trainer_has_the_same_colour_in_every_window() -> None:
    def places(window: str) -> dict[str, int]:
        found = run_of("busy", window)
        return {one["name"]: one["place"] for one in gantt_data(found.gantt, found.replay.timeline)["who"]}

    all_of_it, middle = places("all"), places("middle")
    assert middle.items() <= all_of_it.items()
    assert len(set(all_of_it.values())) == 30


def held(data: dict[str, Any]) -> dict[str, float]:
    """Seconds by trainer, as drawn."""
    second = (data["end"] - data["start"]) / data["cells"]
    found = {one["name"]: 0.0 for one in data["who"]}
    for runs in data["runs"]:
        for length, who in zip(runs[1::3], runs[2::3], strict=True):
            if who > 0:
                found[data["who"][who - 1]["name"]] += length * second
    return found


@pytest.mark.parametrize("run", RUNS)
def test_what_is_drawn_is_what_the_spans_say(run: str) -> None:
    found = run_of(run)
    data = gantt_data(found.gantt, found.replay.timeline, summit())
    cell_s = (data["end"] - data["start"]) / data["cells"]
    for name, seconds in held(data).items():
        spans = [span for span in found.gantt.spans if span.trainer == name]
        # The end of each span is moved by half a cell at most, at either side.
        assert abs(seconds - sum(span.seconds for span in spans)) <= cell_s * len(spans)
    assert sum(count for _, count in data["preemptions"]) == sum(span.preempted for span in found.gantt.spans)
    free = any(who == 0 for runs in data["runs"] for who in runs[2::3])
    assert free or run in ("busy", "unfinished")
    assert [node for node in summit().nodes if node in data["nodes"]] == data["nodes"]


def crowded(nodes: int, each: int) -> Gantt:
    spans = [
        Span(f"n{n}", f"t{(n + i) % 900}", 100.0 * i, 100.0 * i + 20 + n / nodes + i / each, preempted=i % 2 == 0)
        for n in range(nodes)
        for i in range(each)
    ]
    return Gantt(Window(0, 100.0 * each), tuple(spans), {f"t{i}": i for i in range(900)})


def test_of_very_many_nodes_some_are_shown_and_it_says_so() -> None:
    gantt = crowded(4000, 3)
    data = gantt_data(gantt, usual().replay.timeline)
    assert data["of_nodes"] == 4000
    assert data["nodes"] == [f"n{i}" for i in range(0, 4000, 3)]
    assert "Shown: 1,334 of 4,000 nodes" in what_is_shown(gantt, len(data["nodes"]))
    assert "Shown" not in what_is_shown(gantt, 4000)


def test_a_page_of_two_weeks_and_a_thousand_trainers_is_under_a_megabyte(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    steps, start, end = 30_000, 0.0, 14 * 24 * HOUR
    time = np.sort(rng.uniform(start, end, steps))
    time[0], time[-1] = start, end
    pool = rng.integers(0, 1000, steps).astype(float)
    flags, none = np.ones(steps, dtype=bool), np.zeros(steps)
    line = Timeline(time, pool, pool // 2, pool, pool * 1.1, np.cumsum(pool), none, none, flags, flags)
    rows = tuple(TrainerSummary(f"trainer-{i:05}", f"model-{i % 500}", start, start, end, 1e9) for i in range(1000))
    run = usual()
    big = replace(run.replay, start=start, end=end, trainers=rows, timeline=line)
    page = run.page(tmp_path, replay=big, metrics=replace(run.metrics, hours=336.0), gantt=crowded(1000, 120))
    Tags(page)
    assert 100_000 < len(page.encode()) < 1_000_000


@pytest.mark.parametrize("objective", ["throughput", "efficiency"])
@pytest.mark.parametrize("accounting", ["paper", "stall"])
def test_what_is_made_by_the_hour_adds_up_to_what_is_made(objective: str, accounting: Any, tmp_path: Path) -> None:
    policy = Policy(objective=efficiency) if objective == "efficiency" else Policy()
    run = ran(workload(), settings=ReplaySettings(policy, accounting))
    edges = np.append(np.arange(run.replay.start, run.replay.end, HOUR), run.replay.end)
    made, best = made_and_best(run.replay, edges)
    assert math.isclose(made.sum(), run.replay.value, rel_tol=1e-9)
    assert math.isclose(best.sum(), run.replay.best_value, rel_tol=1e-9)
    assert (made <= best * (1 + 1e-9)).all()
    # The bars, weighted by what was possible, average to U.
    assert math.isclose(made.sum() / best.sum() * run.metrics.bound, run.metrics.efficiency, rel_tol=1e-9)
    assert ("estimates" in run.page(tmp_path)) == (objective == "efficiency")


def test_bars_are_of_six_hours_unless_there_would_be_few_or_too_many() -> None:
    assert [span_hours(hours) for hours in (5, 24, 336, 1440, 8760, 10**5)] == [1, 6, 6, 6, 168, 168]


def test_bins_hold_the_lowest_mean_and_highest_of_what_held_in_them() -> None:
    # The 5 held for no time at all, so nobody must see it.
    time, column = np.array([10.0, 15, 15, 30]), np.array([2.0, 5, 7, 0])
    low, mean, high = binned(time, column, np.array([0.0, 10, 20, 30]))
    assert low.tolist() == [0, 2, 7]
    assert mean.tolist() == [0, 4.5, 7]
    assert high.tolist() == [0, 7, 7]


@given(st.floats(0, 4e9), st.floats(1, 1e9))
def test_time_ticks_are_few_round_and_inside(start: float, seconds: float) -> None:
    step, ticks = time_ticks(Window(start, start + seconds))
    assert len(ticks) <= 15
    assert all(start <= tick <= start + seconds and tick % step == 0 for tick in ticks)


@given(st.floats(-100, 0), st.floats(1e-3, 1e7))
def test_value_ticks_are_few_and_inside(low: float, high: float) -> None:
    ticks = value_ticks(low, high)
    assert 1 <= len(ticks) <= 8
    assert all(low - 1e-6 * (high - low) <= tick <= high * (1 + 1e-6) for tick in ticks)


def test_a_long_name_keeps_both_its_ends() -> None:
    assert shortened("abcdefghij", 5) == "ab…ij"
    assert shortened("abc", 5) == "abc"
