"""Figure 5: solve time of a decision, by trainers and nodes."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bftrainer.allocate.problem import Claim, Problem
from bftrainer.allocate.registry import make_allocator
from bftrainer.paper.experiment import Compared, Context, Experiment, ExperimentResult, no_runs
from bftrainer.paper.figures import BASELINE, GREEN, OURS, PAPER, PURPLE, tidy
from bftrainer.paper.setting import DOWN_S, UP_S, Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALLOCATORS = ("exact", "milp", "milp-nodes")
MOST_CELLS = {"milp-nodes": 2000}
"""Trainers × nodes beyond which the paper's node-level model is left out, so that timing takes minutes at most."""
Row = dict[str, Any]


def make(context: Context) -> ExperimentResult:
    """Time every allocator on the same problems."""
    setting = context.setting
    what = {
        "experiment": "solve-time",
        "sizes": setting.solve_sizes,
        "repetitions": setting.solve_repetitions,
        "limit_s": setting.solve_limit_s,
    }
    rows: list[Row] = context.runs.remember(what, lambda: list(_measure(setting)))
    largest = max(setting.solve_sizes, key=lambda size: size[0] * size[1])
    exact, milp = (_find(rows, name, largest) for name in ALLOCATORS[:2])
    size = f"{largest[0]} trainers, {largest[1]} nodes"
    medians = {name: [r["median_ms"] for r in rows if r["allocator"] == name] for name in ALLOCATORS}
    nodes_s = statistics.median(medians["milp-nodes"]) / 1e3 if medians["milp-nodes"] else None
    compared = (
        Compared(
            "node-level MILP, median size (the paper, on Gurobi: typically less than 1 s)", 1.0, nodes_s, ".2g", " s"
        ),
        Compared("count-level MILP on HiGHS, slowest size", None, max(medians["milp"]), ",.0f", " ms"),
        Compared("exact, slowest size", None, max(medians["exact"]), ",.2f", " ms"),
        Compared(f"exact, {size}", None, exact["median_ms"], ",.2f", " ms"),
        Compared(f"count-level MILP on HiGHS, {size}", None, milp["median_ms"], ",.0f", " ms"),
    )
    difference = (
        "The paper solves its node-level model with Gurobi on up to 800 nodes; HiGHS, which is free, was given sizes "
        f"up to {MOST_CELLS['milp-nodes']} trainers × nodes of it, while the exact dynamic programme finds the same "
        "optimum in milliseconds on all."
    )
    columns = ("allocator", "trainers", "nodes", "median ms", "longest ms", "proven optimal", "objective over optimum")
    keys = ("allocator", "trainers", "nodes", "median_ms", "longest_ms", "optimal", "ratio")
    table = tuple(tuple(row[key] for key in keys) for row in rows)
    return ExperimentResult(
        columns, table, compared, difference, lambda f: _draw(f, rows, setting.solve_limit_s), (8.5, 4.4)
    )


def _find(rows: list[Row], allocator: str, size: tuple[int, int]) -> Row:
    return next(r for r in rows if (r["allocator"], r["trainers"], r["nodes"]) == (allocator, *size))


def _measure(setting: Setting) -> Iterator[Row]:
    for trainers, nodes in setting.solve_sizes:
        problems = [_problem(setting, trainers, nodes, seed) for seed in range(setting.solve_repetitions)]
        best: list[float] = []
        for name in ALLOCATORS:
            if trainers * nodes > MOST_CELLS.get(name, trainers * nodes):
                continue
            allocator = make_allocator(name, setting.solve_limit_s)
            answers = [allocator.allocate(problem) for problem in problems]
            best = best or [answer.objective for answer in answers]
            times = [answer.solve_ms for answer in answers]
            yield {
                "allocator": name,
                "trainers": trainers,
                "nodes": nodes,
                "median_ms": statistics.median(times),
                "longest_ms": max(times),
                "optimal": sum(answer.status == "optimal" for answer in answers),
                "ratio": statistics.mean(a.objective / b if b else 1.0 for a, b in zip(answers, best, strict=True)),
            }


def _problem(setting: Setting, trainers: int, nodes: int, seed: int) -> Problem:
    """The seven models in turn, from a random feasible start, as in the paper."""
    rng = random.Random(f"{trainers} {nodes} {seed}")  # noqa: S311 - nothing is secret here
    curves = list(setting.curves().values())
    left, claims = nodes, []
    for j in range(trainers):
        current = rng.randint(0, min(64, left, 2 * nodes // trainers + 1))
        left -= current
        claims.append(Claim(f"t{j}", current, 1, 64, curves[j % len(curves)], UP_S, DOWN_S))
    return Problem(nodes, setting.horizon_s, tuple(claims))


def _draw(figure: Figure, rows: list[Row], limit_s: float) -> None:
    axes = figure.subplots()
    labels = ("exact (ours)", "count-level MILP, HiGHS", "the paper's node-level MILP, HiGHS")
    markers = dict(zip(sorted({r["trainers"] for r in rows}), "osD^vP", strict=False))
    for name, label, colour in zip(ALLOCATORS, labels, (OURS, GREEN, PURPLE), strict=True):
        axes.plot([], [], color=colour, label=label)
        for trainers, marker in markers.items():
            some = [r for r in rows if (r["allocator"], r["trainers"]) == (name, trainers)]
            xs, ys = [r["nodes"] for r in some], [r["median_ms"] / 1e3 for r in some]
            axes.plot(xs, ys, color=colour, marker=marker, markersize=5, linewidth=1)
    for trainers, marker in markers.items():
        axes.plot([], [], color="black", marker=marker, linestyle="", label=f"{trainers} trainers")
    axes.axhline(1, color=PAPER, linestyle="--", label="paper: typically less than 1 s (Gurobi)")
    axes.axhline(limit_s, color=BASELINE, linestyle=":", label=f"time limit here, {limit_s:g} s")
    axes.set(xscale="log", yscale="log")
    nodes = sorted({r["nodes"] for r in rows})
    axes.set_xticks(nodes, [str(n) for n in nodes])
    axes.xaxis.minorticks_off()
    tidy(axes, "nodes in the pool", "time of a decision, s (median)", legend=False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


EXPERIMENT = Experiment("solve-time", "Time to decide", "Figure 5, §3.7", no_runs, make, on_trace=False)
