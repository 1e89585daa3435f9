"""Log tails turn the workers' log files into `Log` messages, each byte once.

`LogTails` holds the tails of all workers of a node and how much of each the controller has. The agent polls them. At
most one message per worker is in transit.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bftrainer.cluster.wire.messages import Log
from bftrainer.processes.log_tail import MOST_LOG_BYTES, LogTail


@dataclass(slots=True)
class _Followed:
    tail: LogTail
    sent: bool = True
    ended: bool = False
    forgotten: bool = False
    under_way: bool = False


class LogTails:
    """The log tails of all workers of a node, with which of them have a message in transit to the controller."""

    def __init__(self, most_bytes: int = MOST_LOG_BYTES) -> None:
        self._most_bytes = most_bytes
        self._followed: dict[str, _Followed] = {}

    def follow(self, worker: str, path: Path, *, sent: bool = True) -> None:
        """Start to follow the file that a new worker prints to. An old file of that name is removed.

        If it is not `sent`, it is only kept short, and its end is known when the worker has ended.
        """
        with suppress(OSError):
            path.unlink(missing_ok=True)
        self._followed[worker] = _Followed(LogTail(path, self._most_bytes), sent)

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
            may_send = followed is not None and followed.sent and not followed.under_way
            piece = followed.tail.next(now, followed.ended) if followed and may_send else None
            if followed and piece:
                followed.under_way = True
                messages.append(Log(worker, piece.offset, piece.text, piece.size))
        return messages

    def _tidy(self, worker: str) -> None:
        followed = self._followed[worker]
        if followed.forgotten and followed.ended and (followed.tail.finished or not followed.sent):
            followed.tail.remove()
            del self._followed[worker]
