"""Figure 7b: cost of rescaling at an event by horizon, beside the baseline."""

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
from bftrainer.paper.figures import BASELINE, OURS, PAPER, horizon_axis, tidy
from bftrainer.paper.runs import RunResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_BASELINE, PAPER_RATIO = 1.03e6, 76.0


def make(context: Context) -> ExperimentResult:
    """Samples lost to rescaling, per event of the pool."""
    setting = context.setting
    costs = {h: _per_event(context.result(hpo_run(setting, horizon_s=h))) for h in setting.horizons_s}
    baseline = _per_event(context.result(baseline_run(setting)))
    shortest = nearest(setting.horizons_s, 10.0)
    ratio = baseline / costs[shortest] if costs[shortest] > 0 else None
    compared = (
        Compared("baseline, samples per event", PAPER_BASELINE, baseline, ",.0f"),
        Compared(f"ours at T = {shortest:g} s, samples per event", PAPER_BASELINE / 76, costs[shortest], ",.0f"),
        Compared(f"baseline over ours at T = {shortest:g} s", PAPER_RATIO, ratio, ".0f", "×"),
    )
    difference = (
        f"The ratio {'–' if ratio is None else f'{ratio:.0f}'} compares with the paper's 76; both levels depend on "
        "which 1024 nodes the pool is made of, and the paper's own are not published."
    )
    rows = (*((h, cost, None) for h, cost in costs.items()), (None, None, baseline))
    columns = ("horizon, s", "ours, samples per event", "baseline, samples per event")
    return ExperimentResult(columns, rows, compared, difference, lambda figure: _draw(figure, costs, baseline))


def _per_event(result: RunResult) -> float:
    return result.number("rescale_cost_samples") / max(result.number("events"), 1)


def _draw(figure: Figure, costs: dict[float, float], baseline: float) -> None:
    axes = figure.subplots()
    axes.plot(list(costs), list(costs.values()), color=OURS, marker="o", label="ours (exact)")
    axes.axhline(baseline, color=BASELINE, label=f"ours, baseline of equal shares: {baseline:.3g}")
    axes.axhline(PAPER_BASELINE, color=PAPER, linestyle="--", label=f"paper, baseline: {PAPER_BASELINE:.3g}")
    axes.plot(
        [10], [PAPER_BASELINE / PAPER_RATIO], "*", color=PAPER, markersize=13, label="paper, MILP at 10 s (76× less)"
    )
    horizon_axis(axes, tuple(costs))
    axes.set_yscale("log")
    axes.margins(y=0.25)
    tidy(axes, "horizon T, s", "rescaling cost per event, samples")


EXPERIMENT = Experiment(
    "rescale-cost-vs-horizon", "Rescaling cost per event", "Figure 7b, §5.1.1", horizon_and_baseline_runs, make
)
