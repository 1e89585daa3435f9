"""Run times for Tables 3 and 4: mean run time by model and max parallel under one objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bftrainer.paper.experiment import Cell, Compared, Context, ExperimentResult, diverse_run
from bftrainer.paper.figures import MODEL_COLOURS, tidy
from bftrainer.paper.runs import PaperRun
from bftrainer.paper.setting import Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARALLELS = (5, 10, 15, 20, 25, 30, 35)
"""The columns of both tables."""
Hours = Mapping[str, tuple[float, ...]]

UNDER_THROUGHPUT: Hours = {
    "AlexNet": (0.5, 0.6, 0.5, 0.6, 0.5, 0.5, 0.6),
    "ResNet18": (0.4, 0.4, 0.4, 0.4, 0.5, 0.5, 0.5),
    "MnasNet": (0.7, 0.7, 0.8, 0.8, 0.9, 0.9, 1.1),
    "MobileNets": (0.8, 0.9, 0.8, 0.9, 1.0, 1.2, 1.4),
    "ShuffleNet": (0.9, 1.0, 0.9, 1.2, 1.4, 1.6, 1.8),
    "VGG-16": (2.3, 3.4, 4.1, 5.4, 6.1, 6.3, 7.4),
    "DenseNet": (4.1, 9.5, 16.1, 22.4, 29.2, 36.3, 42.3),
}
"""The paper's Table 3."""
UNDER_EFFICIENCY: Hours = {
    "VGG-16": (1.98, 2.8, 3.3, 3.8, 4.5, 5.0, 5.2),
    "DenseNet": (2.58, 3.4, 4.6, 5.2, 6.4, 6.5, 7.8),
    "ResNet18": (0.77, 1.1, 1.5, 1.9, 2.1, 2.4, 2.6),
    "MobileNets": (0.89, 1.8, 2.7, 3.8, 4.7, 5.9, 7.4),
    "ShuffleNet": (1.15, 2.1, 2.9, 4.2, 5.4, 7.2, 8.5),
    "MnasNet": (1.15, 2.3, 3.8, 5.5, 7.0, 9.4, 10.7),
    "AlexNet": (0.94, 2.4, 3.9, 5.3, 6.8, 7.6, 8.8),
}
"""The paper's Table 4."""


def parallel_runs(objective: str) -> Callable[[Setting], Sequence[PaperRun]]:
    """The diverse workload under each max parallel."""

    def runs(setting: Setting) -> Sequence[PaperRun]:
        return [diverse_run(setting, objective=objective, max_parallel=p) for p in setting.max_parallels]

    return runs


def both_objectives(setting: Setting) -> Sequence[PaperRun]:
    """The runs of both tables."""
    return [*parallel_runs("throughput")(setting), *parallel_runs("efficiency")(setting)]


def measured(context: Context, objective: str) -> dict[int, dict[str, float]]:
    """Mean run hours by model, for each max parallel."""
    return {run.max_parallel: context.result(run).run_hours() for run in parallel_runs(objective)(context.setting)}


def printed(table: Hours, model: str, parallel: int) -> float | None:
    """A value of the paper's table."""
    return table[model][PARALLELS.index(parallel)] if parallel in PARALLELS else None


def make_table(context: Context, objective: str, table: Hours, why: str) -> ExperimentResult:
    """The table with our value beside the paper's in every cell."""
    ours = measured(context, objective)
    rows: list[tuple[Cell, ...]] = []
    ratios = []
    for model in table:
        for who, pick in (("paper", printed), ("ours", lambda _, m, p: ours[p].get(m))):
            rows.append((model, who, *(pick(table, model, p) for p in ours)))
        cells = ((printed(table, model, p), ours[p].get(model)) for p in ours)
        ratios += [mine / theirs for theirs, mine in cells if mine is not None and theirs is not None]
    compared = tuple(
        Compared(f"{model}, Pj_max = {p}", printed(table, model, p), ours[p].get(model), ".2f", " h")
        for model in table
        for p in (min(ours), max(ours))
    )
    middle = f"{np.median(ratios):.2f}" if ratios else "–"
    spread = f"{np.percentile(ratios, 10):.2f} to {np.percentile(ratios, 90):.2f}" if ratios else "–"
    difference = (
        f"Ours over the paper's is {middle} in the median of all cells ({spread} for the middle 80 %, where the "
        f"paper's one decimal alone can mean 0.1 in 0.4): {why}."
    )
    columns = ("model", "whose", *(f"Pj_max={p}" for p in ours))
    return ExperimentResult(columns, tuple(rows), compared, difference, lambda f: _draw(f, table, ours), (8.5, 4.8))


def _draw(figure: Figure, table: Hours, ours: dict[int, dict[str, float]]) -> None:
    axes = figure.subplots()
    for model in table:
        colour = MODEL_COLOURS[model]
        axes.plot(PARALLELS, table[model], color=colour, linestyle="--", marker="*", markersize=7, linewidth=0.9)
        values = [hours.get(model, float("nan")) for hours in ours.values()]
        axes.plot(list(ours), values, color=colour, marker="o", markersize=4, label=model)
    axes.plot([], [], color="black", marker="o", markersize=4, label="ours")
    axes.plot([], [], color="black", linestyle="--", marker="*", markersize=7, label="paper")
    axes.set_yscale("log")
    axes.set_xticks(PARALLELS)
    ticks = [0.25, 0.5, 1, 2, 5, 10, 20, 50]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    tidy(axes, "max parallel Pj_max", "mean run time, h", legend=False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
