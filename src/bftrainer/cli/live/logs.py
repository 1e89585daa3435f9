"""`bftrainer logs` prints the output of a trainer's workers, as one log over all its nodes and lives."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from bftrainer.cli.common.connection import JsonLines, State, Url, collected, connect, printable, say, say_json, shown
from bftrainer.cli.common.output import print_json
from bftrainer.errors import InputError

if TYPE_CHECKING:
    from bftrainer.client import LogLine


def logs(
    ref: Annotated[str, typer.Argument(metavar="REF", help="Id or name of the trainer.")],
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Keep printing until the trainer is finished.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("-n", "--tail", metavar="N", min=0, help="Only the last N lines, and what follows.")
    ] = None,
    worker: Annotated[str | None, typer.Option(metavar="W", help="Only lines of this worker, such as t3-17.")] = None,
    prefix: Annotated[bool, typer.Option("--prefix/--no-prefix", help="Begin lines with the worker's name.")] = True,
    url: Url = None,
    state: State = None,
    as_json: JsonLines = False,
) -> None:
    """Print the output of a trainer's workers."""
    with connect(url, state) as client:
        trainer = client.trainer(ref)["id"]
        if worker is not None and not worker.startswith(f"{trainer}-"):
            raise InputError(f"--worker must be a worker of {trainer}, such as {trainer}-1, but got {worker!r}")
        # By id: another trainer may get the name of one that is finished.
        lines = client.logs(trainer, tail=tail, follow=follow, worker=worker)
        if as_json and not follow:
            rows, end = collected(lines)
            print_json({"lines": [asdict(line) for line in rows], "offset": end.offset, "finished": end.finished})
            return
        for line in lines:
            _print(line, prefix, as_json)


def _print(line: LogLine, prefix: bool, as_json: bool) -> None:
    if as_json:
        say_json(asdict(line))
    elif prefix:
        say(f"{printable(line.worker)}@{printable(line.node)}: {shown(line.text)}")
    else:
        say(shown(line.text))


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("logs")(logs)
