"""`bftrainer paper` reproduces the tables and figures of the paper's evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bftrainer.cli.common.output import print_json, warn

if TYPE_CHECKING:
    from bftrainer.paper import reproduce


def paper(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME…|all]", help="Tables and figures to reproduce; default: all.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the figures, tables and report.html.")
    ] = Path("paper"),
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder with the authors' trace and workloads; default: a synthetic Summit."),
    ] = None,
    list_names: Annotated[bool, typer.Option("--list", help="Print the names and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Reproduce the tables and figures of the paper, with its values beside ours.

    Replays are kept in DIR/.cache: an interrupted reproduction continues where it stopped.
    """
    from bftrainer.paper.experiment import as_json as finding_as_json
    from bftrainer.paper.registry import EXPERIMENTS, find_experiments
    from bftrainer.paper.reproduce import reproduce
    from bftrainer.paper.setting import Setting

    if list_names:
        for experiment in EXPERIMENTS:
            print(f"{experiment.name:24} {experiment.title} ({experiment.source})")
        return
    experiments = find_experiments(names or [])
    setting = Setting(data=data)
    if setting.synthetic:
        warn("no --data: the trace is synthetic, so numbers need not match the paper's")
    with _bar() as progress:
        done = reproduce(experiments, setting, output, progress=progress)
    if as_json:
        print_json([finding_as_json(experiment, finding, setting) for experiment, finding in done.findings])
        return
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left", title=setting.describe())
    table.add_column("experiment", style="bold")
    table.add_column("value")
    table.add_column("paper", justify="right")
    table.add_column("ours", justify="right")
    for experiment, finding in done.findings:
        known = [c for c in finding.compared if c.paper is not None] or list(finding.compared)
        for number, compared in enumerate(known):
            name = "" if number else experiment.name
            table.add_row(name, compared.what, compared.show(compared.paper), compared.show(compared.ours))
    Console(highlight=False).print(table)
    print(f"wrote {done.report}")


@contextmanager
def _bar() -> Iterator[reproduce.Progress]:
    """Show a progress bar, on a terminal only."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, done, total: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("paper", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command()(paper)
