"""The page of a simulation: figures, charts and tables in one HTML file that needs nothing else, online or off.

`bftrainer simulate --report` calls `write_report` with a replay and its metrics. Charts are inline SVG (`charts.py`,
`gantt.py`); every text that comes from outside is escaped here or there.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bftrainer.core.trace import utc
from bftrainer.simulate.charts import draw_breakdown, draw_efficiency, draw_pool, parts_of_bound, printed
from bftrainer.simulate.gantt import Gantt, draw_gantt
from bftrainer.simulate.metrics import Metrics
from bftrainer.simulate.replay import Replay, TrainerRow
from bftrainer.simulate.svg import escape, shortened
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
) -> None:
    """Write the page to `path`, whole or not at all."""
    sections = [
        _section("figures", "Figures", _figures(replay, metrics)),
        _section("efficiency", "Efficiency over time", draw_efficiency(replay, metrics)),
        _section("pool", "Pool and nodes used", draw_pool(replay, metrics)),
        _section("losses", "Where the distance from the bound goes", _losses(metrics)),
        _section("runs", "Run times", _runs(replay.trainers)),
    ]
    if gantt is not None:
        sections.append(_section("gantt", "Trainers on nodes", draw_gantt(gantt)))
    sections.append(_section("settings", "How this was made", _settings(settings, provenance)))
    remarks = "".join(f'<p class="note">{escape(note)}</p>\n' for note in notes)
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        '<meta name="color-scheme" content="light dark"/>\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{escape(title)}</h1>\n"
        f"<p>{utc(replay.start)} to {utc(replay.end)} UTC, {metrics.hours:,.1f} hours</p>\n"
        f"{_ending(replay)}{remarks}</header>\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )
    with writing(path, "wb") as out:
        # A file name of the command line may hold what is no text; it must not cost the report.
        out.write(page.encode("utf-8", "replace"))


def _section(name: str, heading: str, body: str) -> str:
    return f'<section id="{name}">\n<h2>{escape(heading)}</h2>\n{body}</section>\n'


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
    tiles = [
        ("Efficiency U", printed(metrics.efficiency), "time a static pool of equal node-hours needs ÷ time taken"),
        ("Bound", printed(metrics.bound), "U if every change were free and at once"),
        ("Completed", f"{metrics.completed:,} of {len(replay.trainers):,}", "trainers"),
        ("Hours", f"{metrics.hours:,.1f}", "the workload finished" if metrics.finished else "until the trace ended"),
        ("Eq-nodes", f"{metrics.eq_nodes:,.1f}", "static nodes of equal node-hours"),
        ("Resource integral", f"{metrics.resource_integral_node_hours:,.0f}", "node-hours of the pool"),
        ("Node-hours used", f"{used_hours:,.0f}", f"{1 - metrics.unoccupied_share:.1%} of the pool's"),
        ("Outcome", _amount(metrics.outcome_samples), "samples"),
        ("Run time", run_hours, spread),
        ("Pool events", f"{metrics.events:,}", f"{metrics.events / max(metrics.hours, 1e-9):,.1f} per hour"),
        ("Decision latency", f"{ms['p50']:.2f} ms", f"median; 99 % {ms['p99']:.2f} ms, most {ms['max']:.2f} ms"),
        ("Decisions", f"{metrics.decisions:,}", f"the replay took {metrics.wall_s:,.1f} s"),
    ]
    items = (f"<div><dt>{escape(a)}</dt><dd>{escape(b)}<small>{escape(c)}</small></dd></div>\n" for a, b, c in tiles)
    return f'<dl class="tiles">\n{"".join(items)}</dl>\n'


def _losses(metrics: Metrics) -> str:
    rows = [
        (
            f'<i style="background:{part.colour}"></i>{escape(part.name)}',
            part.printed,
            _amount(metrics.outcome_samples if part.name == "U" else part.samples),
            escape(part.meaning),
        )
        for part in parts_of_bound(metrics)
    ]
    total = ("Bound", printed(metrics.bound), "", "their sum: every change free and at once")
    table = _table(("", "unit of U", "samples", ""), rows, numbers=(1, 2), total=total)
    return f"<p>The bound as one bar; below it its losses alone, enlarged.</p>\n{draw_breakdown(metrics)}{table}"


def _runs(trainers: Sequence[TrainerRow]) -> str:
    by_model: defaultdict[str, list[TrainerRow]] = defaultdict(list)
    for row in trainers:
        by_model[row.model].append(row)
    models = sorted(by_model, key=lambda model: (-len(by_model[model]), model))
    rows = [(escape(shortened(model) or "–"), *_run_figures(by_model[model])) for model in models[:_MOST_MODELS]]
    more = f"<p>The {_MOST_MODELS} most frequent of {len(models):,} models.</p>\n" if len(models) > _MOST_MODELS else ""
    head = ("Model", "trainers", "completed", "mean h", "median h", "min h", "max h")
    table = _table(head, rows, numbers=range(1, 7), total=("All", *_run_figures(trainers)))
    return (
        "<p>From the time a trainer is first considered to its end, of those that completed, in hours.</p>\n"
        f"{table}{more}{_ends(trainers)}"
    )


def _run_figures(rows: Sequence[TrainerRow]) -> tuple[str, ...]:
    hours = [row.run_hours for row in rows if row.run_hours is not None]
    figures = [f"{f(hours):,.2f}" for f in (fmean, median, min, max)] if hours else ["–"] * 4
    return (f"{len(rows):,}", f"{len(hours):,}", *figures)


def _ends(trainers: Sequence[TrainerRow]) -> str:
    """The first and the last trainers by submission; all of them when they are few."""
    head = ("Trainer", "model", "submitted", "started", "ended", "run h", "samples")
    cells = [
        (
            escape(shortened(row.name)),
            escape(shortened(row.model) or "–"),
            *(("–" if time is None else utc(time).replace("T", " ")) for time in (row.submit, row.start, row.end)),
            "–" if row.run_hours is None else f"{row.run_hours:,.2f}",
            _amount(row.samples),
        )
        for row in (trainers if len(trainers) <= 2 * _ENDS else (*trainers[:_ENDS], *trainers[-_ENDS:]))
    ]
    if len(trainers) <= 2 * _ENDS:
        return _fold(f"All {len(trainers):,} trainers, as submitted", _table(head, cells, numbers=(5, 6)))
    return _fold(f"The first {_ENDS} trainers submitted", _table(head, cells[:_ENDS], numbers=(5, 6))) + _fold(
        f"The last {_ENDS} of {len(trainers):,} trainers submitted", _table(head, cells[_ENDS:], numbers=(5, 6))
    )


def _settings(settings: Mapping[str, str], provenance: Mapping[str, Any]) -> str:
    facts = [(escape(key), escape(value)) for key, value in settings.items()]
    for key, value in provenance.items():
        entries = value.items() if isinstance(value, Mapping) else [("", value)]
        facts += [(escape(f"{key} {part}".strip()), escape(_plain(entry))) for part, entry in entries]
    return _fold("Settings and provenance", _table(("", ""), facts))


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _fold(summary: str, body: str) -> str:
    return f"<details>\n<summary>{escape(summary)}</summary>\n{body}</details>\n"


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = (), total: Sequence[str] = ()
) -> str:
    """A table of cells that are escaped already."""
    right = set(numbers)

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f'<{tag} class="n">{cell}</{tag}>' if i in right else f"<{tag}>{cell}</{tag}>"
            for i, cell in enumerate(cells)
        )

    top = f"<thead><tr>{line(head, 'th')}</tr></thead>\n" if any(head) else ""
    body = "".join(f"<tr>{line(row, 'td')}</tr>\n" for row in rows)
    foot = f"<tfoot><tr>{line(total, 'td')}</tr></tfoot>\n" if total else ""
    return f'<div class="wide"><table>\n{top}<tbody>\n{body}</tbody>\n{foot}</table></div>\n'


def _amount(samples: float | None) -> str:
    """A number of samples as people read it."""
    if samples is None:
        return ""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if abs(samples) >= size:
            return f"{samples / size:,.2f} {name}"
    return f"{samples:,.0f}"


_CSS = """
:root { --paper: #fff; --ink: #1c2430; --soft: #5d6775; --rule: #dfe3e8; --tile: #f5f7f9; --u: #2f6fb3;
  --pool: #2f6fb3; --orange: #d0661a; --waiting: #8a8f98; --rescale: #d9a514; --preemption: #c0392b;
  --allocation: #8660bd; --good: #e3f3e6; --warn: #fdf0d5; --on: #fff; }
@media (prefers-color-scheme: dark) { :root { --paper: #12161c; --ink: #e4e8ee; --soft: #9aa5b3; --rule: #2c343f;
  --tile: #1b2129; --u: #4d8fd6; --pool: #5b9ee6; --orange: #f08c46; --waiting: #8b939f; --rescale: #e0b43a;
  --preemption: #e2604f; --allocation: #a585dd; --good: #1d3324; --warn: #3b2f14; --on: #fff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1088px; margin: 0 auto; padding: 24px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 8px; padding-top: 10px; border-top: 1px solid var(--rule); }
p { margin: 0 0 8px; color: var(--soft); max-width: 90ch; }
header .done, header .cut, header .note { color: var(--ink); padding: 8px 12px; border-radius: 6px; max-width: none;
  background: var(--tile); overflow-wrap: anywhere; }
header .done { background: var(--good); } header .cut { background: var(--warn); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(220px, 1fr)); gap: 10px; margin: 0; }
.tiles div { background: var(--tile); border-radius: 6px; padding: 10px 12px; }
.tiles dt { color: var(--soft); font-size: 13px; } .tiles dd { margin: 0; font-size: 22px; font-weight: 600; }
.tiles small { display: block; font-size: 12px; font-weight: 400; color: var(--soft); line-height: 1.35; }
.tiles div:first-child dd { color: var(--u); } .tiles div:first-child small { color: var(--soft); }
.wide { overflow-x: auto; } svg { display: block; width: 100%; height: auto; }
.wide svg { min-width: 720px; }
svg text { font-size: 12px; fill: var(--soft); } svg .mid { text-anchor: middle; } svg .end { text-anchor: end; }
svg .small { font-size: 9.5px; } svg .on { fill: var(--on); font-size: 14px; font-weight: 600; }
.grid { stroke: var(--rule); fill: none; } .u { fill: var(--u); } .u:hover { opacity: .75; }
.bound, .mean { fill: none; stroke-width: 1.5; } .bound { stroke: var(--orange); }
.mean { stroke: var(--ink); stroke-dasharray: 5 4; } .zoom { fill: var(--tile); }
.tick { stroke: var(--ink); fill: none; }
.pool { --c: var(--pool); } .used { --c: var(--orange); } .band { fill: var(--c); opacity: .25; }
.area { fill: var(--c); opacity: .55; }
.line { fill: none; stroke: var(--c); stroke-width: 1.3; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 0 0 6px; padding: 0;
  font-size: 13px; }
.legend i, td i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 7px; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; margin: 6px 0 10px; }
th, td { text-align: left; padding: 3px 18px 3px 0; border-bottom: 1px solid var(--rule); vertical-align: top;
  overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 500; } .n { text-align: right; white-space: nowrap; }
tfoot td { font-weight: 600; border-bottom: 0; } tbody td:first-child { min-width: 9em; }
details { margin: 8px 0; } summary { cursor: pointer; color: var(--soft); }
"""
