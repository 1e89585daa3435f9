"""The worker table holds the status of every worker on a node.

`workers.py` records here what happens to the workers and what they say, and gets the messages for the controller back.
A worker is in the table from the order to start it until the controller says that it may be forgotten. The table uses
no clock, socket or process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bftrainer.cluster.wire.messages import Beat, Ended, RankStatus, Started, WorkerStatus
from bftrainer.elastic.protocol import Arrived, Broken, Done, Failed, Formed, FromWorker, Left, Ready

MOST_TRACEBACK = 20_000
"""The most characters of a traceback. Of a longer one, the end is kept."""


class WorkerTable:
    """The workers of one node, by name."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerStatus] = {}
        self._errors: dict[str, str] = {}  # why a worker could not be started
        self._reports: dict[str, Mapping[str, Any]] = {}  # reports since the last heartbeat

    def __contains__(self, worker: object) -> bool:
        return worker in self._workers

    def __getitem__(self, worker: str) -> WorkerStatus:
        return self._workers[worker]

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """The status of every worker in the table."""
        return tuple(self._workers.values())

    # Life cycle.

    def begin(self, worker: str, trainer: str, speaks: bool) -> None:
        """Add a worker that is being started."""
        self._workers[worker] = WorkerStatus(worker, trainer, speaks=speaks)

    def started(self, worker: str, ranks: tuple[RankStatus, ...], warning: str = "") -> Started:
        """Record that a worker runs. `warning` tells its user about an unexpected setup."""
        self._note(worker, pid=ranks[0].pid, ranks=ranks)
        return Started(worker, ranks[0].pid, warning, ranks)

    def ended(self, worker: str, status: int, tail: str = "", error: str = "", *, spoke: bool = True) -> Ended:
        """Record that a worker has ended, or could not be started (`error` says why).

        `spoke`: it had connected to the channel, or did not need to.
        """
        self._errors[worker] = error
        self._note(worker, status=status, tail=tail or error, spoke=spoke)
        return Ended(worker, status, tail, error, spoke)

    def answer(self, worker: str) -> Started | Ended | None:
        """Return the result of the order to start a worker; None while it is being carried out."""
        known = self._workers[worker]
        if known.status is not None:
            return Ended(worker, known.status, known.tail, self._errors[worker], known.spoke)
        return Started(worker, known.pid, ranks=known.ranks) if known.pid else None

    def forget(self, worker: str) -> bool:
        """Remove a worker whose end the controller has stored. Returns False for one that has not ended."""
        if worker not in self._workers or self._workers[worker].status is None:
            return False
        for known in (self._workers, self._errors, self._reports):
            known.pop(worker, None)
        return True

    # Messages to and from workers.

    def told(self, worker: str, generation: int) -> None:
        """Record that a worker was told of a generation."""
        self._note(worker, newest=max(generation, self._workers[worker].newest))

    def reported(self, worker: str, report: Mapping[str, Any]) -> None:
        """Record a worker's report. The next heartbeat includes it."""
        self._note(worker, report=report)
        self._reports[worker] = report

    def beat(self) -> Beat:
        """Return a heartbeat with the reports since the last one."""
        reports, self._reports = self._reports, {}
        return Beat(reports)

    def heard(self, worker: str, message: FromWorker) -> None:
        """Record a message of a worker."""
        match message:
            case Ready():
                self._note(worker, ready=True)
            case Arrived(generation, address):
                self._note(worker, arrived=generation, address=address)
            case Formed(generation):
                self._note(worker, formed=generation, holds_state=True)
            case Broken():
                self._note(worker, formed=-1)  # the worker is in no generation any more
            case Left():
                self._note(worker, over=True)
            case Done():
                self._note(worker, over=True, done=True)
            case Failed(error, traceback):
                self._note(worker, over=True, failed=error, traceback=traceback[-MOST_TRACEBACK:])

    def _note(self, worker: str, **facts: Any) -> None:
        self._workers[worker] = replace(self._workers[worker], **facts)
