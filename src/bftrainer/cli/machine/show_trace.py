"""Tables of traces, imports and statistics for a terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from bftrainer.core.trace import utc
from bftrainer.traces.plot import age_label
from bftrainer.traces.readers.importing import Imported
from bftrainer.traces.stats import HAZARD_AHEAD_S, IdleStats


def _console() -> Console:
    return Console(highlight=False, soft_wrap=False)


def facts(console: Console, title: str) -> Table:
    """A titled table of names, figures and remarks."""
    console.print(title, style="bold underline")
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    return table


def show_import(imported: Imported, output: Path) -> None:
    """Print what happened to every line of a log, and what the trace holds."""
    console = _console()
    report, trace = imported.report, imported.ranges
    if report.lines:
        table = facts(console, f"Read as {report.format}")
        table.add_row("lines", f"{report.lines:,}")
        table.add_row("jobs", f"{report.jobs:,}")
        table.add_row("used", f"{report.used:,}")
        for reason, tally in sorted(report.skipped.items(), key=lambda item: -item[1].count):
            table.add_row("skipped", f"{tally.count:,}", f"{reason}, first in line {tally.first_line}")
        console.print(table)
        console.print()
    table = facts(console, "Idle nodes")
    table.add_row("window", f"{trace.window.hours:,.1f} h", str(trace.window))
    table.add_row("nodes", f"{len(trace.nodes):,}")
    table.add_row("fragments", f"{trace.fragments:,}")
    idle = trace.node_seconds
    table.add_row(
        "idle", f"{idle / 3600:,.0f} node-h", f"{idle / (len(trace.nodes) * trace.window.seconds):.1%} of all"
    )
    if report.busy_share is not None:
        table.add_row("busy", f"{report.busy_share:.1%}", "of the time of all nodes, before any trimming")
    if report.trimmed_node_hours:
        table.add_row(
            "left out",
            f"{report.trimmed_node_hours:,.0f} node-h",
            "before a node's first and after its last job: no sign of life (--keep-edges counts them)",
        )
    console.print(table)
    for note in report.notes:
        console.print(f"note: {note}", soft_wrap=True)
    console.print(f"wrote {output}", soft_wrap=True)


def show_stats(stats: IdleStats, plot: Path | None) -> None:
    """Print the paper's Table 1 and more."""
    console = _console()
    table = facts(console, "Idle nodes")
    table.add_row("window", f"{stats.hours:,.1f} h", f"{utc(stats.window[0])} to {utc(stats.window[1])} UTC")
    table.add_row(
        "nodes", f"{stats.nodes:,}", "" if stats.nodes_known else "seen in the trace; the machine may have more"
    )
    table.add_row("idle", f"{stats.node_hours:,.0f} node-h", f"{stats.ratio:.1%} of the machine")
    table.add_row("eq-nodes", f"{stats.eq_nodes:,.1f}", "nodes idle all the time would give as much")
    pool = stats.pool
    table.add_row("pool size", f"{pool.p50:,}", f"median; 5 % {pool.p05:,}, 95 % {pool.p95:,}, most {pool.max:,} nodes")
    table.add_row("events", f"{stats.events:,}", f"{stats.events / stats.hours:.1f} per hour")
    table.add_row("joins", f"{stats.inc_events:,}", _rate(stats.inc_per_hour, stats.nodes_per_join))
    table.add_row("leaves", f"{stats.dec_events:,}", _rate(stats.dec_per_hour, stats.nodes_per_leave))
    table.add_row("fragments", f"{stats.fragments:,}")
    if stats.short_fragment_share is not None:
        table.add_row(
            "  under 10 min",
            f"{stats.short_fragment_share:.1%}",
            f"holding {stats.short_fragment_node_time_share:.1%} of the idle node-time",
        )
        quantiles = stats.fragment_quantiles_s
        shown = ", ".join(
            f"{float(q):.0%} {_span(quantiles[q])}" for q in ("0.1", "0.25", "0.5", "0.75", "0.9", "0.99")
        )
        table.add_row("  length", _span(stats.mean_fragment_s or 0), f"mean; {shown}")
    console.print(table)
    console.print()
    console.print("Chance that an idle node leaves", style="bold underline")
    console.print(_hazard_table(stats))
    console.print()
    horizon = stats.horizon
    if horizon.seconds is not None:
        console.print(f"suggested horizon: {horizon.seconds:.0f} s", style="bold")
    console.print(horizon.reasoning, soft_wrap=True)
    if plot is not None:
        console.print(f"wrote {plot}", soft_wrap=True)


def _hazard_table(stats: IdleStats) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("idle since", style="bold")
    for ahead in HAZARD_AHEAD_S:
        table.add_column(f"within {ahead:.0f} s", justify="right")
    table.add_column("node-hours", justify="right", style="dim")
    for row in stats.hazard:
        chances = ("–" if v is None else f"{v:.1%}" for v in row.leave_within.values())
        table.add_row(age_label(row.age_from_s, row.age_to_s), *chances, f"{row.node_hours:,.0f}")
    return table


def _rate(per_hour: float, nodes: float | None) -> str:
    return f"{per_hour:.1f} per hour" + (f", {nodes:.1f} nodes at a time" if nodes is not None else "")


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
