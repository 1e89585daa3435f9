from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.core.curve import Curve
from bftrainer.core.pool import Fragment
from bftrainer.core.trace import Trace, Window
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError
from bftrainer.simulate.rigid import RigidResult, RigidRow, simulate_rigid
from bftrainer.traces.files import load_trace
from bftrainer.traces.times import Clock

LINEAR = Curve.through([64], [64.0])  # a sample a second on each node


def trace_of(end: float = 100, **idle: list[tuple[float, float]]) -> Trace:
    """Nodes by name with their idle periods; what reaches the end of the window is open there."""
    fragments = [Fragment(node, a, b, open=b == end) for node, spans in idle.items() for a, b in spans]
    return Trace.from_fragments(fragments, nodes=list(idle), window=Window(0, end))


def job(name: str, work: float = math.inf, **fields: Any) -> Trainer:
    return Trainer(name, LINEAR, work=work, **fields)


def run(trace: Trace, *trainers: Trainer, **settings: Any) -> RigidResult:
    usual = {"nodes": 1, "max_parallel": 10, "checkpoint_s": 10}
    return simulate_rigid(trace, trainers, **{**usual, **settings})


def test_a_job_waits_until_enough_nodes_are_idle() -> None:
    result = run(trace_of(a=[(0, 100)], b=[(30, 100)]), job("j", 40), nodes=2)
    assert result.trainers == (RigidRow("j", 30, 50, 40),)
    assert (result.completed, result.hours) == (1, 50 / 3600)
    assert (result.node_seconds_held, result.node_seconds_offered) == (40, 50 + 20)


def test_a_kill_loses_what_was_done_since_the_last_checkpoint() -> None:
    result = run(trace_of(a=[(0, 27)]), job("j"))
    assert (result.kills, result.outcome_samples, result.lost_samples) == (1, 20, 7)


def test_a_kill_at_the_moment_of_a_checkpoint_loses_nothing() -> None:
    result = run(trace_of(a=[(0, 20)]), job("j"))
    assert (result.kills, result.outcome_samples, result.lost_samples) == (1, 20, 0)


def test_a_job_without_checkpoints_starts_from_nothing() -> None:
    result = run(trace_of(a=[(0, 27), (40, 60)]), job("j", 30), checkpoint_s=math.inf)
    assert (result.kills, result.outcome_samples, result.lost_samples) == (2, 0, 47)


def test_a_killed_job_goes_on_from_its_checkpoint_and_starts_up_again() -> None:
    result = run(trace_of(a=[(0, 27), (40, 100)]), job("j", 30, up_s=3))
    # 24 s of producing, 20 of them saved; 10 samples are left when it starts again at 40 + 3.
    assert result.trainers == (RigidRow("j", 0, 53, 30),)
    assert result.lost_samples == 4


def test_start_up_produces_nothing_and_does_not_count_towards_a_checkpoint() -> None:
    result = run(trace_of(a=[(0, 16)], b=[(20, 23)]), job("j", up_s=7))
    assert (result.kills, result.outcome_samples, result.lost_samples) == (2, 0, 9)
    assert result.node_seconds_held == 16 + 3


def test_one_leaving_node_kills_the_job_and_frees_the_others() -> None:
    result = run(trace_of(a=[(0, 15)], b=[(0, 100)]), job("two", min_nodes=2), job("one", 100, max_nodes=1))
    assert [(r.name, r.nodes, r.start, r.end) for r in result.runs] == [("two", ("a", "b"), 0, 15)]
    # "two" is at the head again and waits for two nodes for ever, so "one" does not run on the free one.
    assert result.trainers == (RigidRow("two", 0, None, 20), RigidRow("one", None, None, 0))


def test_nodes_freed_by_a_kill_serve_another_run_at_once() -> None:
    trace = trace_of(a=[(0, 15)], b=[(0, 100)], c=[(1, 100)])
    result = run(trace, job("j", min_nodes=2))
    assert [(r.nodes, r.start, r.killed) for r in result.runs] == [(("a", "b"), 0, True), (("b", "c"), 15, False)]


def test_the_head_of_the_queue_blocks_smaller_jobs_behind_it() -> None:
    result = run(trace_of(a=[(0, 100)], b=[(60, 100)]), job("big", 20, min_nodes=2), job("small", 10, max_nodes=1))
    assert result.trainers == (RigidRow("big", 60, 70, 20), RigidRow("small", 70, 80, 10))


