"""What the agent of a node knows of its workers, without clocks, sockets or processes.

`agent_crew.py` writes down here what happens to the workers and what they say, and gets what to tell the controller.
A worker is in the book from the order to start it until the controller says that it may be forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bftrainer.cluster.wire import Beat, Ended, Started, WorkerStatus
from bftrainer.elastic.protocol import Arrived, Broken, Done, Failed, Formed, FromWorker, Left, Ready

MOST_TRACEBACK = 20_000
"""Characters of a traceback; of a longer one its end is kept."""


class Book:
    """The workers of one node, by name."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerStatus] = {}
        self._errors: dict[str, str] = {}  # why one could not be started
        self._reports: dict[str, Mapping[str, Any]] = {}  # those since the last beat

    def __contains__(self, worker: object) -> bool:
        return worker in self._workers

    def __getitem__(self, worker: str) -> WorkerStatus:
        return self._workers[worker]

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """All that is known."""
        return tuple(self._workers.values())

    # What happens to them.

    def begin(self, worker: str, trainer: str, speaks: bool) -> None:
        """It is being started."""
        self._workers[worker] = WorkerStatus(worker, trainer, speaks=speaks)

    def started(self, worker: str, pid: int, warning: str = "") -> Started:
        """It runs. `warning` says what is not as its user may think."""
        self._note(worker, pid=pid)
        return Started(worker, pid, warning)

    def ended(self, worker: str, status: int, tail: str = "", error: str = "", *, spoke: bool = True) -> Ended:
        """It has ended, or could not be started. `spoke`: it had connected to the channel, or need not."""
        self._errors[worker] = error
        self._note(worker, status=status, tail=tail or error, spoke=spoke)
        return Ended(worker, status, tail, error, spoke)

    def answer(self, worker: str) -> Started | Ended | None:
        """What became of the order to start it; None: it is still being carried out."""
        known = self._workers[worker]
        if known.status is not None:
            return Ended(worker, known.status, known.tail, self._errors[worker], known.spoke)
        return Started(worker, known.pid) if known.pid else None

    def forget(self, worker: str) -> bool:
        """The controller has stored its end. One that has not ended is not forgotten."""
        if worker not in self._workers or self._workers[worker].status is None:
            return False
        for known in (self._workers, self._errors, self._reports):
            known.pop(worker, None)
        return True

    # What is said.

    def told(self, worker: str, generation: int) -> None:
        """It was told of a generation."""
        self._note(worker, newest=max(generation, self._workers[worker].newest))

    def reported(self, worker: str, report: Mapping[str, Any]) -> None:
        """It has reported; the next beat says so."""
        self._note(worker, report=report)
        self._reports[worker] = report

    def beat(self) -> Beat:
        """What was reported since the last beat."""
        reports, self._reports = self._reports, {}
        return Beat(reports)

    def heard(self, worker: str, message: FromWorker) -> None:
        """It has said something."""
        match message:
            case Ready():
                self._note(worker, ready=True)
            case Arrived(generation, address):
                self._note(worker, arrived=generation, address=address)
            case Formed(generation):
                self._note(worker, formed=generation, holds_state=True)
            case Broken():
                self._note(worker, formed=-1)  # it is in no generation any more
            case Left():
                self._note(worker, over=True)
            case Done():
                self._note(worker, over=True, done=True)
            case Failed(error, traceback):
                self._note(worker, over=True, failed=error, traceback=traceback[-MOST_TRACEBACK:])

    def _note(self, worker: str, **facts: Any) -> None:
        self._workers[worker] = replace(self._workers[worker], **facts)
