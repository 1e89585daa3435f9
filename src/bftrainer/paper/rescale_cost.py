"""Figure 16: efficiency of HPO when the cost of rescaling is several times as high."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bftrainer.paper.experiment import Compared, Context, Experiment, ExperimentResult, hpo_run
from bftrainer.paper.figures import GREY, OURS, PAPER, RED, YELLOW, tidy
from bftrainer.paper.runs import PaperRun, RunResult
from bftrainer.paper.setting import Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def runs(setting: Setting) -> Sequence[PaperRun]:
    """HPO with each factor on the rescaling costs."""
    return [hpo_run(setting, cost_factor=factor) for factor in setting.cost_factors]


def make(context: Context) -> ExperimentResult:
    """U by the factor on rescaling costs."""
    results = {run.cost_factor: context.result(run) for run in runs(context.setting)}
    u = {factor: result.number("efficiency") for factor, result in results.items()}
    first, last = min(u), max(u)
    kept = u[last] / u[first] if u[first] else None
    compared = (
        Compared(f"U at ×{first:g}", 0.80, u[first], ".1%"),
        Compared(f"U at ×{last:g}", None, u[last], ".1%"),
        Compared(f"share of U kept when rescaling costs ×{last:g}", None, kept, ".0%"),
    )
    difference = (
        "The paper's figure has no numbers; as it says, efficiency falls far less than costs rise: "
        f"{'–' if kept is None else f'{kept:.0%}'} of it is left at ×{last:g}, where preemption, which no allocator "
        f"can decide against, costs {_points(results[last], 'preemption')} points and rescaling "
        f"{_points(results[last], 'rescale')}."
    )
    columns = ("factor", "U", "zero-cost bound", "lost to preemption", "lost to rescaling")
    rows = tuple(
        (f, u[f], r.number("bound"), r.metrics["breakdown"]["preemption"], r.metrics["breakdown"]["rescale"])
        for f, r in results.items()
    )
    return ExperimentResult(columns, rows, compared, difference, lambda figure: _draw(figure, rows))


def _points(result: RunResult, loss: str) -> str:
    return f"{100 * result.metrics['breakdown'][loss]:.1f}"


def _draw(figure: Figure, rows: tuple[tuple[float, ...], ...]) -> None:
    axes = figure.subplots()
    factors, u, bound, preemption, rescale = zip(*rows, strict=True)
    axes.plot(factors, [b * 100 for b in bound], color=GREY, linestyle=":", label="zero-cost bound")
    axes.plot(factors, [v * 100 for v in u], color=OURS, marker="o", label="efficiency U")
    axes.plot(factors, [v * 100 for v in preemption], color=RED, marker="s", markersize=4, label="lost: preemption")
    axes.plot(factors, [v * 100 for v in rescale], color=YELLOW, marker="^", markersize=4, label="lost: rescaling")
    axes.plot([1], [80], "*", color=PAPER, markersize=13, label="paper: 80 % at ×1")
    axes.set_xticks(factors, [f"×{f:g}" for f in factors])
    axes.set_ylim(bottom=0, top=105)
    tidy(axes, "rescaling costs", "% of what static nodes make", legend=False)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8)


EXPERIMENT = Experiment("rescale-cost", "Efficiency by what rescaling costs", "Figure 16, §5.4.2", runs, make)
