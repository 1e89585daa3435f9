"""A logbook collects the output of one trainer's workers in one file.

Agents send output in pieces, each with its offset in the worker's own output. The controller appends the piece here and
replies how far it has the output. Every line is stored exactly once, even if a process dies in between: the offset is
written with the line, so it is known after a kill.

Fields of a line, separated by tabs: time, worker, node, offset in the worker's output at which the line ends, text.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from bftrainer.core.trace import utc
from bftrainer.elastic.protocol import ProtocolError
from bftrainer.util import ids

_SCAN = 4 << 20
"""How many bytes at the end of the file are searched for the workers' offsets. A worker whose last line is further back
counts as having none.
"""
MOST_READ = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One line that a worker printed."""

    time: str
    worker: str
    node: str
    text: str


class Logbook:
    """The log of one trainer."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.path = folder / "log"
        self._most = most_bytes
        self._places: dict[str, int] | None = None

    def place(self, worker: str) -> int:
        """Return how many bytes of a worker's output are stored here."""
        if self._places is None:
            self._places = self._scan()
        return self._places.get(worker, 0)

    def append(self, now: float, worker: str, node: str, offset: int, text: str, size: int) -> int:
        """Add a piece of output that begins at `offset` of the worker's output. Returns how far it is stored then.

        A piece that is stored already, or that does not begin where the last one ended, is not added.
        """
        place = self.place(worker)
        if offset != place:
            return place
        assert self._places is not None
        lines = text.removesuffix("\n").split("\n")
        stamp = utc(now)
        # Only the last line has the new offset: if the write is cut before it, the whole piece must be sent again.
        rows = [f"{stamp}\t{worker}\t{node}\t{place}\t{line}" for line in lines[:-1]]
        rows.append(f"{stamp}\t{worker}\t{node}\t{place + size}\t{lines[-1]}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > self._most:
            self.path.replace(self.path.with_suffix(".1"))
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            before = os.fstat(descriptor).st_size
            data = "\n".join([*rows, ""]).encode(errors="replace")
            if os.write(descriptor, data) < len(data):  # the disk is full
                os.ftruncate(descriptor, before)  # otherwise the next line would follow half a line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        finally:
            os.close(descriptor)
        self._places[worker] = place + size
        return place + size

    def read(self, offset: int, limit: int = MOST_READ) -> tuple[list[Line], int]:
        """Return the lines from a byte of the file on, and the byte to continue from. Only whole lines are read."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                start = offset if offset <= size else 0  # a new file was begun
                file.seek(start)
                data = file.read(min(limit, MOST_READ))
        except FileNotFoundError:
            return [], 0
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) >= limit:
            end = len(data)
        return [line for raw in data[:end].split(b"\n") if (line := _parsed(raw))], start + end

    def tail(self, lines: int) -> tuple[list[Line], int]:
        """Return the last lines, and the byte to continue from."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return [], 0
        start = max(size - MOST_READ, 0)
        newest, end = self.read(start)
        return newest[-lines:] if lines else [], end

    def _scan(self) -> dict[str, int]:
        places: dict[str, int] = {}
        try:
            with self.path.open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - _SCAN, 0))
                for raw in file.read().split(b"\n"):
                    fields = raw.split(b"\t", 4)
                    if len(fields) == 5 and fields[3].isdigit():
                        worker = fields[1].decode(errors="replace")
                        places[worker] = max(places.get(worker, 0), int(fields[3]))
        except FileNotFoundError:
            pass
        return places


class Logbooks:
    """The logbooks of all trainers. Each is opened when it is first needed."""

    def __init__(self, open_logbook: Callable[[str], Logbook]) -> None:
        self._open = open_logbook
        self._logbooks: dict[str, Logbook] = {}

    def of(self, trainer: str) -> Logbook:
        """Return the log of a trainer. Raises `ProtocolError` for an id that no trainer can have."""
        if not ids.is_trainer_id(trainer):  # the id becomes part of a path
            raise ProtocolError(f"{trainer[:64]!r} is not a valid trainer id")
        if trainer not in self._logbooks:
            self._logbooks[trainer] = self._open(trainer)
        return self._logbooks[trainer]

    def keep_only(self, trainers: Collection[str]) -> None:
        """Forget the logbooks of all other trainers."""
        for trainer in self._logbooks.keys() - set(trainers):
            del self._logbooks[trainer]


def _parsed(raw: bytes) -> Line | None:
    fields = raw.decode(errors="replace").split("\t", 4)
    return Line(fields[0], fields[1], fields[2], fields[4]) if len(fields) == 5 else None
