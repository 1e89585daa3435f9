"""Figure 1: distribution of fragment lengths, and the idle time that short fragments hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bftrainer.paper.experiment import Compared, Context, Experiment, ExperimentResult, no_runs
from bftrainer.paper.figures import BASELINE, GREEN, OURS, PAPER, mark_paper, tidy
from bftrainer.traces.stats import SHORT_S

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bftrainer.core.trace import Floats

AT_S = (60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 14400.0, 43200.0, 86400.0)
_MARKS = ((60, "1 min"), (600, "10 min"), (3600, "1 h"), (36000, "10 h"), (345600, "4 d"))


def make(context: Context) -> ExperimentResult:
    """The whole machine's fragments, cut to the window."""
    length = np.sort(context.setting.machine().lengths)
    total = float(length.sum())
    rows = []
    for at in AT_S:
        below = length[length < at]
        rows.append((at, len(below) / len(length), float(below.sum()) / total))
    short = length[length < SHORT_S]
    ours = (len(short) / len(length), float(short.sum()) / total)
    compared = (
        Compared("fragments under 10 minutes", 0.58, ours[0], ".1%"),
        Compared("idle node-time they hold", 0.10, ours[1], ".1%"),
    )
    difference = (
        f"Of {len(length):,} fragments {ours[0]:.1%} are short and hold {ours[1]:.1%} of the node-time; the paper says "
        "“about 58 %” and “about 10 %”, and fragments that the window cuts count here with what is left of them."
    )
    columns = ("shorter than, s", "share of fragments", "share of idle node-time")
    return ExperimentResult(columns, tuple(rows), compared, difference, lambda figure: _draw(figure, length))


def _draw(figure: Figure, length: Floats) -> None:
    axes = figure.subplots()
    # A thousand points draw the same curve as half a million.
    pick = np.unique(np.linspace(0, len(length) - 1, 1000).astype(int))
    axes.plot(length[pick], (pick + 1) / len(length) * 100, color=OURS, label="of fragments")
    axes.plot(length[pick], np.cumsum(length)[pick] / length.sum() * 100, color=GREEN, label="of idle node-time")
    mark_paper(axes, SHORT_S, 58, "paper: 58 % of fragments, 10 % of node-time under 10 min")
    axes.plot([SHORT_S], [10], marker="*", markersize=13, color=PAPER, linestyle="", zorder=5)
    axes.axvline(SHORT_S, color=BASELINE, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    shown = [(at, label) for at, label in _MARKS if length[0] * 0.8 <= at <= length[-1] * 1.2]
    axes.set_xticks([at for at, _ in shown], [label for _, label in shown])
    axes.minorticks_off()
    axes.set_ylim(0, 102)
    tidy(axes, "fragment length", "cumulative share, %")


EXPERIMENT = Experiment("fragment-cdf", "Cumulative distribution of fragment length", "Figure 1", no_runs, make)
