"""Figure 8: return on investment of rescaling; the return is the output until the next event."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bftrainer.core.trace import Floats
from bftrainer.paper.experiment import Compared, Context, Experiment, ExperimentResult, horizon_runs, hpo_run
from bftrainer.paper.figures import GREEN, OURS, RED, tidy
from bftrainer.paper.windows import steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make(context: Context) -> ExperimentResult:
    """Return on investment at every event that rescales, by horizon."""
    setting = context.setting
    ratios: dict[float, Floats] = {}
    rows = []
    for horizon in setting.horizons_s:
        result = context.result(hpo_run(setting, horizon_s=horizon))
        cut = steps(result.timeline)
        invested = cut.rescale > 0
        ratios[horizon] = cut.gross[invested] / cut.rescale[invested]
        total = float(cut.gross[invested].sum() / cut.rescale.sum()) if invested.any() else None
        quartiles = np.percentile(ratios[horizon], [25, 50, 75]).tolist() if invested.any() else [None] * 3
        hourly = result.number("outcome_samples") / result.number("hours")
        rows.append((horizon, int(invested.sum()), total, *quartiles, hourly))
    first, last = rows[0], rows[-1]
    compared = (
        Compared(f"average return on investment, T = {first[0]:g} s", None, first[2], ".1f"),
        Compared(f"average return on investment, T = {last[0]:g} s", None, last[2], ".1f"),
        Compared(f"samples per hour, T = {last[0]:g} s over T = {first[0]:g} s", None, last[6] / first[6], ".3f"),
    )
    falls = first[2] is not None and last[2] is not None and last[2] < first[2]
    difference = (
        f"As in the paper, which gives no numbers, the outcome saturates with the horizon; the return on investment "
        f"{'falls' if falls else 'does not fall here'} from the shortest horizon to the longest, counted over the "
        "events that rescale at all."
    )
    columns = ("horizon, s", "events that rescale", "average", "25 %", "median", "75 %", "samples per hour")
    return ExperimentResult(columns, tuple(rows), compared, difference, lambda f: _draw(f, ratios, rows), (8, 4.4))


def _draw(figure: Figure, ratios: dict[float, Floats], rows: list[tuple[float | None, ...]]) -> None:
    axes = figure.subplots()
    places = np.arange(len(ratios))
    axes.boxplot(
        [r if len(r) else [float("nan")] for r in ratios.values()],
        positions=places,
        widths=0.5,
        showfliers=False,
        whis=(5, 95),
        medianprops={"color": OURS},
    )
    averages = [float("nan") if row[2] is None else row[2] for row in rows]
    axes.plot(places, averages, color=RED, marker="o", markersize=4, label="average: all returns over all costs")
    axes.plot([], [], color=OURS, label="median, quartiles, 5–95 % of events")
    axes.set_xticks(places, [f"{h:g}" for h in ratios])
    axes.set_yscale("log")
    other = axes.twinx()
    hourly = np.array([row[6] for row in rows], dtype=np.float64) / 1e6
    other.plot(places, hourly, color=GREEN, linestyle=":", marker="s", markersize=4)
    axes.plot([], [], color=GREEN, linestyle=":", marker="s", markersize=4, label="outcome (right axis)")
    other.set_ylabel("outcome, million samples per hour", color=GREEN)
    other.set_ylim(0, hourly.max() * 1.25 or 1)
    tidy(axes, "horizon T, s", "return on investment, samples per sample", grid="y", legend=False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)


EXPERIMENT = Experiment("roi", "Return on the investment of rescaling", "Figure 8, §5.1.1", horizon_runs, make)
