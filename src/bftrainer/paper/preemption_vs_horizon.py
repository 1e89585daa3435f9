"""Figure 7a: share of decisions that a preemption interrupts within the horizon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bftrainer.paper.experiment import Compared, Context, Experiment, ExperimentResult, horizon_runs, hpo_run, nearest
from bftrainer.paper.figures import GREEN, GREY, OURS, horizon_axis, mark_paper, tidy
from bftrainer.paper.windows import share_followed, steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_AT_S, PAPER_SHARE = 170.0, 0.90
Row = tuple[float, float | None, float | None, float | None]


def make(context: Context) -> ExperimentResult:
    """Share of decisions followed within the horizon by a preemption; by any leave; by any change of the pool."""
    setting = context.setting
    trace, machine = setting.trace(), setting.machine()
    changes = np.unique(np.concatenate((trace.start, trace.end[~trace.open])))
    all_leaves = np.unique(machine.end[~machine.open])
    all_changes = np.unique(np.concatenate((machine.start, all_leaves)))
    rows: list[Row] = []
    for horizon in setting.horizons_s:
        timeline = context.result(hpo_run(setting, horizon_s=horizon)).timeline
        cut = steps(timeline)
        decisions = cut.time[timeline.decided[:-1]]
        rows.append(
            (
                horizon,
                share_followed(decisions, cut.time[cut.preempted], horizon, float(timeline.time[-1])),
                share_followed(all_changes, all_leaves, horizon, machine.window.end),
                share_followed(changes, changes, horizon, trace.window.end),
            )
        )
    near = nearest(setting.horizons_s, PAPER_AT_S)
    _, preempted, left, changed = next(row for row in rows if row[0] == near)
    compared = (
        Compared(f"decisions with a preemption within {near:g} s", PAPER_SHARE, preempted, ".0%"),
        Compared(f"events of the whole machine with a leave within {near:g} s", None, left, ".0%"),
        Compared(f"events with any change of the pool within {near:g} s", None, changed, ".0%"),
    )
    difference = (
        f"On {setting.nodes:,} nodes {_percent(preempted)} of our decisions meet a preemption within {near:g} s; the "
        f"paper's 90 % is near the share that meets any change of the pool ({_percent(changed)}), so it may count "
        "joins as well, or leaves of more nodes than these."
    )
    columns = ("horizon, s", "preemption in time", "leave in time, whole machine", "any change in time")
    return ExperimentResult(columns, tuple(rows), compared, difference, lambda figure: _draw(figure, rows))


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _draw(figure: Figure, rows: list[Row]) -> None:
    axes = figure.subplots()
    horizons = [row[0] for row in rows]
    shares = [[row[i] for row in rows] for i in (1, 2, 3)]
    labels = ("ours: preemption of a trainer", "a leave anywhere on the whole machine", "any change of the pool")
    for values, label, colour, style in zip(shares, labels, (OURS, GREEN, GREY), ("-", "--", ":"), strict=True):
        heights = [float("nan") if v is None else v * 100 for v in values]
        axes.plot(horizons, heights, color=colour, linestyle=style, marker="o", markersize=4, label=label)
    mark_paper(axes, PAPER_AT_S, PAPER_SHARE * 100, "paper: 90 % from 170 s on")
    horizon_axis(axes, tuple(row[0] for row in rows))
    axes.set_ylim(0, 103)
    tidy(axes, "horizon T, s", "decisions overtaken within T, %")


EXPERIMENT = Experiment(
    "preemption-vs-horizon", "Preemption within the horizon", "Figure 7a, §5.1.1", horizon_runs, make
)
