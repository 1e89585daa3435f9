"""How long does a decision take? All allocators on the same problems, in one run.

    python benchmarks/allocate.py [--json] [--plot F.png] [--repetitions 10] [--curves curves.json] [--quick]

Trainers cycle through the seven models of the paper (Table 2, or `--curves`), up to 64 nodes each, rescaling costs 18 s
up and 12 s down, horizon 120 s, random feasible starts. `objective_ratio` is the mean ratio to the exact optimum,
`optimal` whether every answer was proven so. HiGHS stops after 60 s. Every problem is solved once by each
allocator, in turns; the first call of each, on a problem of its own, is not counted. `exact` uses compiled code where
numba is installed (`kernel` in its rows), as in any process that takes many decisions; `--no-compiled` leaves it out.
`--owners`: trainers of four owners instead, two with a share of 30 % (one of them capped at half of the pool), one
capped at a quarter, by the two allocators that hold such limits.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bftrainer import __version__
from bftrainer.allocate.exact import ExactAllocator
from bftrainer.allocate.kernel import compiled
from bftrainer.allocate.problem import Allocator, Claim, Decision, Limits, Problem
from bftrainer.allocate.registry import ALLOCATORS, make_allocator
from bftrainer.core.curve import Curve
from bftrainer.core.models import PAPER_CURVES

PAPER_GRID = [(j, n) for j in (5, 10, 20, 35) for n in (100, 200, 400, 800)]
EXASCALE_GRID = [(100, 1000), (100, 10_000), (1000, 10_000)]
WIDE = (35, 10_000, 10_000)
"""Trainers that may each use the whole machine."""
MOST_CELLS = {"milp-nodes": 4000, "milp": 100_000}
"""Trainers × nodes beyond which a MILP would take the benchmark's time and tell nothing new."""
TIME_LIMIT_S = 60.0
OWNERS = ("ann", "bob", "cat", "dan")
OWNERS_GRID = [(10, 100), (20, 300), (35, 800), (100, 1000), (100, 4000)]


