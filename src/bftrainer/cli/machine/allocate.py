"""`bftrainer allocate` takes one decision, from a problem in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bftrainer.allocate.problem import Decision, Problem
from bftrainer.allocate.problem_file import parse_problem
from bftrainer.allocate.registry import ALLOCATORS, make_allocator
from bftrainer.cli.common.output import print_json
from bftrainer.errors import InputError
from bftrainer.traces.source import opened
from bftrainer.util.provenance import provenance


def allocate(
    file: Annotated[Path, typer.Argument(metavar="PROBLEM.json", help="Problem file with pool, horizon and trainers.")],
    allocator: Annotated[
        str, typer.Option(metavar="NAME", help=f"Allocator: {', '.join(ALLOCATORS)} or module:name.")
    ] = "exact",
    time_limit: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Time limit of the MILP allocators; they return the best decision found by then.",
        ),
    ] = 60.0,
    backend: Annotated[str, typer.Option(metavar="highs|gurobi", help="Solver of the MILP allocators.")] = "highs",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Decide how many nodes each trainer gets."""
    chosen = make_allocator(allocator, time_limit, backend)
    with opened(file) as source:
        data = source.stream.read()
        try:
            problem = parse_problem(data.decode("utf-8"))
        except UnicodeDecodeError:
            raise InputError("not JSON: not UTF-8 text") from None
        digest = source.sha256()
    decision = chosen.allocate(problem)
    counts = {claim.name: count for claim, count in zip(problem.claims, decision.counts, strict=True)}
    if as_json:
        print_json(
            {
                "status": decision.status,
                "objective": decision.objective,
                "solve_ms": decision.solve_ms,
                "counts": counts,
                "allocator": allocator,
                "provenance": provenance({file.name: digest}),
            }
        )
    else:
        _show(problem, decision)


def _show(problem: Problem, decision: Decision) -> None:
    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("trainer", style="bold")
    for title in ("now", "then", "worth/s now", "worth/s then", "rescaling loses"):
        table.add_column(title, justify="right")
    for claim, count in zip(problem.claims, decision.counts, strict=True):
        now, then = claim.value.rate(claim.running), claim.value.rate(count)
        cost = problem.horizon_s * then - claim.gain_at(count, problem.horizon_s)
        table.add_row(claim.name, f"{claim.current}", f"{count}", f"{now:,.6g}", f"{then:,.6g}", f"{cost:,.6g}")
    console.print(table)
    used = sum(decision.counts)
    console.print(
        f"{decision.status}: {used} of {problem.pool} nodes used, objective {decision.objective:,.9g} over "
        f"{problem.horizon_s:g} s, solved in {decision.solve_ms:.3g} ms",
        soft_wrap=True,
    )


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command()(allocate)
