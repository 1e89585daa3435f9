"""Workers of a job are recorded here, for every kind of job.

`elastic.py` and `opaque.py` share this module: the record of a worker, the table of a job's workers, the limits of a
job (`JobSettings`), and the description of a worker's end.
"""

from __future__ import annotations

from dataclasses import dataclass

from bftrainer.cluster.config.keys import DEFAULTS
from bftrainer.cluster.wire.messages import RankStatus, WorkerStatus
from bftrainer.elastic import protocol
from bftrainer.elastic.manager.workers import was_killed
from bftrainer.util.backoff import Backoff


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Timeouts and limits for a trainer's workers."""

    leave_grace_s: float = DEFAULTS.agents.leave_grace_s
    """How long a worker that has to leave may take to reach a step boundary."""
    handover_s: float = 60.0
    """How long a worker that alone has the training state stays until newcomers are ready."""
    finish_grace_s: float = DEFAULTS.trainers.finish_grace_s
    """How long the script may take to end after training is complete."""
    stuck_after_s: float = DEFAULTS.trainers.stuck_after_s
    """After a loss, a survivor that reports but does not join the next generation for this long is killed. 0: never.

    The survivor may be in an evaluation, and joins when that ends. Only a user who knows the script can tell that it
    hangs.
    """
    most_breaks: int = DEFAULTS.trainers.max_broken_groups
    """A group that breaks this often in a row, with no member lost, has failed."""
    gather_s: float = 0.1
    """Newcomers that become ready within this time join together."""
    restart_backoff_s: float = DEFAULTS.trainers.restart_backoff_s
    """The first wait before a failed script is tried again; doubled each time."""
    most_failures: int = 5
    """A script that ends this often without progress has failed."""
    most_restarts: int = 50
    """How often workers may be killed without progress."""

    def backoff_s(self, failures: int) -> float:
        """Return how long to wait after `failures` failures before the script is tried again."""
        return Backoff(self.restart_backoff_s, 64 * self.restart_backoff_s).wait_s(failures)


@dataclass(slots=True)
class Worker:
    """One worker of the trainer: its processes on one node."""

    id: str
    node: str
    started: float
    ready: bool = False
    formed: int = 0
    pid: int = 0
    leave_by: float | None = None
    """The time at which it is killed, unless it has ended."""
    over: bool = False
    """It has sent its last message: left, done or failed."""
    said_done: bool = False
    failed: bool = False
    """It has reported an exception, so its end is expected."""
    killed: bool = False
    """The job has ordered to kill it, so its end is not a failure."""
    redone: int = 0
    is_new: bool = True
    """It has never trained."""
    status: WorkerStatus | None = None
    """The status that its agent reported after a restart of the controller, until the roster is complete again."""
    ranks: tuple[RankStatus, ...] = ()
    """Its processes, as its agent reported them; older agents do not."""

    @property
    def joined(self) -> bool:
        """Whether it has ever trained with the others."""
        return self.formed != 0 or not self.is_new


class JobWorkers(dict[str, Worker]):
    """The workers of one trainer by id and by node. There is at most one per node."""

    def __init__(self) -> None:
        super().__init__()
        self._on: dict[str, Worker] = {}
        self.awaited: set[str] = set()
        """Workers of an earlier controller whose agents have not come back yet."""

    def on(self, node: str) -> Worker | None:
        """Return the worker on a node."""
        return self._on.get(node)

    def add(self, worker: Worker) -> None:
        """Add a worker."""
        self[worker.id] = self._on[worker.node] = worker

    def expect(self, worker: Worker) -> None:
        """Add a worker of an earlier controller. Its agent will come back and report it, or be given up."""
        self.add(worker)
        self.awaited.add(worker.id)

    def drop(self, worker_id: str) -> Worker | None:
        """Remove a worker and return it; None if it is unknown."""
        self.awaited.discard(worker_id)
        worker = self.pop(worker_id, None)
        if worker is not None and self._on.get(worker.node) is worker:
            del self._on[worker.node]
        return worker

    def deadlines(self) -> list[float]:
        """Return the times at which leaving workers are killed."""
        return [worker.leave_by for worker in self.values() if worker.leave_by is not None and not worker.killed]

    def shift(self, seconds: float) -> None:
        """Move all times by `seconds`."""
        for worker in self.values():
            worker.leave_by = None if worker.leave_by is None else worker.leave_by + seconds


def was_taken(status: int, error: str) -> bool:
    """Whether an ended worker was killed or has to be restarted; otherwise its end is the script's own fault."""
    return not error and (status == protocol.RESTART or was_killed(status))


def end_in_words(worker: Worker, status: int, error: str, last: str) -> str:
    """Describe how a worker ended; `last` is the last line that it printed."""
    end = error or f"ended with {status_in_words(status)} on {worker.node}"
    return f"{end}{': ' + last if last else ''}"


def status_in_words(status: int) -> str:
    """Describe an exit status as `subprocess` returns it."""
    return f"status {status}" if status >= 0 else f"signal {-status}"