def make_problem(curves: Sequence[Curve], trainers: int, nodes: int, most: int, seed: int) -> Problem:
    """A problem with a random feasible start."""
    rng = random.Random(f"{trainers} {nodes} {most} {seed}")
    left = nodes
    claims = []
    for j in range(trainers):
        current = rng.randint(0, min(most, left, 2 * nodes // trainers + 1))
        left -= current
        curve = curves[j % len(curves)]
        if most > 64:
            curve = Curve.amdahl(rng.uniform(0.999, 0.9999), curve.rate(1), most)
        claims.append(Claim(f"t{j}", current, 1, most, curve, 18.0, 12.0))
    return Problem(nodes, 120.0, tuple(claims))


def with_owners(problem: Problem) -> Problem:
    """The same trainers, of four owners with limits."""
    pool = problem.pool
    claims = tuple(replace(claim, owner=OWNERS[j % len(OWNERS)]) for j, claim in enumerate(problem.claims))
    shares = {"ann": 3 * pool // 10, "bob": 3 * pool // 10}
    return replace(problem, claims=claims, limits=Limits({"ann": pool // 2, "cat": pool // 4}, shares))


def measure(allocators: Sequence[Allocator], problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """One row for each allocator on problems of one size. They take turns, so that a slow minute of the machine is
    shared by all.
    """
    answers: dict[str, list[Decision]] = {allocator.name: [] for allocator in allocators}
    for problem in problems:
        for allocator in allocators:
            answers[allocator.name].append(allocator.allocate(problem))
    rows = []
    for name, given in answers.items():
        times = sorted(decision.solve_ms for decision in given)
        pairs = zip(given, answers["exact"], strict=True)
        ratios = [mine.objective / best.objective if best.objective else 1.0 for mine, best in pairs]
        rows.append(
            {
                "trainers": len(problems[0].claims),
                "nodes": problems[0].pool,
                "max_nodes": problems[0].claims[0].max_nodes,
                "allocator": name,
                "median_ms": round(statistics.median(times), 4),
                "p95_ms": round(times[min(len(times) - 1, int(0.95 * len(times)))], 4),
                "objective_ratio": round(statistics.mean(ratios), 12),
                "optimal": all(decision.status == "optimal" for decision in given),
            }
        )
    return rows


def make(name: str, compiled_code: bool) -> Allocator:
    """An allocator ready for use."""
    return ExactAllocator(compiled=compiled_code) if name == "exact" else make_allocator(name, TIME_LIMIT_S)


def run_owners(curves: Sequence[Curve], repetitions: int) -> list[dict[str, Any]]:
    """The rows with limits of owners."""
    rows = []
    for trainers, nodes in OWNERS_GRID:
        problems = [with_owners(make_problem(curves, trainers, nodes, 64, seed)) for seed in range(repetitions)]
        names = ["exact", *(["milp"] if trainers * nodes <= MOST_CELLS["milp"] else [])]
        for row in measure([make(name, False) for name in names], problems):
            rows.append({**row, "owners": len(OWNERS)})
            print(show(row), file=sys.stderr)
    return rows


def run(curves: Sequence[Curve], repetitions: int, quick: bool, compiled_code: bool) -> list[dict[str, Any]]:
    """All rows."""
    sizes = [(j, n, 64) for j, n in ([(5, 50), (10, 100)] if quick else PAPER_GRID + EXASCALE_GRID)]
    rows = []
    for name in ALLOCATORS:  # what a first call pays for imports and caches is not the allocator's time
        make(name, compiled_code).allocate(make_problem(curves, 3, 20, 64, 0))
    for trainers, nodes, most in sizes if quick else [*sizes, WIDE]:
        names = [n for n in ALLOCATORS if trainers * nodes <= MOST_CELLS.get(n, sys.maxsize)]
        problems = [make_problem(curves, trainers, nodes, most, seed) for seed in range(repetitions)]
        for row in measure([make(name, compiled_code) for name in names], problems):
            if row["allocator"] == "exact":
                row["kernel"] = "compiled" if compiled_code else "numpy"
            rows.append(row)
            print(show(row), file=sys.stderr)
    return rows


def show(row: dict[str, Any]) -> str:
    """A row for people."""
    return (
        f"{row['allocator']:10} {row['trainers']:5} x {row['nodes']:6}  {row['median_ms']:11.3f} ms  "
        f"objective {row['objective_ratio']:.6f} of the optimum"
    )


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Time against nodes, a line for each allocator and number of trainers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = {"exact": "#2563a8", "equal": "#8a8f98", "milp": "#3b9b6d", "milp-nodes": "#d9772b"}
    markers = {5: "o", 10: "s", 20: "^", 35: "D", 100: "P", 1000: "X"}
    for name, colour in colours.items():
        for trainers, marker in markers.items():
            some = [r for r in rows if (r["allocator"], r["trainers"], r["max_nodes"]) == (name, trainers, 64)]
            if some:
                xs, ys = [r["nodes"] for r in some], [r["median_ms"] for r in some]
                axes.plot(xs, ys, marker=marker, color=colour, markersize=5, linewidth=1)
    for name, colour in colours.items():
        axes.plot([], [], color=colour, label=name)
    for trainers, marker in markers.items():
        axes.plot([], [], color="black", marker=marker, linestyle="", label=f"{trainers} trainers")
    axes.set(xscale="log", yscale="log", xlabel="nodes in the pool", ylabel="median time of a decision, ms")
    axes.axhline(1000, color="black", linewidth=0.8, linestyle=":")
    axes.text(axes.get_xlim()[1], 1100, "one second ", ha="right", va="bottom", fontsize=8)
    axes.set_title("Time of a decision by trainers and nodes (HiGHS for the MILPs, one core)")
    axes.grid(alpha=0.25, which="both")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)


def main() -> None:
    """Run, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--curves", type=Path, help='{"model": {"nodes": […], "samples_per_s": […]}, …}')
    parser.add_argument("--quick", action="store_true", help="two small sizes only")
    parser.add_argument("--owners", action="store_true", help="with limits of owners")
    parser.add_argument("--no-compiled", action="store_true", help="leave out compiled code")
    args = parser.parse_args()
    curves = list(PAPER_CURVES.values())
    if args.curves:
        found = json.loads(args.curves.read_text())
        curves = [Curve.through(c["nodes"], c["samples_per_s"], name) for name, c in found.items()]
    if args.owners:
        rows = run_owners(curves, args.repetitions)
    else:
        rows = run(curves, args.repetitions, args.quick, not args.no_compiled and compiled() is not None)
    if args.plot:
        plot(rows, args.plot)
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"BFTrainer {__version__}, {args.repetitions} repetitions")
    for row in rows:
        print(show(row))


if __name__ == "__main__":
    main()
