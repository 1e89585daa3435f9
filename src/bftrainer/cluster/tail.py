"""Follows what workers print: from their log files to `wire.Log` messages, each byte once.

`Tail` reads one file; `Logs` holds those of a node's workers, with what the controller has of each. The agent polls.
Memory and disk are bounded: one message a worker is under way at a time, and a file that has grown too long is cut.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bftrainer.cluster.wire import Log

MOST_LOG_BYTES = 64 << 20
"""How long a worker's file may get. Beyond it is emptied; what was not sent by then is left out, with a note."""
MOST_MESSAGE_BYTES = 256 << 10
MOST_LINE_BYTES = 64 << 10
"""A longer line is sent in pieces."""
INCOMPLETE_S = 1.0
"""How long an unfinished line waits for its end."""
_KEPT_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the output: its first byte's number, how many bytes it stands for, and their text."""

    offset: int
    text: str
    size: int


class Tail:
    """The output of one worker, which appends to a file (O_APPEND) that may be emptied under it."""

    def __init__(self, path: Path, most_bytes: int = MOST_LOG_BYTES) -> None:
        self.offset = 0
        """How many bytes of the output are dealt with: what comes next starts here."""
        self._path = path
        self._most_bytes = most_bytes
        self._base = 0  # how many bytes of the output were cut away: the number of the file's first byte
        self._kept = b""  # the end of what was cut away
        self._incomplete = (-1, 0.0)  # where an unfinished line began, and when it was first seen

    @property
    def finished(self) -> bool:
        """Whether there is nothing more to send at present."""
        return self.offset >= self._base + self._size()

    def seek(self, offset: int) -> None:
        """Go on from this byte of the output."""
        self.offset = max(0, min(offset, self._base + self._size()))

    def next(self, now: float, ended: bool) -> Piece | None:
        """What comes at `offset`: whole lines where possible. The same again until `seek` goes on."""
        if self.offset < self._base:
            size = self._base - self.offset
            return Piece(self.offset, f"[bftrainer: {size:,} bytes of output are left out here]\n", size)
        data = self._read(self.offset - self._base, MOST_MESSAGE_BYTES)
        size = _whole_lines(data)
        if size == 0:
            if not data or not (ended or self._waited(now)):
                return None
            size = len(data)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data[:size])
        begun = len(decoder.getstate()[0])  # the bytes of a character whose end is yet to come
        if 0 < begun < size:
            return Piece(self.offset, text, size - begun)
        return Piece(self.offset, text + decoder.decode(b"", final=True), size)

    def cut(self) -> None:
        """Empty the file if it is too long."""
        size = self._size()
        if size <= self._most_bytes:
            return
        kept = self._read(max(0, size - _KEPT_BYTES), _KEPT_BYTES)
        # What is written between these lines is lost and not counted. Nobody else numbers the bytes, so nobody differs.
        with suppress(OSError):
            os.truncate(self._path, 0)
            self._base += size
            self._kept = kept

    def end(self, characters: int) -> str:
        """The last characters of the output."""
        most = 4 * characters
        size = self._size()
        data = self._read(max(0, size - most), most)
        before = self._kept[-(most - size) :] if size < most else b""
        return (before + data).decode(errors="replace")[-characters:]

    def remove(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:  # somebody has removed it
            return 0

    def _read(self, position: int, most: int) -> bytes:
        try:
            with self._path.open("rb", buffering=0) as file:
                file.seek(position)
                return file.read(most)
        except OSError:
            return b""

    def _waited(self, now: float) -> bool:
        if self._incomplete[0] != self.offset:
            self._incomplete = (self.offset, now)
        return now - self._incomplete[1] >= INCOMPLETE_S


def _whole_lines(data: bytes) -> int:
    """How many bytes to send of what is there: lines with their ends, or a piece of one that is too long."""
    start = 0
    while True:
        end = data.rfind(b"\n", start, start + MOST_LINE_BYTES + 1)
        if end < 0:
            too_long = start == 0 and len(data) > MOST_LINE_BYTES
            return MOST_LINE_BYTES if too_long else start
        start = end + 1


@dataclass(slots=True)
class _Followed:
    tail: Tail
    ended: bool = False
    forgotten: bool = False
    under_way: bool = False


class Logs:
    """The outputs of all workers of a node, and what is under way to the controller."""

    def __init__(self, most_bytes: int = MOST_LOG_BYTES) -> None:
        self._most_bytes = most_bytes
        self._followed: dict[str, _Followed] = {}

    def follow(self, worker: str, path: Path) -> None:
        """A worker is about to print to this file."""
        with suppress(OSError):
            path.unlink(missing_ok=True)
        self._followed[worker] = _Followed(Tail(path, self._most_bytes))

    def ended(self, worker: str, characters: int) -> str:
        """A worker will print no more. The end of what it printed."""
        followed = self._followed.get(worker)
        if followed is None:
            return ""
        followed.ended = True
        return followed.tail.end(characters)

    def forget(self, worker: str) -> None:
        """Nobody asks for this worker any more: its file goes as soon as all of it is with the controller."""
        if worker in self._followed:
            self._followed[worker].forgotten = True
            self._tidy(worker)

    def connected(self, logged: Mapping[str, int]) -> None:
        """A controller is there (again) and has this much of each output. What was under way may be lost."""
        for worker, followed in list(self._followed.items()):
            followed.under_way = False
            followed.tail.seek(logged.get(worker, followed.tail.offset))
            self._tidy(worker)

    def logged(self, worker: str, offset: int) -> None:
        """The controller has the output up to here."""
        if worker in self._followed:
            self._followed[worker].under_way = False
            self._followed[worker].tail.seek(offset)
            self._tidy(worker)

    def cut(self) -> None:
        """Empty the files that are too long, whether or not there is a controller to send them to."""
        for followed in self._followed.values():
            followed.tail.cut()

    def due(self, now: float, only: str | None = None) -> list[Log]:
        """What to send now."""
        found = []
        for worker in list(self._followed) if only is None else [only]:
            followed = self._followed.get(worker)
            piece = followed.tail.next(now, followed.ended) if followed and not followed.under_way else None
            if followed and piece:
                followed.under_way = True
                found.append(Log(worker, piece.offset, piece.text, piece.size))
        return found

    def _tidy(self, worker: str) -> None:
        followed = self._followed[worker]
        if followed.forgotten and followed.ended and followed.tail.finished:
            followed.tail.remove()
            del self._followed[worker]
