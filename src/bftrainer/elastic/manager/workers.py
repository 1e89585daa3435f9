"""Workers of one elastic job: what their messages and their ends mean.

The local coordinator and the controller's `ElasticJob` use it. They pass in the messages and ends of workers with the
time. The `Roster` and the break counter are updated here, so both managers treat a loss, a leaver and a newcomer in the
same way. It uses no clock, socket or process.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from bftrainer.elastic.breaks import Breaks
from bftrainer.elastic.protocol import Broken, Leaving, Left, Report
from bftrainer.elastic.roster import Roster

_TAKING = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_KILLED = frozenset([-signum for signum in _TAKING] + [128 + signum for signum in _TAKING])


def was_killed(status: int) -> bool:
    """Return whether a worker was ended as nodes are taken away. Any other signal is the script's own fault."""
    return status in _KILLED


class ManagedWorker(Protocol):
    """The part of a manager's record of a worker that is used here."""

    leave_by: float | None
    """The time at which it is killed, unless it has ended."""
    over: bool
    """It has sent its last message."""

    @property
    def id(self) -> str:
        """Its name in the roster."""

    @property
    def joined(self) -> bool:
        """Whether it has trained with the others."""

    @property
    def failed(self) -> bool:
        """Whether it has reported an exception that does not fail the job."""

    @property
    def killed(self) -> bool:
        """Whether the manager has killed it."""


W = TypeVar("W", bound=ManagedWorker)


class ManagedWorkers(Generic[W]):
    """The workers of one job, by id, with their roster. The manager adds them to `workers` and removes them."""

    def __init__(self, workers: Mapping[str, W], roster: Roster, breaks: Breaks) -> None:
        self.workers = workers
        self.roster = roster
        self.breaks = breaks

    def heard(self, worker: W, message: object, now: float, grace_s: float) -> str:
        """Apply a worker's message. A worker that asks to leave is killed after `grace_s`.

        Returns why the job cannot go on, if its group has broken too often.
        """
        verdict = ""
        if isinstance(message, Broken) and self.roster.in_use(message.generation):
            self.breaks.broke(message.generation, message.reason, now)
            verdict = self.breaks.verdict(now)
        self.roster.heard(worker.id, message)
        match message:
            case Leaving():
                worker.leave_by = now + grace_s
            case Left():
                worker.over = True
            case Report():
                self.breaks.reported(message.step, message.samples)
        return verdict

    def lost(self, worker_id: str) -> None:
        """Record that a worker is lost. Its peers do not wait for it."""
        if worker_id in self.roster:
            self.roster.lost(worker_id)
            self.breaks.lost()

    def gone(self, worker: W, *, left: bool) -> bool:
        """Record the end of a worker, which has `left` at a step boundary or is lost. Returns whether it was expected.

        Only an unexpected end can be a failure, or the end of the job.
        """
        expected = worker.over or worker.failed or worker.killed or worker.leave_by is not None
        expected = expected or self.roster.is_leaving(worker.id)
        if left:
            self.roster.left(worker.id)
        else:
            self.lost(worker.id)
        return expected

    def train_without(self, worker: W) -> bool:
        """Return whether a worker is a newcomer, and others have the training state: they can go on without it."""
        return not worker.joined and self.others_joined(worker)

    def others_joined(self, worker: W) -> bool:
        """Return whether any other worker has trained."""
        return any(other.joined for other in self.workers.values() if other is not worker)

    def overdue(self, now: float) -> list[W]:
        """Return the workers that should have left by now."""
        late = (worker for worker in self.workers.values() if worker.leave_by is not None and now >= worker.leave_by)
        return [worker for worker in late if not worker.killed]
