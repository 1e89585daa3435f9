"""`bftrainer tune` recommends a horizon and max parallel for this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar, cast, get_args

import typer
from rich.console import Console
from rich.table import Table

from bftrainer.cli.common.output import print_json
from bftrainer.cli.common.progress import share_progress
from bftrainer.cli.machine.simulate import (
    AccountingName,
    AllocatorName,
    CurvesFile,
    DecideOnName,
    From,
    Json,
    Nodes,
    ObjectiveName,
    SnapshotEvery,
    StartS,
    To,
    TraceFile,
    WorkloadFile,
    Zone,
    load,
    one_of,
)
from bftrainer.errors import InputError
from bftrainer.simulate.accounting import Accounting
from bftrainer.simulate.replay import DecideOn
from bftrainer.simulate.study import SNAPSHOT_EVERY_S, Study
from bftrainer.simulate.tuning import Advice, sweep
from bftrainer.simulate.tuning_plot import plot_advice
from bftrainer.traces.plot import check_picture
from bftrainer.util.provenance import file_hash, provenance


def tune(
    trace_file: TraceFile,
    workload_file: WorkloadFile,
    curves: CurvesFile = None,
    nodes: Nodes = None,
    from_: From = None,
    to: To = None,
    tz: Zone = "UTC",
    allocator: AllocatorName = "exact",
    objective: ObjectiveName = "throughput",
    horizons: Annotated[str, typer.Option(metavar="S,S,…", help="Horizons to try, in seconds.")] = "30,60,120,300,600",
    max_parallels: Annotated[str, typer.Option(metavar="P,P,…", help="Values of max parallel to try.")] = "5,10,20,35",
    accounting: AccountingName = "stall",
    decide_on: DecideOnName = "all",
    snapshot_every: SnapshotEvery = SNAPSHOT_EVERY_S,
    start_s: StartS = None,
    plot: Annotated[Path | None, typer.Option(metavar="F", help="Draw the trade-off: .png, .svg or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Sweep horizon and max parallel over a machine's history, show the trade-off and recommend values."""
    if plot is not None:
        check_picture(plot)
    study = Study(
        allocator,
        objective,
        accounting=cast(Accounting, one_of(accounting, get_args(Accounting), "--accounting")),
        decide_on=cast(DecideOn, one_of(decide_on, get_args(DecideOn), "--decide-on")),
        snapshot_every_s=snapshot_every,
    )
    study.settings()
    horizons_s = _numbers(horizons, "--horizons", float)
    parallels = _numbers(max_parallels, "--max-parallels", int)
    trace, workload = load(trace_file, workload_file, curves, nodes, from_, to, tz, start_s)
    with share_progress("sweeping") as progress:
        advice = sweep(trace, workload.trainers, study, horizons_s, parallels, progress)
    if plot is not None:
        plot_advice(advice, plot)
    if as_json:
        inputs = {trace_file.name: file_hash(trace_file), workload_file.name: workload.sha256}
        print_json({**asdict(advice), "provenance": provenance(inputs)})
    else:
        _show(advice, plot)


_N = TypeVar("_N", int, float)


def _numbers(text: str, what: str, kind: Callable[[str], _N]) -> list[_N]:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < n < 1e9 for n in numbers):
        raise InputError(f"{what} must be numbers above 0 separated by commas, but got {text!r}")
    return sorted(set(numbers))


def _show(advice: Advice, plot: Path | None) -> None:
    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("horizon s", "max parallel", "U", "bound", "mean run h", "done", "unoccupied"):
        table.add_column(title, justify="right")
    for trial in advice.trials:
        mark = "bold" if trial is advice.recommended else ""
        hours = "–" if trial.mean_run_hours is None else f"{trial.mean_run_hours:.2f}"
        table.add_row(
            f"{trial.horizon_s:g}",
            str(trial.max_parallel),
            f"{trial.efficiency:.4f}",
            f"{trial.bound:.4f}",
            hours,
            f"{trial.completed:,}",
            f"{trial.unoccupied_share:.1%}",
            style=mark,
        )
    console.print(table)
    chosen = advice.recommended
    console.print(f"recommended: --horizon {chosen.horizon_s:g} --max-parallel {chosen.max_parallel}", style="bold")
    console.print(advice.reasoning, soft_wrap=True)
    if plot is not None:
        console.print(f"wrote {plot}", soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command()(tune)
