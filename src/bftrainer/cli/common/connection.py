"""Connection of commands to the controller: shared options, address lookup, waiting while the controller is away."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console

from bftrainer.cli.common.output import warn
from bftrainer.errors import BFTrainerError

if TYPE_CHECKING:
    from bftrainer.client.api import ApiClient

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
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print JSON; with -f, one object per line.")]

"""Final states of a trainer."""
POLL_S = 1.0
"""Time between two requests of a command that follows something."""
PATIENCE_S = 120.0
"""How long a command that follows something waits for a controller that is being restarted."""

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[@-~]")
_PACKAGES = ("fastapi", "httpx", "prometheus_client", "pydantic", "uvicorn", "websockets")
_WIDTH = 120
"""Width of tables if the output is no terminal."""

T = TypeVar("T")


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


def connect(url: str | None, state: Path | None) -> ApiClient:
    """A client of the controller at `url`, or else of the one in the state folder."""
    with live_packages():
        from bftrainer.client.api import ApiClient, find_controller
    return ApiClient(find_controller(state_of(state), url))


class Patient:
    """Client that repeats requests while the controller is being restarted, for commands that follow something."""

    def __init__(
        self,
        url: str | None,
        state: Path | None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._where = (url, state)
        self._client: ApiClient | None = None
        self._sleep, self._clock = sleep, clock
        self._met = False

    def ask(self, question: Callable[[ApiClient], T]) -> T:
        """Return an answer. A controller that never answered is an error; one that stopped answering is waited for."""
        with live_packages():
            from bftrainer.client.api import UnreachableError
        lost_at: float | None = None
        while True:
            try:
                if self._client is None:
                    self._client = connect(*self._where)  # again: after a restart the port may differ
                answer = question(self._client)
            except UnreachableError as problem:
                self.close()
                if not self._met or (lost_at is not None and self._clock() - lost_at > PATIENCE_S):
                    raise
                if lost_at is None:
                    lost_at = self._clock()
                    warn(f"{problem} (waiting for it)")
                self._sleep(POLL_S)
            else:
                self._met = True
                return answer

    def rest(self) -> None:
        """Wait before the next question."""
        self._sleep(POLL_S)

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def __enter__(self) -> Patient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
