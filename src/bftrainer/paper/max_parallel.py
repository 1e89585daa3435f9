"""Figure 14: node-hours saved and run time lost by running more trainers at a time (max parallel)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bftrainer.paper.experiment import Compared, Context, Experiment, ExperimentResult, nearest
from bftrainer.paper.figures import GREEN, OURS, PAPER, tidy
from bftrainer.paper.runs import RunResult
from bftrainer.paper.runtimes import both_objectives, parallel_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OBJECTIVES = ("efficiency", "throughput")
KEYS = ("resource_integral_node_hours", "mean_run_hours", "efficiency", "unoccupied_share")


def make(context: Context) -> ExperimentResult:
    """Resource integral, mean run time, U and unoccupied share by max parallel."""
    setting = context.setting
    found = {o: [context.result(run) for run in parallel_runs(o)(setting)] for o in OBJECTIVES}
    alone = _one_node_hours(context)
    rows = tuple(
        (objective, r.run.max_parallel, *(r.metrics[key] for key in KEYS), _per_node(r, alone))
        for objective, results in found.items()
        for r in results
    )
    results = found["efficiency"]
    by_parallel = {r.run.max_parallel: r for r in results}
    first, last = results[0], results[-1]
    ten = by_parallel[int(nearest(tuple(by_parallel), 10))]
    compared = (
        Compared("resource integral, Pj_max 5 to 35", -0.28, _change(first, last, KEYS[0]), "+.0%"),
        Compared("mean run time, Pj_max 5 to 35", 4.42, _change(first, last, KEYS[1]), "+.0%"),
        Compared("unoccupied at Pj_max = 5", 0.124, first.number("unoccupied_share"), ".1%"),
        Compared("unoccupied at Pj_max = 10", 0.021, ten.number("unoccupied_share"), ".1%"),
        Compared(
            "rise of U, Pj_max 5 to 35, points", None, 100 * (last.number(KEYS[2]) - first.number(KEYS[2])), "+.1f"
        ),
        Compared(
            "rise of work per node-hour over one node's, points",
            None,
            100 * (_per_node(last, alone) - _per_node(first, alone)),
            "+.1f",
        ),
    )
    difference = (
        "Values are under scaling efficiency; the trade is the paper's, and what is left unoccupied differs with the "
        "nodes replayed; U is measured against static nodes with the same Pj_max, so the work per node-hour rises more."
    )
    columns = ("objective", "Pj_max", "node-hours", "mean run hours", "U", "unoccupied", "work per node-hour")
    return ExperimentResult(columns, rows, compared, difference, lambda f: _draw(f, found, alone), (11, 3.9))


def _change(first: RunResult, last: RunResult, key: str) -> float | None:
    before, after = first.metrics[key], last.metrics[key]
    return None if not before or after is None else float(after / before - 1)


def _one_node_hours(context: Context) -> dict[str, float]:
    """Node-hours that each trainer's work would take on one node."""
    return {t.name: t.work / t.curve.rate(1) / 3600 for t in context.setting.workload("diverse")}


def _per_node(result: RunResult, alone: dict[str, float]) -> float:
    """Work done, in node-hours of one-node runs, for each node-hour of the pool."""
    done = sum(alone[row["name"]] for row in result.metrics["trainers"] if row["end"] is not None)
    return done / result.number("resource_integral_node_hours")


def _draw(figure: Figure, found: dict[str, list[RunResult]], alone: dict[str, float]) -> None:
    panels = figure.subplots(1, 3)
    for (objective, results), colour in zip(found.items(), (GREEN, OURS), strict=True):
        parallel = [r.run.max_parallel for r in results]
        label = "scaling efficiency" if objective == "efficiency" else "throughput"
        for axes, key, factor in zip(panels, KEYS, (1e-3, 1, 100), strict=False):
            values = [float("nan") if r.metrics[key] is None else r.metrics[key] * factor for r in results]
            axes.plot(parallel, values, color=colour, marker="o", markersize=4, label=label)
        per_node = [_per_node(r, alone) * 100 for r in results]
        panels[2].plot(parallel, per_node, color=colour, linestyle=":", marker="s", markersize=3)
    panels[2].plot([], [], color="black", label="U")
    panels[2].plot([], [], color="black", linestyle=":", label="work per node-hour over one node's")
    for axes, label in zip(
        panels, ("resource integral, 1000 node-hours", "mean run time, h", "efficiency, %"), strict=True
    ):
        axes.margins(y=0.2)
        tidy(axes, "max parallel Pj_max", label, legend=False)
    first = found["efficiency"][0].metrics
    for axes, key, factor, change, words in (
        (panels[0], KEYS[0], 1e-3, -0.28, "paper: −28 %"),
        (panels[1], KEYS[1], 1, 4.42, "paper: +442 %"),
    ):
        if first[key] is not None:
            # The paper gives only the change, so its line starts where ours starts.
            (star,) = axes.plot([35], [first[key] * factor * (1 + change)], "*", color=PAPER, markersize=12)
            axes.legend([star], [words], fontsize=8, loc="lower right")
    panels[0].set_ylim(bottom=0)
    panels[1].set_ylim(bottom=0)
    handles, labels = panels[2].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)


EXPERIMENT = Experiment("max-parallel", "Trainers at a time", "Figure 14, §5.3", both_objectives, make)
