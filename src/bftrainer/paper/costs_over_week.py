"""Figure 11: cost of preemption and rescaling over a week, in windows of six hours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bftrainer.core.trace import Floats
from bftrainer.paper.efficiency_over_week import runs
from bftrainer.paper.experiment import Compared, Context, Experiment, ExperimentResult
from bftrainer.paper.figures import BASELINE, OURS, tidy
from bftrainer.paper.windows import Spans, six_hours, spans

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make(context: Context) -> ExperimentResult:
    """Both costs of both schemes, in samples."""
    setting = context.setting
    results = [context.result(run) for run in runs(setting)]
    edges = six_hours(setting.trace().window, min(float(r.timeline.time[-1]) for r in results))
    ours, base = (spans(result.timeline, edges) for result in results)
    hours = (edges[:-1] - edges[0]) / 3600

    def ratio(above: Floats, below: Floats) -> float | None:
        return float(above.sum() / below.sum()) if below.sum() > 0 else None

    preemption, rescale = ratio(base.preemption, ours.preemption), ratio(base.rescale, ours.rescale)
    compared = (
        Compared("preemption cost, baseline over ours (the paper: little difference)", None, preemption, ".2f", "×"),
        Compared("rescaling cost, baseline over ours (the paper: much more)", None, rescale, ".1f", "×"),
    )
    difference = (
        "The paper shows both without numbers; here equal shares pay "
        f"{'–' if rescale is None else f'{rescale:.1f}×'} as much as ours for rescaling, and "
        f"{'–' if preemption is None else f'{preemption:.2f}×'} for preemption, which affects the trainers that "
        "hold the nodes."
    )
    columns = ("hour", "preemption", "preemption, baseline", "rescaling", "rescaling, baseline")
    rows = tuple(
        zip(
            *(column.tolist() for column in (hours, ours.preemption, base.preemption, ours.rescale, base.rescale)),
            strict=True,
        )
    )
    return ExperimentResult(columns, rows, compared, difference, lambda f: _draw(f, hours, ours, base), (10.5, 3.9))


def _draw(figure: Figure, hours: Floats, ours: Spans, base: Spans) -> None:
    left, right = figure.subplots(1, 2)
    for axes, mine, theirs, title in (
        (left, ours.preemption, base.preemption, "preemption cost"),
        (right, ours.rescale, base.rescale, "rescaling cost (log scale)"),
    ):
        axes.bar(hours + 2, mine / 1e6, 2, color=OURS, label="ours")
        axes.bar(hours + 4, theirs / 1e6, 2, color=BASELINE, label="baseline of equal shares")
        axes.set_xticks(np.append(hours, hours[-1] + 6)[::4])
        axes.set_title(title, fontsize=10)
        axes.margins(y=0.2)
        tidy(axes, "hours since the start", "million samples in six hours", grid="y")
    if ours.rescale.max() > 0:
        right.set_yscale("log")


EXPERIMENT = Experiment("costs-over-week", "Costs of preemption and rescaling over a week", "Figure 11", runs, make)
