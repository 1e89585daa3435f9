"""What a job knows of its workers, whatever launcher started them. `job.py` and `quiet_job.py` share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bftrainer.cluster.wire import FromController, WorkerStatus
from bftrainer.elastic import protocol

TrainerState = Literal["queued", "starting", "running", "rescaling", "waiting", "done", "failed", "cancelled"]
FINISHED: frozenset[str] = frozenset({"done", "failed", "cancelled"})
_KILLED = (-9, -15, -1, -2, 128 + 9, 128 + 15, 128 + 1, 128 + 2)
"""Statuses of a worker that something took away, by a signal; any other one is the script's own fault."""


@dataclass(frozen=True, slots=True)
class JobSettings:
    """How patient to be with a trainer's workers."""

    leave_grace_s: float = 10.0
    """A worker that shall leave has so long to come to a step boundary."""
    handover_s: float = 60.0
    """One that alone has the training's state stays so long for newcomers to be ready."""
    finish_grace_s: float = 600.0
    """After training is complete, the script's own last words may take so long."""
    stuck_after_s: float = 0.0
    """After a loss, a survivor that reports but does not come to the next generation for so long is killed. 0: never.

    It may be in the midst of an evaluation, and comes when that ends: only who knows the script can say what hangs.
    """
    most_breaks: int = 3
    """A group that breaks so often in a row, with no member lost, will never work."""
    gather_s: float = 0.1
    """Newcomers that are ready within so short a time join together."""
    restart_backoff_s: float = 1.0
    """Before a script that failed on a node is tried again; doubled each time."""
    most_failures: int = 5
    """A script that ends so often without progress has failed."""
    most_restarts: int = 50
    """A worker may be killed so often without progress."""

    def backoff_s(self, failures: int) -> float:
        """How long to wait after so many failures, before the script is tried again."""
        return self.restart_backoff_s * 2.0 ** min(failures - 1, 6)


@dataclass(slots=True)
class Worker:
    """One process of the trainer."""

    id: str
    node: str
    started: float
    ready: bool = False
    formed: int = 0
    pid: int = 0
    leave_by: float | None = None
    """It is to be killed then, unless it has ended."""
    over: bool = False
    """It has said good-bye: left, done or failed."""
    said_done: bool = False
    failed: bool = False
    """It has told of an exception, and its end is no news."""
    killed: bool = False
    """We had it killed: its end is no failure."""
    redone: int = 0
    is_new: bool = True
    """It has never trained."""
    status: WorkerStatus | None = None
    """What its agent said of it after a restart of the controller, until the roster is whole again."""

    @property
    def joined(self) -> bool:
        """Whether it has trained with the others, if only for a moment."""
        return self.formed != 0 or not self.is_new


Order = tuple[str, FromController]
"""A node and what to tell its agent."""
StartWorker = Callable[[str, str, bool], FromController]
"""Worker, node, whether others train meanwhile: the message that has it started."""


class Workers(dict[str, Worker]):
    """The workers of one trainer by their ids, and by the nodes they are on: one on each at most."""

    def __init__(self) -> None:
        super().__init__()
        self._on: dict[str, Worker] = {}
        self.awaited: set[str] = set()
        """Those that an earlier controller had and whose agents have not come back yet."""

    def on(self, node: str) -> Worker | None:
        """The one there."""
        return self._on.get(node)

    def add(self, worker: Worker) -> None:
        """One more."""
        self[worker.id] = self._on[worker.node] = worker

    def expect(self, worker: Worker) -> None:
        """An earlier controller had this one: its agent will come back and tell of it, or be given up."""
        self.add(worker)
        self.awaited.add(worker.id)

    def drop(self, worker_id: str) -> Worker | None:
        """One less; None if it is not known."""
        self.awaited.discard(worker_id)
        worker = self.pop(worker_id, None)
        if worker is not None and self._on.get(worker.node) is worker:
            del self._on[worker.node]
        return worker

    def deadlines(self) -> list[float]:
        """When those that shall leave are to be killed."""
        return [worker.leave_by for worker in self.values() if worker.leave_by is not None and not worker.killed]

    def shift(self, seconds: float) -> None:
        """What was to be then is to be so much later."""
        for worker in self.values():
            worker.leave_by = None if worker.leave_by is None else worker.leave_by + seconds


def was_taken(status: int, error: str) -> bool:
    """Whether a worker that ended was taken away; otherwise its end is the script's own fault."""
    return not error and (status == protocol.RESTART or status in _KILLED)


def end_in_words(worker: Worker, status: int, error: str, last: str) -> str:
    """How a worker ended; `last` is the last line that it printed."""
    what = error or f"ended with {status_in_words(status)} on {worker.node}"
    return f"{what}{': ' + last if last else ''}"


def status_in_words(status: int) -> str:
    """An exit status as `subprocess` gives it."""
    return f"status {status}" if status >= 0 else f"signal {-status}"