def test_jobs_are_served_in_the_order_of_submission() -> None:
    result = run(
        trace_of(a=[(0, 100)]), job("late", 10, submit=5), job("early", 10, submit=-5), job("after", 1, submit=200)
    )
    assert result.trainers == (
        RigidRow("early", 0, 10, 10),
        RigidRow("late", 10, 20, 10),
        RigidRow("after", None, None, 0),
    )
    assert result.hours == 100 / 3600


def test_finishing_frees_the_nodes_for_the_next_job() -> None:
    result = run(trace_of(a=[(0, 100)]), job("first", 10), job("second", 10))
    assert [(row.start, row.end) for row in result.trainers] == [(0, 10), (10, 20)]
    assert (result.kills, result.completed, result.hours) == (0, 2, 20 / 3600)


def test_no_more_jobs_run_at_once_than_allowed() -> None:
    jobs = [job(f"j{i}", 10) for i in range(3)]
    result = run(trace_of(a=[(0, 100)], b=[(0, 100)], c=[(0, 100)]), *jobs, max_parallel=2)
    assert [row.start for row in result.trainers] == [0, 0, 10]


def test_a_job_that_finishes_when_its_node_leaves_is_not_killed() -> None:
    result = run(trace_of(a=[(0, 25)]), job("j", 25))
    assert (result.kills, result.completed, result.lost_samples) == (0, 1, 0)


def test_what_a_job_still_alive_at_the_end_has_done_counts() -> None:
    result = run(trace_of(a=[(0, 100)]), job("j", up_s=5))
    assert (result.outcome_samples, result.lost_samples, result.completed) == (95, 0, 0)
    assert result.trainers == (RigidRow("j", 0, None, 95),)


def test_a_leave_seen_at_the_very_end_still_kills() -> None:
    trace = Trace.from_fragments([Fragment("a", 0, 15), Fragment("b", 0, 15, open=True)])
    result = run(trace, job("on a"), job("on b"))
    assert [row.samples for row in result.trainers] == [10, 15]


def test_the_size_is_kept_within_each_trainers_limits() -> None:
    nodes = {name: [(0.0, 100.0)] for name in "abcdef"}
    result = run(trace_of(**nodes), job("low", max_nodes=1), job("mid"), job("high", min_nodes=3), nodes=2)
    assert [len(r.nodes) for r in result.runs] == [1, 2, 3]


def test_a_job_takes_the_nodes_that_are_idle_longest() -> None:
    result = run(trace_of(a=[(0, 2), (8, 100)], b=[(5, 100)], c=[(5, 100)], d=[(1, 100)]), job("j", submit=10), nodes=3)
    assert result.runs[0].nodes == ("d", "b", "c")


def test_a_guarantee_makes_the_main_queue_wait_and_the_wait_is_counted() -> None:
    result = run(trace_of(a=[(0, 12)], b=[(0, 100)]), job("j"), nodes=2, guaranteed=((2, 40),))
    assert (result.kills, result.delayed_leaves, result.delay_node_seconds) == (1, 1, 28)
    assert (result.outcome_samples, result.runs[0].end) == (80, 40)


def test_a_delay_ends_when_the_job_finishes() -> None:
    result = run(trace_of(a=[(0, 12)]), job("j", 20), guaranteed=((1, 40),))
    assert (result.kills, result.delayed_leaves, result.delay_node_seconds) == (0, 1, 8)


def test_a_delay_ends_when_the_node_is_idle_again_and_the_job_lives_on() -> None:
    result = run(trace_of(a=[(0, 12), (30, 70)]), job("j"), guaranteed=((1, 40),))
    assert (result.delayed_leaves, result.delay_node_seconds) == (1, 18)
    assert [(r.start, r.end, r.killed) for r in result.runs] == [(0, 70, True)]


def test_a_node_that_came_back_while_held_is_free_when_released() -> None:
    result = run(trace_of(a=[(0, 12), (15, 100)]), job("first", 20), job("second", 20), guaranteed=((1, 40),))
    assert [(r.name, r.start, r.end) for r in result.runs] == [("first", 0, 20), ("second", 20, 40)]
    assert result.delay_node_seconds == 3


