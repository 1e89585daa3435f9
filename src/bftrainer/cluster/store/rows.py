"""Row classes describe what the store returns: trainers, workers, nodes, events, tokens, owners and sums of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bftrainer.cluster.spec.states import FINISHED


@dataclass(frozen=True, slots=True)
class TrainerRow:
    """A trainer as the store knows it."""

    id: str
    """`t` and the trainer's number; the first is t1."""
    name: str
    owner: str
    spec: Mapping[str, Any]
    state: str
    reason: str
    submitted: float
    started: float | None
    ended: float | None
    generation: int
    """The newest generation that was created."""
    next_worker: int
    """Number of the trainer's next worker; the first worker is number 1."""
    samples: int
    total: int | None
    epoch: int
    step: int
    metrics: dict[str, Any]
    metrics_at: dict[str, Any]
    """Position that each metric belongs to: epochs done, steps, samples."""
    extremes: dict[str, Any]
    """Least and greatest value of each metric, with their positions; see `MetricExtremes`."""
    learned: dict[str, Any]
    rescales: int
    preemptions: int
    failures: int
    samples_redone: int
    node_seconds: float
    gpu_seconds: float
    error: str
    traceback: str

    @property
    def finished(self) -> bool:
        """Whether the trainer has reached a final state."""
        return self.state in FINISHED


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One process of a trainer on one node. As far as is known, it runs until `ended` is set."""

    worker: str
    trainer: str
    node: str
    agent: str
    started: float
    ended: float | None
    status: int | None
    """Exit status; None if the end of the process was not observed."""
    outcome: str


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node that is in the pool, or the last known facts of a node that has left."""

    node: str
    host: str
    agent: str
    pid: int
    joined: float
    left: float | None
    leaving: float | None
    """Set once it is known that the node will be taken."""
    gpus: int = 0
    slots: int = 0
    owner: str = ""


@dataclass(frozen=True, slots=True)
class EventRow:
    """Something that happened. Numbers rise by one, without gaps."""

    seq: int
    time: float
    kind: str
    trainer: str
    node: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Owner and role of a token for the API. The token itself is not stored."""

    id: int
    name: str
    owner: str
    role: str
    created: float
    revoked: float | None
    last_used: float | None
    expires: float | None = None
    """When it becomes invalid by itself; None: never."""

    def valid(self, now: float) -> bool:
        """Return whether the token is neither revoked nor expired."""
        return self.revoked is None and (self.expires is None or now < self.expires)


@dataclass(frozen=True, slots=True)
class OwnerRow:
    """Limits of an owner of trainers. None: no upper limit, or no guaranteed share."""

    owner: str
    max_nodes: int | None = None
    max_trainers: int | None = None
    """Limit of unfinished trainers."""
    share_nodes: int | None = None
    share_percent: float | None = None
    changed: float = 0.0
    max_weight: float | None = None
    """Largest weight of a trainer. None: `policy.max_weight`."""
    max_disk_mb: int | None = None
    """Limit of the files of all trainers, in MB. None: that of the settings."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over all trainers of one owner in one state."""

    owner: str
    state: str
    trainers: int
    samples: int
    node_seconds: float
    rescales: int
    preemptions: int
    failures: int
    samples_redone: int
    gpu_seconds: float


@dataclass(frozen=True, slots=True)
class EventSpan:
    """Range of the events in the store."""

    first: int
    """Number of the first event; 0 if there is none."""
    last: int
    count: int
    ever: int
    """Number of the last event that was ever written."""
    trimmed: int
    """Number of the last event that was dropped on purpose."""
