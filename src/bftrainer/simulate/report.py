"""Report page of a simulation: figures, charts and tables in one HTML file that works offline.

`bftrainer simulate --report` calls `write_report` with a replay and its metrics. The page is made of the parts of
`dashboard/html.py` and has its data as JSON for the live page's drawing code; other charts are inline SVG
(`charts.py`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bftrainer.core.trace import Trace, utc
from bftrainer.dashboard import html
from bftrainer.dashboard.html import Markup, escape
from bftrainer.simulate.charts import draw_breakdown, draw_efficiency, parts_of_bound, pool_data, pool_words, printed
from bftrainer.simulate.gantt import Gantt, gantt_data, what_is_shown
from bftrainer.simulate.metrics import Metrics
from bftrainer.simulate.replay import Replay, TrainerSummary
from bftrainer.simulate.svg import shortened
from bftrainer.traces.files import writing

_ENDS = 20
_MOST_MODELS = 60


def write_report(
    path: Path,
    *,
    title: str,
    replay: Replay,
    metrics: Metrics,
    gantt: Gantt | None,
    settings: Mapping[str, str],
    provenance: Mapping[str, Any],
    notes: Sequence[str] = (),
    idle: Trace | None = None,
) -> None:
    """Write the page to `path`, completely or not at all. With the trace, `idle`, it also shows free times of nodes."""
    data = {
        "pool": pool_data(replay),
        "gantt": gantt_data(gantt, replay.timeline, idle) if gantt is not None and gantt.spans else None,
    }
    drawn = data["gantt"]
    sections = [
        html.section("figures", "Figures", _figures(replay, metrics)),
        html.section("efficiency", "Efficiency over time", draw_efficiency(replay, metrics)),
        html.section(
            "pool", "Pool and nodes used", _canvas("pool", pool_words(replay, metrics), data["pool"] is not None)
        ),
        html.section("losses", "Where the distance from the bound goes", _losses(metrics)),
        html.section("runs", "Run times", _runs(replay.trainers)),
    ]
    if gantt is not None:
        words = what_is_shown(gantt, len(drawn["nodes"]) if drawn else 0)
        sections.append(html.section("gantt", "Trainers on nodes", _canvas("gantt", words, drawn is not None)))
    sections.append(html.section("settings", "How this was made", _settings(settings, provenance)))
    remarks = "".join(f'<p class="note">{escape(note)}</p>\n' for note in notes)
    lead = (
        f"<p>{utc(replay.start)} to {utc(replay.end)} UTC, {metrics.hours:,.1f} hours</p>\n{_ending(replay)}{remarks}"
    )
    page = html.page(title, lead, sections, data)
    with writing(path, "wb") as out:
        # A file name from the command line may not be valid text; the report must be written all the same.
        out.write(page.encode("utf-8", "replace"))


def _canvas(name: str, words: str, drawn: bool) -> str:
    """A description, and below it the placeholder of a chart that the page's script draws."""
    picture = (
        f'<div class="chart"><canvas id="{name}-canvas" role="img" aria-label="{escape(words)}"></canvas>'
        f'<div class="tip" hidden="hidden"></div></div>\n<ul class="legend" id="{name}-legend"></ul>\n'
    )
    return f"<p>{escape(words)}</p>\n{picture if drawn else ''}"


def _ending(replay: Replay) -> str:
    rows = replay.trainers
    done = sum(row.end is not None for row in rows)
    if replay.finished:
        return f'<p class="done">The workload finished: all {len(rows):,} trainers completed.</p>\n'
    begun = sum(row.start is not None and row.end is None for row in rows)
    return (
        f'<p class="cut">The workload did not finish before the trace ended: {done:,} of {len(rows):,} trainers '
        f"completed, {begun:,} were under way and {len(rows) - done - begun:,} had not started. "
        "All figures are of what was done until then.</p>\n"
    )