def test_a_delay_that_lasts_is_counted_until_the_trace_ends() -> None:
    result = run(trace_of(a=[(0, 12)], end=30), job("j"), guaranteed=((1, math.inf),))
    assert (result.kills, result.delayed_leaves, result.delay_node_seconds, result.outcome_samples) == (0, 1, 18, 30)


def test_a_leave_when_the_guarantee_is_over_kills_at_once() -> None:
    result = run(trace_of(a=[(0, 40)]), job("j"), guaranteed=((1, 40),))
    assert (result.kills, result.delayed_leaves, result.delay_node_seconds) == (1, 0, 0)


def test_a_node_that_comes_back_as_the_guarantee_ends_comes_too_late() -> None:
    result = run(trace_of(a=[(0, 12), (40, 100)]), job("j"), guaranteed=((1, 40),))
    assert [(r.start, r.end, r.killed) for r in result.runs] == [(0, 40, True), (40, 100, False)]


def test_nothing_starts_when_the_trace_ends() -> None:
    result = run(trace_of(a=[(0, 100)]), job("j", submit=100))
    assert (result.runs, result.trainers) == ((), (RigidRow("j", None, None, 0),))


def test_the_guarantee_depends_on_the_size_of_the_job() -> None:
    steps = ((1, 20.0), (3, 30.0))
    ends = []
    for size in (1, 2, 3, 4):
        nodes = {f"n{i}": [(0.0, 10.0)] for i in range(size)}
        ends.append(run(trace_of(**nodes), job("j"), nodes=size, guaranteed=steps).runs[0].end)
    assert ends == [20, 30, 30, 10]


def test_a_node_whose_open_fragment_is_followed_by_another_is_one_node() -> None:
    fragments = [Fragment("a", 0, 10, open=True), Fragment("a", 20, 30)]
    result = run(Trace.from_fragments(fragments), job("j"), job("k"))
    assert [(r.name, r.start, r.end) for r in result.runs] == [("j", 0, 30)]


def test_rounding_never_carries_a_job_past_its_work() -> None:
    # 12.5 samples at 2.7 a second after 2.4 s of start-up: a hair before the end the plain product is above 12.5.
    trace = trace_of(math.nextafter(2.4 + 12.5 / 2.7, 0), a=[(0, math.nextafter(2.4 + 12.5 / 2.7, 0))])
    result = run(trace, Trainer("j", Curve.through([1], [2.7]), work=12.5, up_s=2.4))
    assert (result.completed, result.outcome_samples) == (0, 12.5)


def test_an_empty_workload_is_over_at_once() -> None:
    result = run(trace_of(a=[(0, 100)]))
    assert (result.hours, result.outcome_samples, result.trainers) == (0, 0, ())


def test_a_job_that_makes_no_progress_never_finishes() -> None:
    result = run(trace_of(a=[(0, 100)]), Trainer("j", Curve.through([1], [0.0]), work=1))
    assert (result.completed, result.outcome_samples, result.node_seconds_held) == (0, 0, 100)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 0}, "`nodes` must be 1 or more, but got 0"),
        ({"max_parallel": 0}, "`max_parallel` must be 1 or more"),
        ({"checkpoint_s": -1}, "`checkpoint_s` must be a number of seconds, 0 or more"),
        ({"checkpoint_s": math.nan}, "`checkpoint_s` must be"),
        ({"guaranteed": ((4, -1.0),)}, "seconds of 0 or more, but got -1.0 for 4 nodes"),
        ({"guaranteed": ((4, math.nan),)}, "seconds of 0 or more"),
        ({"guaranteed": ((-4, 1.0),)}, "job sizes that rise"),
        ({"guaranteed": ((4, 1.0), (4, 2.0))}, "job sizes that rise"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(trace_of(a=[(0, 100)]), job("j"), **settings)


END = 60
Steps = tuple[tuple[int, float], ...]
STEPS = st.sampled_from([(), ((1, 7.0),), ((2, 15.0),), ((1, 4.0), (3, 20.0)), ((3, math.inf),)])
PARALLEL, PERIODS = st.integers(1, 3), st.sampled_from([1.0, 4.0, 7.0, math.inf])


@st.composite
def traces(draw: st.DrawFn, number: Callable[[int, int], st.SearchStrategy[float]] = st.integers) -> Trace:
    """A few nodes whose state flips now and then, sometimes leaving and coming back in one instant."""
    idle = {}
    for node in "abcd"[: draw(st.integers(1, 4))]:
        times = sorted(draw(st.lists(number(0, END), max_size=8)))
        idle[node] = [(a, b) for a, b in itertools.pairwise(times) if a < b and draw(st.integers(0, 3))]
    return trace_of(END, **idle)


@st.composite
def workloads(draw: st.DrawFn, number: Callable[[int, int], st.SearchStrategy[float]] = st.integers) -> list[Trainer]:
    """Jobs of 1 to 3 nodes that work for a number of seconds: with whole ones all happens at whole seconds."""
    jobs = []
    for i in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 3))
        work = size * draw(number(1, 30) | st.just(math.inf))
        up_s, submit = draw(number(0, 4)), draw(number(-5, 30))
        jobs.append(job(f"j{i}", work, min_nodes=size, max_nodes=size, up_s=up_s, submit=submit))
    return jobs


