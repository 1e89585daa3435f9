"""Figure 12: mean run time of each model under two objectives, and the spread between models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bftrainer.paper.experiment import Compared, Context, Experiment, ExperimentResult
from bftrainer.paper.figures import GREEN, OURS, PAPER, tidy
from bftrainer.paper.runtimes import (
    PARALLELS,
    UNDER_EFFICIENCY,
    UNDER_THROUGHPUT,
    both_objectives,
    measured,
    printed,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Hours = dict[str, float]


def make(context: Context) -> ExperimentResult:
    """Run times at the paper's max parallel, and DenseNet's over AlexNet's at each."""
    throughput, efficiency = (measured(context, objective) for objective in ("throughput", "efficiency"))
    at = context.setting.max_parallel if context.setting.max_parallel in throughput else min(throughput)
    last = max(throughput)
    apart = {p: _apart(hours) for p, hours in throughput.items()}
    fair = {p: _apart(hours) for p, hours in efficiency.items()}
    known = [value for value in apart.values() if value is not None]
    known_fair = [value for value in fair.values() if value is not None]
    compared = (
        Compared(
            "throughput: DenseNet over AlexNet, mean over Pj_max",
            40.0,
            float(np.mean(known)) if known else None,
            ".0f",
            "×",
        ),
        Compared("throughput: DenseNet over AlexNet, at most", 70.0, max(known, default=None), ".0f", "×"),
        Compared(
            "scaling efficiency: DenseNet over AlexNet, mean over Pj_max (Table 4)",
            _mean_fair(),
            float(np.mean(known_fair)) if known_fair else None,
            ".1f",
            "×",
        ),
    )
    difference = (
        "The paper's “more than 40× on average and up to 70×” is DenseNet over AlexNet in its Table 3, over all "
        f"Pj_max; our ratio differs because at Pj_max = {last} AlexNet takes {_hours(throughput[last], 'AlexNet')} "
        f"where the paper has 0.6 h, and DenseNet {_hours(throughput[last], 'DenseNet')} where it has 42.3 h."
    )
    models = list(UNDER_THROUGHPUT)
    rows = tuple(
        (
            model,
            throughput[at].get(model),
            printed(UNDER_THROUGHPUT, model, at),
            efficiency[at].get(model),
            printed(UNDER_EFFICIENCY, model, at),
        )
        for model in models
    )
    columns = (
        "model",
        *(f"{who}, {what}, h" for what in ("throughput", "scaling efficiency") for who in ("ours", "paper")),
    )
    return ExperimentResult(
        columns, rows, compared, difference, lambda f: _draw(f, at, throughput[at], efficiency[at], apart), (10.5, 4.2)
    )


def _apart(hours: Hours) -> float | None:
    slow, fast = hours.get("DenseNet"), hours.get("AlexNet")
    return None if slow is None or fast is None else slow / fast


def _hours(hours: Hours, model: str) -> str:
    return f"{hours[model]:.2g} h" if model in hours else "–"


def _mean_fair() -> float:
    pairs = zip(UNDER_EFFICIENCY["DenseNet"], UNDER_EFFICIENCY["AlexNet"], strict=True)
    return float(np.mean([slow / fast for slow, fast in pairs]))


def _draw(figure: Figure, at: int, throughput: Hours, efficiency: Hours, apart: dict[int, float | None]) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    models = list(UNDER_THROUGHPUT)
    places = np.arange(len(models))
    for offset, hours, table, colour, label in (
        (-0.2, throughput, UNDER_THROUGHPUT, OURS, "throughput"),
        (0.2, efficiency, UNDER_EFFICIENCY, GREEN, "scaling efficiency"),
    ):
        left.bar(places + offset, [hours.get(m, 0.0) for m in models], 0.38, color=colour, label=f"ours, {label}")
        values = [printed(table, m, at) for m in models]
        stars = [float("nan") if v is None else v for v in values]
        left.plot(places + offset, stars, "*", color=PAPER, markersize=10, markeredgecolor="white")
    left.plot([], [], "*", color=PAPER, markersize=10, label=f"paper, Tables 3 and 4 at Pj_max = {at}")
    left.set_xticks(places, models, rotation=25, ha="right")
    left.set_title(f"by model, Pj_max = {at}", fontsize=10)
    tidy(left, "", "mean run time, h", grid="y")
    pairs = zip(UNDER_THROUGHPUT["DenseNet"], UNDER_THROUGHPUT["AlexNet"], strict=True)
    right.plot(PARALLELS, [a / b for a, b in pairs], color=PAPER, linestyle="--", marker="*", label="paper, Table 3")
    ratios = [float("nan") if v is None else v for v in apart.values()]
    right.plot(list(apart), ratios, color=OURS, marker="o", markersize=4, label="ours")
    right.set_title("DenseNet over AlexNet, throughput", fontsize=10)
    right.set_ylim(bottom=0)
    tidy(right, "max parallel Pj_max", "ratio of run times")


EXPERIMENT = Experiment(
    "runtime-by-objective", "Run time under two objectives", "Figure 12, §5.2.1", both_objectives, make
)