def _figures(replay: Replay, metrics: Metrics) -> str:
    ms = metrics.decision_ms
    used_hours = replay.used_node_seconds / 3600
    run_hours = "–" if metrics.mean_run_hours is None else f"{metrics.mean_run_hours:,.2f} h"
    spread = "" if metrics.run_hours_spread is None else f"mean; spread {metrics.run_hours_spread:.2f}"
    figures = [
        ("Efficiency U", printed(metrics.efficiency), "time a static pool of equal node-hours needs ÷ time taken"),
        ("Bound", printed(metrics.bound), "U if every change were free and at once"),
        ("Completed", f"{metrics.completed:,} of {len(replay.trainers):,}", "trainers"),
        ("Hours", f"{metrics.hours:,.1f}", "the workload finished" if metrics.finished else "until the trace ended"),
        ("Eq-nodes", f"{metrics.eq_nodes:,.1f}", "static nodes of equal node-hours"),
        ("Resource integral", f"{metrics.resource_integral_node_hours:,.0f}", "node-hours of the pool"),
        ("Node-hours used", f"{used_hours:,.0f}", f"{1 - metrics.unoccupied_share:.1%} of the pool's"),
        ("Outcome", html.amount(metrics.outcome_samples), "samples"),
        ("Run time", run_hours, spread),
        ("Pool events", f"{metrics.events:,}", f"{metrics.events / max(metrics.hours, 1e-9):,.1f} per hour"),
        ("Decision latency", f"{ms['p50']:.2f} ms", f"median; 99 % {ms['p99']:.2f} ms, most {ms['max']:.2f} ms"),
        ("Decisions", f"{metrics.decisions:,}", f"the replay took {metrics.wall_s:,.1f} s"),
    ]
    return html.tiles(figures)


def _losses(metrics: Metrics) -> str:
    rows = [
        (
            Markup(f'<i style="background:{part.colour}"></i>{escape(part.name)}'),
            part.printed,
            html.amount(metrics.outcome_samples if part.name == "U" else part.samples),
            part.meaning,
        )
        for part in parts_of_bound(metrics)
    ]
    total = ("Bound", printed(metrics.bound), "", "their sum: every change free and at once")
    table = html.table(("", "unit of U", "samples", ""), rows, numbers=(1, 2), total=total)
    return f"<p>The bound as one bar; below it its losses alone, enlarged.</p>\n{draw_breakdown(metrics)}{table}"


def _runs(trainers: Sequence[TrainerSummary]) -> str:
    by_model: defaultdict[str, list[TrainerSummary]] = defaultdict(list)
    for row in trainers:
        by_model[row.model].append(row)
    models = sorted(by_model, key=lambda model: (-len(by_model[model]), model))
    rows = [(shortened(model) or "–", *_run_figures(by_model[model])) for model in models[:_MOST_MODELS]]
    more = f"<p>The {_MOST_MODELS} most frequent of {len(models):,} models.</p>\n" if len(models) > _MOST_MODELS else ""
    head = ("Model", "trainers", "completed", "mean h", "median h", "min h", "max h")
    table = html.table(head, rows, numbers=range(1, 7), total=("All", *_run_figures(trainers)))
    return (
        "<p>From the time a trainer is first considered to its end, of those that completed, in hours.</p>\n"
        f"{table}{more}{_ends(trainers)}"
    )


def _run_figures(rows: Sequence[TrainerSummary]) -> tuple[str, ...]:
    hours = [row.run_hours for row in rows if row.run_hours is not None]
    figures = [f"{f(hours):,.2f}" for f in (fmean, median, min, max)] if hours else ["–"] * 4
    return (f"{len(rows):,}", f"{len(hours):,}", *figures)


def _ends(trainers: Sequence[TrainerSummary]) -> str:
    """The first and the last trainers by submission; all of them if they are few."""
    head = ("Trainer", "model", "submitted", "started", "ended", "run h", "samples")
    cells = [
        (
            shortened(row.name),
            shortened(row.model) or "–",
            *(("–" if time is None else utc(time).replace("T", " ")) for time in (row.submit, row.start, row.end)),
            "–" if row.run_hours is None else f"{row.run_hours:,.2f}",
            html.amount(row.samples),
        )
        for row in (trainers if len(trainers) <= 2 * _ENDS else (*trainers[:_ENDS], *trainers[-_ENDS:]))
    ]
    if len(trainers) <= 2 * _ENDS:
        return html.fold(f"All {len(trainers):,} trainers, as submitted", html.table(head, cells, numbers=(5, 6)))
    first, last = (html.table(head, some, numbers=(5, 6)) for some in (cells[:_ENDS], cells[_ENDS:]))
    return html.fold(f"The first {_ENDS} trainers submitted", first) + html.fold(
        f"The last {_ENDS} of {len(trainers):,} trainers submitted", last
    )


def _settings(settings: Mapping[str, str], provenance: Mapping[str, Any]) -> str:
    facts = list(settings.items())
    for key, value in provenance.items():
        entries = value.items() if isinstance(value, Mapping) else [("", value)]
        facts += [(f"{key} {part}".strip(), _plain(entry)) for part, entry in entries]
    return html.fold("Settings and provenance", html.table(("", ""), facts))


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