def brute(trace: Trace, trainers: list[Trainer], parallel: int, period: float, steps: Steps) -> list[object]:
    """The same rules told second by second, with nothing but a loop over nodes and jobs."""
    spans = [(trace.nodes.index(f.node), f.start, f.end, f.open) for f in trace.fragments()]
    order = sorted(trainers, key=lambda t: t.submit)
    alive: dict[int, tuple[float, list[int]]] = {}
    done, ends = [0.0] * len(order), [None] * len(order)
    lost = kills = delayed = delay = held = 0.0

    def produced(j: int, now: float) -> float:
        return max(0.0, now - alive[j][0] - order[j].up_s) * order[j].min_nodes

    for now in range(END + 1):
        for j in [j for j in alive if done[j] + produced(j, now) == order[j].work]:
            done[j], ends[j] = order[j].work, now
            del alive[j]
        leaving = {n for n, _, end, is_open in spans if end == now and not is_open}
        before = {n for n, start, end, _ in spans if start < now < end or (now == end == END and n not in leaving)}
        idle = {n for n, start, end, is_open in spans if start <= now < end or (is_open and now == end)}
        for j, (start, nodes) in list(alive.items()):
            sure = now < start + next((s for top, s in steps if len(nodes) <= top), 0.0)
            if sure:
                delayed += len(leaving & set(nodes))
            elif not set(nodes) <= before:
                whole = produced(j, now)
                part = len(nodes) * period
                saved = whole if part == 0 else (whole // part * part if whole >= part else 0.0)
                done[j], lost, kills = done[j] + saved, lost + whole - saved, kills + 1
                del alive[j]
        if None not in ends or now == END:
            break
        since = {n: max(start for m, start, _, _ in spans if m == n and start <= now) for n in idle}
        for j in range(len(order)):
            if ends[j] is None and j not in alive and order[j].submit <= now:
                free = sorted(idle - {n for _, nodes in alive.values() for n in nodes}, key=lambda n: (since[n], n))
                if len(alive) == parallel or len(free) < order[j].min_nodes:
                    break
                alive[j] = now, free[: order[j].min_nodes]
        held += sum(len(nodes) for _, nodes in alive.values())
        delay += sum(len(set(nodes) - idle) for _, nodes in alive.values())
    done = [d + produced(j, now) if j in alive else d for j, d in enumerate(done)]
    return [done, ends, lost, kills, delayed, delay, held, now]


@given(traces(), workloads(), PARALLEL, PERIODS, STEPS)
def test_every_figure_is_that_of_a_second_by_second_account(
    trace: Trace, jobs: list[Trainer], parallel: int, period: float, steps: Steps
) -> None:
    r = run(trace, *jobs, max_parallel=parallel, checkpoint_s=period, guaranteed=steps)
    figures = [[row.samples for row in r.trainers], [row.end for row in r.trainers], r.lost_samples, r.kills]
    figures += [r.delayed_leaves, r.delay_node_seconds, r.node_seconds_held, round(r.hours * 3600)]
    assert figures == brute(trace, jobs, parallel, period, steps)


@given(traces(st.floats), workloads(st.floats), PARALLEL, st.floats(0.1, 20), STEPS)
def test_what_must_hold_of_any_run_holds(
    trace: Trace, jobs: list[Trainer], parallel: int, period: float, steps: Steps
) -> None:
    settings = {"max_parallel": parallel, "checkpoint_s": period, "guaranteed": steps}
    result = run(trace, *jobs, **settings)
    assert result.node_seconds_held <= result.node_seconds_offered + result.delay_node_seconds + 1e-6
    work = {trainer.name: trainer.work for trainer in jobs}
    assert all(0 <= row.samples <= work[row.name] for row in result.trainers)
    assert all((row.end is not None) <= (row.samples == work[row.name]) for row in result.trainers)
    assert result.completed == sum(row.end is not None for row in result.trainers)
    assert result.outcome_samples == sum(row.samples for row in result.trainers)
    assert result.lost_samples >= 0
    if not steps:
        assert (result.delayed_leaves, result.delay_node_seconds) == (0, 0)
    by_start = sorted(result.runs, key=lambda r: r.start)
    for first, second in itertools.combinations(by_start, 2):
        if second.start < first.end:
            assert first.name != second.name
            assert not set(first.nodes) & set(second.nodes)
    for one in result.runs:
        assert sum(other.start <= one.start < other.end for other in result.runs) <= parallel
    assert result == run(trace, *jobs, **settings)


@given(traces(), workloads(), st.sampled_from([2.0, 5.0, 7.0]), st.integers(2, 4))
def test_a_lone_job_never_loses_more_when_checkpoints_are_added(
    trace: Trace, jobs: list[Trainer], period: float, times: int
) -> None:
    # With several jobs this need not hold: one that finishes sooner lets the next start, and die, sooner.
    often, seldom = (run(trace, jobs[0], checkpoint_s=s) for s in (period, period * times))
    assert often.lost_samples <= seldom.lost_samples
    assert often.outcome_samples >= seldom.outcome_samples


@pytest.fixture(scope="module")
def summit(shared_data: Path) -> tuple[Trace, list[Trainer]]:
    """The paper's first 1024 nodes and its thousand trials of one model."""
    folder, clock = shared_data / "summit", Clock()
    trace = load_trace(folder / "fragments.parquet")
    trace = trace.select(trace.nodes[:1024]).clip(Window(clock("2021-02-10T20:21:15"), trace.window.end))
    points = json.loads((folder / "curves.json").read_text())["shufflenet"]
    curve = Curve.through(points["nodes"], points["samples_per_s"])
    rows = csv.DictReader((folder / "hpo-shufflenet-1000.csv").read_text().splitlines())
    settings = (
        ("min_nodes", int),
        ("max_nodes", int),
        ("scale_up_s", float),
        ("scale_down_s", float),
        ("samples", float),
    )
    return trace, [
        Trainer(row["name"], curve, *(number(row[key]) for key, number in settings), clock(row["submit"]))
        for row in rows
    ]


@pytest.mark.parametrize(("size", "completed", "kills"), [(8, 345, 8286), (32, 511, 4858)])
def test_on_summit_a_rigid_queue_loses_more_than_it_keeps(
    summit: tuple[Trace, list[Trainer]], size: int, completed: int, kills: int
) -> None:
    trace, trials = summit
    result = run(trace, *trials, nodes=size, checkpoint_s=1800)
    assert (result.completed, result.kills, result.delayed_leaves) == (completed, kills, 0)
    assert result.lost_samples > result.outcome_samples


@pytest.mark.parametrize(("size", "hours", "delay_node_hours"), [(8, 211.67, 9442.6), (32, 151.67, 6224.4)])
def test_on_summit_a_guarantee_of_two_hours_is_paid_for_by_the_main_queue(
    summit: tuple[Trace, list[Trainer]], size: int, hours: float, delay_node_hours: float
) -> None:
    trace, trials = summit
    result = run(trace, *trials, nodes=size, checkpoint_s=1800, guaranteed=((45, 7200.0),))
    # A trial fits into two hours at both sizes, so none is ever killed.
    assert (result.completed, result.kills) == (1000, 0)
    assert result.hours == pytest.approx(hours, abs=0.01)
    assert result.delay_node_seconds / 3600 == pytest.approx(delay_node_hours, abs=0.1)
