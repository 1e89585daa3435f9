"""Figure 4: a scaling curve by Amdahl's law, and its approximation by a few straight lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bftrainer.core.curve import Curve
from bftrainer.core.trace import Floats
from bftrainer.paper.experiment import Compared, Context, Experiment, ExperimentResult, no_runs
from bftrainer.paper.figures import OURS, PAPER, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARALLEL, MOST = 0.97, 60
"""The share of the work that runs in parallel, and the paper's range of nodes."""


def make(context: Context) -> ExperimentResult:
    """Amdahl's law at every node count, and the piecewise linear curve through the powers of two."""
    curve = Curve.amdahl(PARALLEL, 1.0, MOST)
    nodes = np.arange(1, MOST + 1)
    true = 1 / ((1 - PARALLEL) + PARALLEL / nodes)
    approximate = curve.at(nodes)
    error = 1 - approximate / true
    rows = tuple(
        (n, t, a, e, int(n in curve.nodes))
        for n, t, a, e in zip(nodes.tolist(), true.tolist(), approximate.tolist(), error.tolist(), strict=True)
    )
    worst = float(np.abs(error).max())
    compared = (
        Compared("discretization points", None, float(len(curve.nodes) - 1), ".0f"),
        Compared("largest relative error", None, worst, ".1%"),
    )
    difference = (
        f"The paper calls its approximation close and gives no number; ours, through {len(curve.nodes) - 1} points at "
        f"the powers of two, is off by at most {worst:.1%}."
    )
    columns = ("nodes", "speedup by Amdahl's law", "piecewise linear", "relative error", "is a point")
    return ExperimentResult(columns, rows, compared, difference, lambda figure: _draw(figure, curve, nodes, true))


def _draw(figure: Figure, curve: Curve, nodes: np.ndarray[tuple[int], np.dtype[np.int64]], true: Floats) -> None:
    axes = figure.subplots()
    axes.plot(nodes, true, color=OURS, label=f"Amdahl's law, {PARALLEL:.0%} parallel")
    axes.plot(
        curve.nodes[1:],
        curve.rates[1:],
        color=PAPER,
        marker="^",
        linestyle="--",
        linewidth=1,
        label="piecewise linear through a few points",
    )
    tidy(axes, "nodes", "speedup over one node")


EXPERIMENT = Experiment(
    "curve-approximation", "A scaling curve approximated by straight lines", "Figure 4", no_runs, make, on_trace=False
)
