"""Log tails turn the workers' log files into `Log` messages, each byte once.

`LogTail` reads one file. `LogTails` holds the tails of all workers of a node and how much of each the controller has.
The agent polls them. Memory and disk use are bounded: at most one message per worker is in transit, and a file that has
grown too long is emptied.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bftrainer.cluster.wire.messages import Log

MOST_LOG_BYTES = 64 << 20
"""The largest size of a worker's file. A larger file is emptied; output not sent by then is left out, with a note."""
MOST_MESSAGE_BYTES = 256 << 10
MOST_LINE_BYTES = 64 << 10
"""A longer line is sent in pieces."""
INCOMPLETE_S = 1.0
"""How many seconds an unfinished line waits for its end before it is sent."""
_KEPT_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the output: the offset of its first byte, its text, and how many bytes of output the text covers."""

    offset: int
    text: str
    size: int


class LogTail:
    """Reads the output of one worker. The worker appends to a file (O_APPEND), which may be emptied while it writes."""

    def __init__(self, path: Path, most_bytes: int = MOST_LOG_BYTES) -> None:
        self.offset = 0
        """How many bytes of the output are dealt with. The next piece starts here."""
        self._path = path
        self._most_bytes = most_bytes
        self._base = 0  # how many bytes of the output were cut away: the offset of the file's first byte
        self._kept = b""  # the end of the output that was cut away
        self._incomplete = (-1, 0.0)  # where an unfinished line began, and when it was first seen

    @property
    def finished(self) -> bool:
        """Whether all of the current output has been sent."""
        return self.offset >= self._base + self._size()

    def seek(self, offset: int) -> None:
        """Continue from this byte of the output."""
        self.offset = max(0, min(offset, self._base + self._size()))

    def next(self, now: float, ended: bool) -> Piece | None:
        """Return the piece at `offset`, in whole lines where possible; None if there is none yet.

        The same piece is returned until `seek` moves `offset`. `ended`: the worker will print no more.
        """
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
        begun = len(decoder.getstate()[0])  # the bytes of a character that is not complete yet
        if 0 < begun < size:
            return Piece(self.offset, text, size - begun)
        return Piece(self.offset, text + decoder.decode(b"", final=True), size)

    def cut(self) -> None:
        """Empty the file if it is too long."""
        size = self._size()
        if size <= self._most_bytes:
            return
        kept = self._read(max(0, size - _KEPT_BYTES), _KEPT_BYTES)
        # Output written between read and truncate is lost and not counted. Offsets stay consistent, because only this
        # class assigns them.
        with suppress(OSError):
            os.truncate(self._path, 0)
            self._base += size
            self._kept = kept

    def end(self, characters: int) -> str:
        """Return the last characters of the output."""
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
        except OSError:  # the file was removed by someone else
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
    """Return how many bytes of `data` to send: complete lines, or a piece of a line that is too long."""
    start = 0
    while True:
        end = data.rfind(b"\n", start, start + MOST_LINE_BYTES + 1)
        if end < 0:
            too_long = start == 0 and len(data) > MOST_LINE_BYTES
            return MOST_LINE_BYTES if too_long else start
        start = end + 1


@dataclass(slots=True)
class _Followed:
    tail: LogTail
    ended: bool = False
    forgotten: bool = False
    under_way: bool = False


class LogTails:
    """The log tails of all workers of a node, with which of them have a message in transit to the controller."""

    def __init__(self, most_bytes: int = MOST_LOG_BYTES) -> None:
        self._most_bytes = most_bytes
        self._followed: dict[str, _Followed] = {}

    def follow(self, worker: str, path: Path) -> None:
        """Start to follow the file that a new worker prints to. An old file of that name is removed."""
        with suppress(OSError):
            path.unlink(missing_ok=True)
        self._followed[worker] = _Followed(LogTail(path, self._most_bytes))

    def ended(self, worker: str, characters: int) -> str:
        """Record that a worker will print no more, and return the last characters of its output."""
        followed = self._followed.get(worker)
        if followed is None:
            return ""
        followed.ended = True
        return followed.tail.end(characters)

    def forget(self, worker: str) -> None:
        """Remove a worker's file as soon as the controller has all of it."""
        if worker in self._followed:
            self._followed[worker].forgotten = True
            self._tidy(worker)

    def connected(self, logged: Mapping[str, int]) -> None:
        """Continue with a new connection: `logged` is how much of each output the controller has.

        Messages that were in transit may be lost.
        """
        for worker, followed in list(self._followed.items()):
            followed.under_way = False
            followed.tail.seek(logged.get(worker, followed.tail.offset))
            self._tidy(worker)

    def logged(self, worker: str, offset: int) -> None:
        """Record that the controller has a worker's output up to `offset`."""
        if worker in self._followed:
            self._followed[worker].under_way = False
            self._followed[worker].tail.seek(offset)
            self._tidy(worker)

    def cut(self) -> None:
        """Empty the files that are too long, whether or not there is a connection to the controller."""
        for followed in self._followed.values():
            followed.tail.cut()

    def due(self, now: float, only: str | None = None) -> list[Log]:
        """Return the messages to send now, of all workers or of `only` one."""
        messages = []
        for worker in list(self._followed) if only is None else [only]:
            followed = self._followed.get(worker)
            piece = followed.tail.next(now, followed.ended) if followed and not followed.under_way else None
            if followed and piece:
                followed.under_way = True
                messages.append(Log(worker, piece.offset, piece.text, piece.size))
        return messages

    def _tidy(self, worker: str) -> None:
        followed = self._followed[worker]
        if followed.forgotten and followed.ended and followed.tail.finished:
            followed.tail.remove()
            del self._followed[worker]
