"""Figure 9: efficiency of HPO by horizon, beside the baseline and the zero-cost bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bftrainer.paper.experiment import (
    Compared,
    Context,
    Experiment,
    ExperimentResult,
    baseline_run,
    horizon_and_baseline_runs,
    hpo_run,
    nearest,
)
from bftrainer.paper.figures import BASELINE, GREY, OURS, PAPER, horizon_axis, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_BASELINE, PAPER_MEAN = 0.75, 0.80


def make(context: Context) -> ExperimentResult:
    """U and the bound of each run."""
    setting = context.setting
    results = {h: context.result(hpo_run(setting, horizon_s=h)) for h in setting.horizons_s}
    ours = {h: result.number("efficiency") for h, result in results.items()}
    bounds = {h: result.number("bound") for h, result in results.items()}
    baseline = context.result(baseline_run(setting)).number("efficiency")
    near = nearest(setting.horizons_s, 120.0)
    enough = next(h for h in ours if ours[h] >= max(ours.values()) - 0.005)
    compared = (
        Compared(f"U at T = {near:g} s", PAPER_MEAN, ours[near], ".1%"),
        Compared("U of the baseline, equal shares", PAPER_BASELINE, baseline, ".1%"),
        Compared("horizon from which U gains less than half a point, s", 120.0, enough, ".0f"),
        Compared(f"zero-cost bound at T = {near:g} s", None, bounds[near], ".1%"),
    )
    lost = {why: 100 * value for why, value in results[near].metrics["breakdown"].items()}
    difference = (
        f"U is within half a point of its best from {enough:g} s on (the paper: about 120 s), as the horizon moves "
        f"little of what is lost to the bound: {lost['waiting']:.1f} points wait to be noticed at the next change of "
        f"the pool, {lost['preemption']:.1f} go to preemption, {lost['rescale']:.1f} to rescaling."
    )
    rows = (*((h, "exact", ours[h], bounds[h]) for h in ours), (None, "equal", baseline, None))
    columns = ("horizon, s", "allocator", "efficiency U", "zero-cost bound")
    return ExperimentResult(columns, rows, compared, difference, lambda figure: _draw(figure, ours, bounds, baseline))


def _draw(figure: Figure, ours: dict[float, float], bounds: dict[float, float], baseline: float) -> None:
    axes = figure.subplots()
    axes.plot(list(bounds), [b * 100 for b in bounds.values()], color=GREY, linestyle=":", label="zero-cost bound")
    axes.plot(list(ours), [u * 100 for u in ours.values()], color=OURS, marker="o", label="ours (exact)")
    axes.axhline(baseline * 100, color=BASELINE, label=f"ours, baseline: {baseline:.1%}")
    axes.plot([120], [PAPER_MEAN * 100], "*", color=PAPER, markersize=13, label="paper: 80 % at 120 s")
    axes.axhline(PAPER_BASELINE * 100, color=PAPER, linestyle="--", label="paper, baseline: 75 %")
    horizon_axis(axes, tuple(ours))
    axes.set_ylim(min(70, 95 * min(*ours.values(), baseline)), 101)
    tidy(axes, "horizon T, s", "efficiency U, %", legend=False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)


EXPERIMENT = Experiment(
    "efficiency-vs-horizon", "Efficiency of HPO by horizon", "Figure 9, §5.1.2", horizon_and_baseline_runs, make
)
