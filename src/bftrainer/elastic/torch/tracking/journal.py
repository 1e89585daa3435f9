"""Journal of a tracker: the id of its run and all values that it logged, in the trainer's output folder.

Whichever rank becomes the main one reads it, so that a run has one id and no step comes twice, also after the loss of
rank 0 or of all nodes. It has the values too: W&B keeps the newest ones in memory, and they die with the process.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bftrainer.util.files import replace_file

FOLDER = "trackers"
"""Folder below the output folder."""


class LoggedValues(NamedTuple):
    """The values of one call of `log`."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Which run of a tracker belongs to a training."""

    id: str
    """The id of the run, for the tracker."""
    training: str
    """Names the training that the run is of."""


def find_run(path: Path, training: str, name: str, *, continues: bool) -> RunIdentity:
    """Return the run of a training from the file `path`; make a new one if it has none, and write it.

    The file's run is that of this training if the file says so, or if `continues`: the training was begun earlier, by
    processes that had another name for it, which the file then gets. `name` is the beginning of a new id.
    """
    try:
        found = json.loads(path.read_text())
        known = RunIdentity(str(found["id"]), str(found["training"]))
    except (OSError, ValueError, KeyError, TypeError):
        known = None
    if known is not None and known.training == training:
        return known
    if known is not None and continues:
        run = RunIdentity(known.id, training)
    else:
        run = RunIdentity(f"{name}-{secrets.token_hex(4)}" if name else secrets.token_hex(4), training)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps({"id": run.id, "training": run.training}) + "\n", 0o644)
    return run


class TrackerJournal:
    """All values that were logged to a run, one line of JSON per call: `[step, time, {name: value}]`.

    Lines are appended. A line that a killed process wrote in part is removed by the next process that opens the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: dict[str, int] = {}
        self._mend()
        for logged in self.entries():
            self._note(logged)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been logged."""
        return not self._last

    @property
    def newest_step(self) -> int:
        """The greatest step that any value was logged for; -1 if there is none."""
        return max(self._last.values(), default=-1)

    def last_step(self, name: str) -> int:
        """Return the greatest step that a value of this name was logged for; -1 if there is none."""
        return self._last.get(name, -1)

    def append(self, logged: LoggedValues) -> None:
        """Add the values of one call."""
        os.write(self._file, json.dumps([logged.step, logged.time, dict(logged.values)]).encode() + b"\n")
        self._note(logged)

    def entries(self) -> Iterator[LoggedValues]:
        """Yield all values from the file, in order."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            for line in file:
                found = _parsed(line)
                if found is not None:
                    yield found

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _note(self, logged: LoggedValues) -> None:
        for name in logged.values:
            self._last[name] = max(self.last_step(name), logged.step)

    def _mend(self) -> None:
        """Cut off a last line that is not complete."""
        try:
            with self._path.open("rb+") as file:
                end = file.seek(0, os.SEEK_END)
                size = min(end, 1 << 16)
                file.seek(end - size)
                tail = file.read(size)
                if tail and not tail.endswith(b"\n"):
                    file.truncate(end - size + tail.rfind(b"\n") + 1)
        except FileNotFoundError:
            return


def _parsed(line: bytes) -> LoggedValues | None:
    """Return the values of a line; None if a crash of the machine has damaged it."""
    try:
        found: Any = json.loads(line)
        step, time, values = found
        return LoggedValues(int(step), float(time), {str(name): float(value) for name, value in values.items()})
    except (ValueError, TypeError, AttributeError):
        return None
