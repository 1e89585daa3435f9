"""`bftrainer logs` prints the output of a trainer's workers, as one log over all its nodes and lives."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from bftrainer.cli.common.connection import JsonLines, Patient, State, Url, printable, say, say_json, shown
from bftrainer.cli.common.output import print_json
from bftrainer.errors import InputError

_PAGE_BYTES = 1 << 20

Line = Mapping[str, Any]


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
    with Patient(url, state) as controller:
        # By id: another trainer may get the name of one that is finished.
        found = controller.ask(lambda c: c.trainer(ref))
        if worker is not None and not worker.startswith(f"{found['id']}-"):
            raise InputError(f"--worker must be a worker of {found['id']}, such as {found['id']}-1, but got {worker!r}")
        log = _Log(controller, found["id"])
        lines = log.last(tail, worker) if tail is not None else _of(log.rest(), worker)
        if as_json and not follow:
            print_json({"lines": list(lines), "offset": log.offset, "finished": log.finished})
            return
        while True:
            for line in lines:
                _print(line, prefix, as_json)
            if not follow or log.finished:
                return
            controller.rest()
            lines = _of(log.rest(), worker)


class _Log:
    """Reader of a trainer's log that continues where the last page ended."""

    def __init__(self, controller: Patient, trainer: str) -> None:
        self._controller, self._trainer = controller, trainer
        self.offset = 0
        self.finished = False
        """Whether the trainer is finished, so that no more lines will come."""

    def rest(self) -> Iterator[Line]:
        """All lines that are there and were not read yet."""
        while True:
            offset = self.offset
            page = self._controller.ask(lambda c: c.logs(self._trainer, offset=offset, limit=_PAGE_BYTES))  # noqa: B023
            self.offset = page["offset"]
            yield from page["lines"]
            if self.offset == offset:
                # Only an empty page says that the end was reached.
                self.finished = bool(page["finished"])
                return

    def last(self, count: int, worker: str | None) -> list[Line]:
        """The last `count` lines."""
        if worker is not None:  # the controller counts lines of all workers
            return list(deque(_of(self.rest(), worker), maxlen=count))
        page = self._controller.ask(lambda c: c.logs(self._trainer, tail=max(1, count)))
        self.offset = page["offset"]
        # Lines that arrived since are read before the log counts as finished.
        self.finished = False
        return [*page["lines"], *self.rest()][-count:] if count else []


def _of(lines: Iterator[Line], worker: str | None) -> Iterator[Line]:
    return (line for line in lines if worker is None or line["worker"] == worker)


def _print(line: Line, prefix: bool, as_json: bool) -> None:
    if as_json:
        say_json(line)
    elif prefix:
        say(f"{printable(line['worker'])}@{printable(line['node'])}: {shown(line['text'])}")
    else:
        say(shown(line["text"]))


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("logs")(logs)
