"""Tables of simulation figures for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from bftrainer.cli.machine.show_trace import facts
from bftrainer.core.trace import utc
from bftrainer.simulate.metrics import Metrics
from bftrainer.simulate.replay import Replay
from bftrainer.simulate.study import RigidFigures


def show_result(metrics: Metrics, replay: Replay) -> None:
    """Print one replay: what was trained, how efficiently, and the losses."""
    console = Console(highlight=False)
    table = facts(console, "What was trained")
    table.add_row("trainers done", f"{metrics.completed:,}", f"of {len(replay.trainers):,}")
    table.add_row("outcome", f"{metrics.outcome_samples:,.6g}", "samples")
    table.add_row("time", f"{metrics.hours:,.1f} h", f"{utc(replay.start)} to {utc(replay.end)} UTC")
    table.add_row("pool", f"{metrics.resource_integral_node_hours:,.0f} node-h", f"{metrics.eq_nodes:,.1f} eq-nodes")
    table.add_row("unoccupied", f"{metrics.unoccupied_share:.1%}", "of the pool's node-time")
    if metrics.mean_run_hours is not None:
        table.add_row("run time", f"{metrics.mean_run_hours:,.2f} h", f"mean; spread {metrics.run_hours_spread:.0%}")
    console.print(table)
    console.print()
    table = facts(console, "How well")
    parts = metrics.breakdown
    table.add_row("efficiency U", f"{metrics.efficiency:.4f}", "of what a static pool of as many node-hours gives")
    table.add_row("  waiting", f"{parts.waiting:.4f}", "starting up, and done but not noticed yet")
    table.add_row("  rescaling", f"{parts.rescale:.4f}", f"{metrics.rescale_cost_samples:,.4g} samples")
    table.add_row("  preemption", f"{parts.preemption:.4f}", f"{metrics.preemption_cost_samples:,.4g} samples")
    table.add_row("  allocation", f"{parts.allocation:.4f}", "sizes that would have cost more to change")
    table.add_row("bound", f"{metrics.bound:.4f}", "the best the pool allows at no cost of any kind")
    console.print(table)
    console.print()
    console.print(_models(replay))
    console.print()
    ms = metrics.decision_ms
    console.print(
        f"{metrics.decisions:,} decisions at {metrics.events:,} pool events: median {ms['p50']:.2f} ms, "
        f"99 % {ms['p99']:.2f} ms; replayed in {metrics.wall_s:.1f} s",
        soft_wrap=True,
    )


def show_rigid(figures: RigidFigures) -> None:
    """Print the baseline of a killable queue."""
    console = Console(highlight=False)
    table = facts(console, f"A killable queue with jobs of {figures.nodes} nodes")
    table.add_row("jobs done", f"{figures.completed:,}", f"of {figures.trainers:,}")
    table.add_row("outcome", f"{figures.outcome_samples:,.6g}", "samples")
    table.add_row("lost", f"{figures.lost_samples:,.6g}", f"samples, in {figures.kills:,} kills")
    table.add_row("time", f"{figures.hours:,.1f} h")
    table.add_row("pool", f"{figures.resource_integral_node_hours:,.0f} node-h", f"{figures.eq_nodes:,.1f} eq-nodes")
    table.add_row("efficiency U", f"{figures.efficiency:.4f}", "of what a static pool of as many node-hours gives")
    table.add_row(
        "main queue delayed",
        f"{figures.delay_node_seconds / 3600:,.1f} node-h",
        f"{figures.delayed_leaves:,} times a node was not given back at once",
    )
    console.print(table)


def show_parts(metrics: Sequence[Metrics]) -> None:
    """Print several schedulers side by side."""
    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("part", "U", "bound", "done", "hours", "eq-nodes", "node-h"):
        table.add_column(title, justify="right")
    for i, part in enumerate(metrics, 1):
        table.add_row(
            str(i),
            f"{part.efficiency:.4f}",
            f"{part.bound:.4f}",
            f"{part.completed:,}",
            f"{part.hours:,.1f}",
            f"{part.eq_nodes:,.1f}",
            f"{part.resource_integral_node_hours:,.0f}",
        )
    console.print(table)


def _models(replay: Replay) -> Table:
    """Run times by model."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("model", style="bold")
    for title in ("done", "mean h", "median h", "longest h"):
        table.add_column(title, justify="right")
    by_model: dict[str, list[float]] = {}
    for row in replay.trainers:
        if row.run_hours is not None:
            by_model.setdefault(row.model or "–", []).append(row.run_hours)
    for model, hours in by_model.items():
        row_hours = np.array(hours)
        table.add_row(
            model, f"{len(hours):,}", f"{row_hours.mean():.2f}", f"{np.median(row_hours):.2f}", f"{row_hours.max():.2f}"
        )
    return table
