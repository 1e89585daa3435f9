"""The output writer appends workers' output to the logbooks, in a thread of its own.

The logbooks may be on a file system that is slow or hangs, so the event loop never waits for them. The `AgentHub`
passes in the pieces that agents send. A piece is acknowledged after it is written, and later if the trainer prints more
than its budget allows. An agent has at most one piece of each worker in transit, so a late acknowledgement slows it
down. If too much waits to be written, pieces are not taken, and their agents are told to send them again later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from functools import partial

from bftrainer.cluster.controller.output.budget import OutputBudget
from bftrainer.cluster.controller.output.logbook import Logbook
from bftrainer.cluster.wire.messages import Log
from bftrainer.util import ids
from bftrainer.util.serial_thread import SerialThread

MOST_WAITING_CHARACTERS = 64 << 20
AGAIN_S = 5.0
"""When a piece that was not taken may be sent again."""
STUCK_S = 10.0
"""A write that takes longer is reported: the file system hangs."""
KEPT_S = 600.0
"""The logbook and the budget of a trainer that is over are kept for this long after its last piece of output."""
FLUSH_S = 2.0
"""How long `close` waits for what is still to be written."""

_log = logging.getLogger(__name__)


class OutputWriter:
    """Writes output in order. Call its methods only in the thread of the running event loop.

    `acknowledge` is called with the node, the worker and how far the worker's output is stored.
    """

    def __init__(self, budget: OutputBudget, acknowledge: Callable[[str, str, int], None]) -> None:
        self._budget = budget
        self._acknowledge = acknowledge
        self._thread = SerialThread("output writer")
        self._offsets: dict[str, int] = {}
        """The offset of the piece of each worker that is not acknowledged yet."""
        self._unwritten: dict[str, int] = {}
        """How many pieces of each trainer are not written yet."""
        self._answered: dict[str, float] = {}
        """When the last piece of each trainer was or will be acknowledged."""
        self._waiting_characters = 0
        self._stuck = self._closed = False

    def take(self, node: str, log: Log, logbook: Logbook, now: float) -> bool:
        """Have a piece of output written.

        A piece that comes before the last one of its worker was acknowledged is ignored. Returns False for it, unless
        it repeats the last one: its agent has connected again.
        """
        if self._closed or log.worker in self._offsets:
            return log.offset == self._offsets.get(log.worker)
        self._offsets[log.worker] = log.offset
        if self._waiting_characters + len(log.text) > MOST_WAITING_CHARACTERS:
            self._answer_later(AGAIN_S, node, log.worker, log.offset)
            return True
        trainer = ids.trainer_of(log.worker)
        self._unwritten[trainer] = self._unwritten.get(trainer, 0) + 1
        self._waiting_characters += len(log.text)
        append = partial(logbook.append, now, log.worker, node, log.offset, log.text, log.size)
        self._thread.do(append, partial(self._written, node, log, logbook))
        return True

    def is_complete(self, trainer: str) -> bool:
        """Whether all output of a trainer that has come is written."""
        return trainer not in self._unwritten

    def printing(self) -> Collection[str]:
        """Return the trainers whose output may still come: a piece came within the last minutes.

        Agents send what the workers of a trainer have printed also after its end.
        """
        since = time.monotonic() - KEPT_S
        self._answered = {trainer: at for trainer, at in self._answered.items() if at > since}
        return self._answered.keys() | self._unwritten.keys()

    def tick(self, trainers: Collection[str]) -> None:
        """Report a file system that hangs, once. Forget the budgets of all trainers but these."""
        self._budget.keep_only(trainers)
        stuck = self._thread.busy_s > STUCK_S
        if stuck and not self._stuck:
            _log.error("the file system of the trainers' logs does not answer: output of workers waits")
        elif self._stuck and not stuck:
            _log.warning("the file system of the trainers' logs answers again")
        self._stuck = stuck

    def close(self) -> None:
        """Write what has come, within `FLUSH_S` seconds. What is not written then is sent to the next controller."""
        self._closed = True
        self._thread.close(FLUSH_S)

    def _written(
        self, node: str, log: Log, logbook: Logbook, offset: int | None, problem: BaseException | None
    ) -> None:
        trainer = ids.trainer_of(log.worker)
        self._waiting_characters -= len(log.text)
        self._unwritten[trainer] -= 1
        if not self._unwritten[trainer]:
            del self._unwritten[trainer]
        if offset is None:
            reason = problem.strerror if isinstance(problem, OSError) else problem
            _log.error("%s: %s; output of %s is lost", logbook.path, reason, log.worker)
            offset = log.offset + log.size
        wait_s = self._budget.spend(trainer, len(log.text), log.text.count("\n"), time.monotonic())
        self._answer_later(wait_s, node, log.worker, offset)

    def _answer_later(self, wait_s: float, node: str, worker: str, offset: int) -> None:
        self._answered[ids.trainer_of(worker)] = time.monotonic() + wait_s
        if wait_s > 0:
            asyncio.get_running_loop().call_later(wait_s, self._answer, node, worker, offset)
        else:
            self._answer(node, worker, offset)

    def _answer(self, node: str, worker: str, offset: int) -> None:
        self._offsets.pop(worker, None)
        if not self._closed:
            self._acknowledge(node, worker, offset)
