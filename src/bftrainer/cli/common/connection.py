"""Connection of commands to the controller, and what they share: options, and safe printing of text."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console

from bftrainer.cli.common.output import warn
from bftrainer.errors import BFTrainerError

if TYPE_CHECKING:
    from bftrainer.client import Client

Url = Annotated[
    str | None,
    typer.Option(
        "--url", metavar="URL", help="URL of the controller; default: $BFTRAINER_URL, else from the state folder."
    ),
]
State = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="State folder of the controller; default: $BFTRAINER_STATE."),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Configuration file; default: $BFTRAINER_CONFIG, else as the controller was started last.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print JSON; with -f, one object per line.")]

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[@-~]")
_PACKAGES = ("fastapi", "httpx", "prometheus_client", "pydantic", "uvicorn", "websockets")
_WIDTH = 120
"""Width of tables if the output is no terminal."""

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def live_packages() -> Iterator[None]:
    """Wrap imports of the live system: if its packages are missing, the error says what to install."""
    try:
        yield
    except ModuleNotFoundError as problem:
        name = (problem.name or "").partition(".")[0]
        if name not in _PACKAGES:
            raise
        raise BFTrainerError(f"the live system needs the package {name}: pip install 'bftrainer[live]'") from None


def state_of(option: Path | None) -> Path:
    """The state folder: from the option, the environment, the configuration, or the default."""
    from bftrainer.cluster.config.load import load_config

    return load_config(overrides={"server.state": option}).state


def connect(url: str | None, state: Path | None) -> Client:
    """A client of the controller at `url`, or else of the one in the state folder. It looks for it when it is used."""
    with live_packages():
        from bftrainer.client import Client
    logging.getLogger("bftrainer.client").handlers = [_WARNINGS]
    return Client(url, state=state)


class _Warnings(logging.Handler):
    """Prints what a client logs, such as that the controller is away, as warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        warn(record.getMessage())


_WARNINGS = _Warnings()


def collected(items: Generator[T, None, R]) -> tuple[list[T], R]:
    """All items of a generator, and the value that it returns at its end."""
    rows = []
    while True:
        try:
            rows.append(next(items))
        except StopIteration as end:
            return rows, end.value


def screen() -> Console:
    """The console for results. It is wider than rich's 80 columns if no terminal gives a width."""
    forgive()
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else _WIDTH
    return Console(highlight=False, markup=False, emoji=False, width=width)


def say(text: str) -> None:
    """Print a line and flush at once: other programs may follow the output."""
    forgive()
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say_json(value: object) -> None:
    """Print an object as one line of JSON."""
    say(json.dumps(value, allow_nan=False))


def forgive() -> None:
    """Print characters that the terminal cannot encode as question marks instead of raising errors."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def shown(text: str) -> str:
    """A line that a script printed, for stdout. On a terminal, colours are kept and other control sequences removed."""
    if not sys.stdout.isatty() or text.isprintable():
        return text
    plain = "".join(
        part if _COLOUR.fullmatch(part) else "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in part)
        for part in re.split(f"({_COLOUR.pattern})", text)
    )
    return f"{plain}\x1b[0m" if _COLOUR.search(text) else plain


def printable(text: object) -> str:
    """One line of text from a script or a node, without control sequences."""
    plain = _COLOURS.sub("", str(text))
    return "".join(c if c.isprintable() else " " if c in "\t\n\r" else "�" for c in plain)
