"""Figure 13: efficiency of the diverse workload by horizon, under two objectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bftrainer.paper.experiment import Compared, Context, Experiment, ExperimentResult, diverse_run, nearest
from bftrainer.paper.figures import GREEN, OURS, horizon_axis, tidy
from bftrainer.paper.runs import PaperRun, RunResult
from bftrainer.paper.setting import Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OBJECTIVES = ("throughput", "efficiency")


def runs(setting: Setting) -> Sequence[PaperRun]:
    """Both objectives at every horizon."""
    return [diverse_run(setting, objective=o, horizon_s=h) for o in OBJECTIVES for h in setting.diverse_horizons_s]


def make(context: Context) -> ExperimentResult:
    """U of each run, and the node-hours that the workload took."""
    setting = context.setting
    found = {(r.run.objective, r.run.horizon_s): r for r in (context.result(run) for run in runs(setting))}
    horizons = setting.diverse_horizons_s
    rows = tuple(
        (h, *(found[o, h].number(key) for o in OBJECTIVES for key in ("efficiency", "resource_integral_node_hours")))
        for h in horizons
    )
    near = nearest(horizons, 120.0)
    throughput, efficiency = (found[o, near].number("efficiency") for o in OBJECTIVES)
    hours = [found[o, near].number("resource_integral_node_hours") for o in OBJECTIVES]
    fewer = sum(row[4] < row[2] for row in rows)
    better = sum(
        found["efficiency", h].number("efficiency") > found["throughput", h].number("efficiency") for h in horizons
    )
    compared = (
        Compared(f"U under throughput, T = {near:g} s", None, throughput, ".1%"),
        Compared(f"U under scaling efficiency, T = {near:g} s", None, efficiency, ".1%"),
        Compared("horizons at which scaling efficiency has the higher U", 1.0, better / len(horizons), ".0%"),
        Compared("horizons at which it needs fewer node-hours for the work", None, fewer / len(horizons), ".0%"),
        Compared("node-hours of the pool, scaling efficiency over throughput", None, hours[1] / hours[0], ".3f"),
    )
    difference = (
        f"The paper finds U consistently better under scaling efficiency; here it is so at {better} of {len(horizons)} "
        "horizons by U, which compares each objective with static nodes under that objective, and at "
        f"{fewer} of {len(horizons)} by the pool's node-hours for the same work, a yardstick both share."
    )
    columns = ("horizon, s", *(f"{what}, {o}" for o in OBJECTIVES for what in ("U", "node-hours")))
    return ExperimentResult(columns, rows, compared, difference, lambda f: _draw(f, horizons, found), (9.5, 4.2))


def _draw(figure: Figure, horizons: tuple[float, ...], found: dict[tuple[str, float], RunResult]) -> None:
    left, right = figure.subplots(1, 2)
    for objective, colour, label in zip(OBJECTIVES, (OURS, GREEN), ("throughput", "scaling efficiency"), strict=True):
        results = [found[objective, h] for h in horizons]
        us = [r.number("efficiency") * 100 for r in results]
        left.plot(horizons, us, color=colour, marker="o", label=label)
        node_hours = [r.number("resource_integral_node_hours") for r in results]
        right.plot(horizons, node_hours, color=colour, marker="o", label=label)
    for axes in (left, right):
        horizon_axis(axes, horizons)
        axes.margins(y=0.3)
    tidy(left, "horizon T, s", "efficiency U, %")
    tidy(right, "horizon T, s", "pool node-hours until all is done")


EXPERIMENT = Experiment("efficiency-by-objective", "Efficiency under two objectives", "Figure 13, §5.2.1", runs, make)
