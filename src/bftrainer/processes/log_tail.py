"""Log tail: reads the file that a worker prints to, each byte once.

The agent of a node forwards the pieces; a manager shows the end of the output of a worker that has failed. Memory and
disk use are bounded: a file that has grown too long is emptied.
"""

from __future__ import annotations

import codecs
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MOST_LOG_BYTES = 64 << 20
"""The largest size of a worker's file. A larger file is emptied; output not sent by then is left out, with a note."""
MOST_MESSAGE_BYTES = 256 << 10
MOST_LINE_BYTES = 64 << 10
"""A longer line is sent in pieces."""
MOST_WAITING_BYTES = 8 << 20
"""With more output waiting to be sent, all but the last part is left out, with a note."""
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
        if self._base + self._size() - self.offset > MOST_WAITING_BYTES:
            return self._left_out()
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

    def _left_out(self) -> Piece:
        """Return a note that stands for all output but the last part, up to the end of a line."""
        place = self.offset - self._base
        left = self._size() - place - MOST_MESSAGE_BYTES
        size = lines = 0
        last = b""
        while left > 0 and (data := self._read(place + size, min(left, 1 << 20))):
            size, lines, left, last = size + len(data), lines + data.count(b"\n"), left - len(data), data
        rest = b"" if last.endswith(b"\n") else self._read(place + size, MOST_LINE_BYTES)
        end = rest.find(b"\n") + 1
        return Piece(self.offset, f"… {lines + bool(end):,} lines left out\n", size + end)

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
