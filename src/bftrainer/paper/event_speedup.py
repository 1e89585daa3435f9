"""§5.1.2: samples made from each event to the next, ours over the baseline's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bftrainer.core.trace import Floats
from bftrainer.paper.efficiency_over_week import runs
from bftrainer.paper.experiment import Compared, Context, Experiment, ExperimentResult
from bftrainer.paper.figures import BASELINE, OURS, PAPER, tidy
from bftrainer.paper.windows import steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_WORSE, PAPER_TWICE, PAPER_FIVE, PAPER_MEAN = 0.069, 0.11, 0.03, 2.9
_TIE = 1e-9
"""Relative difference that rounding makes."""


def make(context: Context) -> ExperimentResult:
    """Samples of each span, less the cost of rescaling at the event before it."""
    ours, base = (steps(context.result(run).timeline) for run in runs(context.setting))
    count = min(len(ours.time), len(base.time))
    mine, theirs = ((s.gross - s.rescale)[:count] for s in (ours, base))
    some = (mine != 0) | (theirs != 0)
    mine, theirs = mine[some], theirs[some]

    def share(times: float) -> float:
        return float(((mine > 0) & (mine >= times * theirs)).mean()) if len(mine) else 0.0

    worse = float((mine < theirs - _TIE * np.abs(theirs)).mean()) if len(mine) else 0.0
    positive = theirs > 0
    ratio = mine[positive] / theirs[positive]
    mean = float(ratio.mean()) if len(ratio) else None
    compared = (
        Compared("events where ours makes less", PAPER_WORSE, worse, ".1%"),
        Compared("events where ours makes at least 2×", PAPER_TWICE, share(2), ".1%"),
        Compared("events where ours makes at least 5×", PAPER_FIVE, share(5), ".1%"),
        Compared("mean speedup where the baseline makes something", PAPER_MEAN, mean, ".2f", "×"),
        Compared("events where the baseline loses more than it makes", None, float((theirs <= 0).mean()), ".1%"),
    )
    difference = (
        "The shares are near the paper's; the mean is ruled by a few spans in which the baseline makes next to "
        "nothing, as the paper warns, and we leave out those in which it makes less than rescaling cost."
    )
    rows = tuple((c.what, c.paper, c.ours) for c in compared)
    return ExperimentResult(
        ("measure", "paper", "ours"), rows, compared, difference, lambda f: _draw(f, ratio, (worse, share(2), share(5)))
    )


def _draw(figure: Figure, ratio: Floats, shares: tuple[float, float, float]) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    shown = np.sort(np.clip(ratio, 0.1, 100))
    if len(shown):
        left.plot(shown, np.arange(1, len(shown) + 1) / len(shown) * 100, color=OURS)
    left.axvline(1, color=BASELINE, linewidth=0.8, linestyle=":")
    left.set_xscale("log")
    left.set_xticks([0.1, 0.5, 1, 2, 5, 10, 100], ["≤0.1", "0.5", "1", "2", "5", "10", "≥100"])
    left.minorticks_off()
    tidy(left, "samples, ours over the baseline's", "events up to this speedup, %", legend=False)
    paper = (PAPER_WORSE, PAPER_TWICE, PAPER_FIVE)
    for offset, values, colour, label in ((-0.2, paper, PAPER, "paper"), (0.2, shares, OURS, "ours")):
        bars = right.bar(np.arange(3) + offset, [v * 100 for v in values], 0.4, color=colour, label=label)
        right.bar_label(bars, fmt="%.1f", fontsize=7)
    right.set_xticks(range(3), ["worse", "≥ 2×", "≥ 5×"])
    right.margins(y=0.15)
    tidy(right, "", "share of events, %", grid="y")


EXPERIMENT = Experiment("event-speedup", "Speedup over the baseline, event by event", "§5.1.2", runs, make)
