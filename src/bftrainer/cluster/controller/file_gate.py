"""The file gate writes the files of trainers in a thread, and holds back the starts of their workers meanwhile.

A launcher makes a trainer's folders and host list whenever the trainer's nodes change. They are on a shared file system
that may hang, so the event loop does not wait for them. A worker is started only when the files of its trainer are
written. All later messages for its node wait too, so that they stay in order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from bftrainer.cluster.controller.connection import Connection, Connections
from bftrainer.cluster.wire.messages import FromController, Start
from bftrainer.util.serial_thread import SerialThread

STUCK_S = 10.0
"""Work on files that takes longer is reported: the file system hangs."""

_log = logging.getLogger(__name__)


class FileGate:
    """Sends messages to agents, those that need files after the files. `failed` is called if files cannot be written.

    Call its methods only in the thread of the running event loop.
    """

    def __init__(self, connections: Connections, failed: Callable[[str, BaseException], None]) -> None:
        self._connections = connections
        self._failed = failed
        self._thread = SerialThread("trainers' files")
        self._unwritten: dict[str, int] = {}
        """How many pieces of work are left for each trainer."""
        self._held: dict[Connection, deque[FromController]] = {}
        self._stuck = False

    def write(self, trainer: str, work: Callable[[], None]) -> None:
        """Write files of a trainer. Starts of its workers that are sent after this call wait for them."""
        self._unwritten[trainer] = self._unwritten.get(trainer, 0) + 1
        self._thread.do(work, partial(self._written, trainer))

    def send(self, node: str, message: FromController) -> None:
        """Send a message to the agent of a node, after the files it needs. It is dropped if no agent is connected."""
        connection = self._connections.get(node)
        if connection is None:
            return
        if connection in self._held or self._must_wait(message):
            self._held.setdefault(connection, deque()).append(message)
        else:
            connection.send(message)

    def tick(self) -> None:
        """Report a file system that hangs, once. Call it regularly."""
        stuck = self._thread.busy_s > STUCK_S
        if stuck and not self._stuck:
            waiting = ", ".join(sorted(self._unwritten)[:10])
            _log.error("the file system of the trainers' folders does not answer: workers of %s wait", waiting)
        elif self._stuck and not stuck:
            _log.warning("the file system of the trainers' folders answers again")
        self._stuck = stuck

    def _must_wait(self, message: FromController) -> bool:
        return isinstance(message, Start) and message.trainer in self._unwritten

    def _written(self, trainer: str, _: None, problem: BaseException | None) -> None:
        self._unwritten[trainer] -= 1
        if not self._unwritten[trainer]:
            del self._unwritten[trainer]
        if problem is not None:
            self._failed(trainer, problem)  # first: what it sends to held nodes comes after the starts
        for connection, messages in list(self._held.items()):
            while messages and not self._must_wait(messages[0]):
                connection.send(messages.popleft())
            if not messages or not self._connections.is_current(connection):
                del self._held[connection]
