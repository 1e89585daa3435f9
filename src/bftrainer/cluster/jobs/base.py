"""The interface of jobs: `TrainerJob` is what the controller knows of a job, an `Intent` is what a job wants done.

A job manages the workers of one trainer. `ElasticJob` and `OpaqueJob` implement the interface. A job starts nothing and
sends nothing: the `Reconciler` calls `reconcile` and turns the intents into messages for agents.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from bftrainer.cluster.jobs.bad_nodes import NodeFailure
from bftrainer.cluster.jobs.progress import Rescale, TrainerProgress
from bftrainer.cluster.jobs.worker import JobWorkers, Worker
from bftrainer.cluster.spec.states import TrainerState
from bftrainer.cluster.wire.messages import WorkerStatus
from bftrainer.elastic.protocol import Generation


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker. The trainer's launcher decides which program that is."""

    worker: str
    node: str
    head: str = ""
    """The id of the trainer's worker on the head, if there is one."""
    background: bool = False
    """Other workers of the trainer train meanwhile."""
    settled: bool = False
    """The program has run for a while before, so a failure now may be retried on the node itself."""


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Stop a worker: SIGTERM now, SIGKILL after `grace_s` seconds."""

    worker: str
    node: str
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TellWorker:
    """Send a message of `elastic.protocol` to a worker."""

    worker: str
    node: str
    message: Mapping[str, Any]


Intent = StartWorker | StopWorker | TellWorker


@dataclass(frozen=True, slots=True)
class JobNews:
    """Events of a job that are not logged yet."""

    rescales: tuple[Rescale, ...] = ()
    failures: tuple[NodeFailure, ...] = ()


class JobRecord(NamedTuple):
    """The part of a job that is stored, besides its progress, so that a restarted controller can resume it."""

    generation: Generation
    """The newest generation."""
    trained_by: frozenset[str]
    """The workers that train together."""
    nodes: tuple[str, ...]
    """The assigned nodes."""
    next_worker: int
    failures: int
    """Failures in all."""
    reason: str
    ever_ran: bool


class TrainerJob(Protocol):
    """The workers of one trainer, as the controller sees them."""

    id: str
    workers: JobWorkers
    nodes: tuple[str, ...]
    """The assigned nodes."""
    progress: TrainerProgress
    outcome: TrainerState | None
    """The final state; None while the trainer is not finished."""
    error: str
    traceback: str
    reason: str

    @property
    def failures_in_all(self) -> int:
        """How often the script failed, on any node."""

    @property
    def record(self) -> JobRecord:
        """The part of the job to be stored."""

    @property
    def trained_by(self) -> frozenset[str]:
        """The workers that train together now."""

    @property
    def world(self) -> int:
        """How many nodes train together now."""

    @property
    def state(self) -> TrainerState:
        """The trainer's state."""

    @property
    def over(self) -> bool:
        """Whether the trainer has ended and has no worker left."""

    @property
    def due(self) -> float | None:
        """When to call `reconcile` next, if nothing happens until then."""

    def worker_on(self, node: str) -> Worker | None:
        """Return the trainer's worker on a node."""

    def want(self, nodes: tuple[str, ...]) -> None:
        """Assign these nodes to the trainer."""

    def heard(self, worker_id: str, message: object, now: float) -> None:
        """Handle a worker's message."""

    def started(self, worker_id: str, pid: int) -> None:
        """Record that a worker runs."""

    def ended(self, worker_id: str, status: int, tail: str, error: str, now: float, *, spoke: bool) -> None:
        """Handle the end of a worker. `spoke`: it had connected to its agent's channel."""

    def lost(self, node: str) -> None:
        """Handle the loss of a node and of its worker."""

    def is_missed(self, node: str) -> bool:
        """Whether the peers of the worker on a node have lost their connections to it, or may have."""

    def leave(self, node: str, by: float) -> None:
        """Make the worker on a node leave before the time at which the node goes."""

    def cancel(self, reason: str) -> None:
        """End the trainer as cancelled."""

    def fail(self, error: str, traceback: str = "") -> None:
        """End the trainer as failed."""

    def expect(self, worker_id: str, node: str, started: float) -> None:
        """Add a worker of an earlier controller. Its agent will come back and report it, or be given up."""

    def resume(self, record: JobRecord) -> None:
        """Continue from the record of an earlier controller. Call it after `expect`."""

    def reattach(self, worker_id: str, status: WorkerStatus, now: float) -> None:
        """Handle the return of a worker's agent, after a restart of the controller or a broken connection."""

    def reconcile(self, now: float, free: Collection[str]) -> list[Intent]:
        """Return the intents that bring the workers closer to the assignment.

        `free` has the nodes on which a worker can be started: no worker of any trainer runs there.
        """

    def take_news(self) -> JobNews:
        """Return the events since the last call."""

    def shift(self, seconds: float) -> None:
        """Move all times by `seconds`: the clock was set, or stood still."""
