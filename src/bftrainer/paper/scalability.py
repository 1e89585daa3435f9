"""Figure 15: efficiency of HPO for models that scale better and worse, over the same hours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bftrainer.paper.experiment import Compared, Context, Experiment, ExperimentResult, hpo_run
from bftrainer.paper.figures import GREY, OURS, PAPER, tidy
from bftrainer.paper.runs import PaperRun
from bftrainer.paper.setting import Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_U = {"AlexNet": 0.75, "DenseNet": 0.83}


def runs(setting: Setting) -> Sequence[PaperRun]:
    """HPO with each model."""
    hours = setting.scalability_hours
    return [hpo_run(setting, workload=f"hpo:{model}", hours=hours) for model in setting.curves()]


def make(context: Context) -> ExperimentResult:
    """U and bound by model, from the worst scaling to the best."""
    setting = context.setting
    scaling = {model: curve.rate(64) / (64 * curve.rate(1)) for model, curve in setting.curves().items()}
    results = {run.workload.partition(":")[2]: context.result(run) for run in runs(setting)}
    models = sorted(results, key=lambda model: scaling[model])
    u = {model: results[model].number("efficiency") for model in models}
    bounds = {model: results[model].number("bound") for model in models}
    compared = (
        *(Compared(f"U of {model}", PAPER_U[model], u[model], ".1%") for model in PAPER_U),
        Compared("lowest U of all models (the paper: above 75 %)", 0.75, min(u.values()), ".1%"),
    )
    waiting = {model: results[model].metrics["breakdown"]["waiting"] for model in models}
    most, least = max(models, key=lambda m: waiting[m]), min(models, key=lambda m: waiting[m])
    difference = (
        f"Ours goes from {min(u.values()):.0%} to {max(u.values()):.0%} and follows how models scale only roughly: "
        f"fast ones also finish more often and wait to be noticed until the pool changes, which costs {most} "
        f"{100 * waiting[most]:.0f} points and {least} {100 * waiting[least]:.0f}."
    )
    rows = tuple((m, scaling[m], u[m], bounds[m], waiting[m], PAPER_U.get(m)) for m in models)
    columns = ("model", "scaling efficiency at 64 nodes", "U", "zero-cost bound", "lost to waiting", "paper")
    return ExperimentResult(columns, rows, compared, difference, lambda f: _draw(f, models, u, bounds, scaling))


def _draw(
    figure: Figure, models: list[str], u: dict[str, float], bounds: dict[str, float], scaling: dict[str, float]
) -> None:
    axes = figure.subplots()
    places = np.arange(len(models))
    bars = axes.bar(places, [u[m] * 100 for m in models], 0.6, color=OURS, label="ours")
    axes.bar_label(bars, fmt="%.0f", fontsize=8, label_type="center", color="white")
    for place, model in enumerate(models):
        axes.hlines(bounds[model] * 100, place - 0.3, place + 0.3, color=GREY, linestyle=":")
    axes.plot([], [], color=GREY, linestyle=":", label="zero-cost bound")
    known = [place for place, model in enumerate(models) if model in PAPER_U]
    stars = [PAPER_U[models[place]] * 100 for place in known]
    axes.plot(known, stars, "*", color=PAPER, markersize=13, markeredgecolor="white", label="paper")
    axes.set_xticks(places, [f"{m}\n{scaling[m]:.0%}" for m in models], fontsize=8)
    axes.set_ylim(0, 105)
    tidy(axes, "model, with its scaling efficiency at 64 nodes", "efficiency U, %", grid="y", legend=False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)


EXPERIMENT = Experiment("scalability", "Efficiency by how models scale", "Figure 15, §5.4.1", runs, make)
