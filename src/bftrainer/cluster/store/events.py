"""Events of the log are typed values: one class per kind.

`Store.log` writes an event; `replay.py` reads them for reports, the history and the doctor; `event_columns.py` converts
them to and from rows; `scheduling_events.py` makes them of the scheduler's values. A kind's name appears only here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class TypedEvent:
    """Base of the events whose data are fields.

    `trainer` and `node` are columns of the row and come first; all others are in its JSON.
    """

    kind: ClassVar[str]
    extra: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Data of the row that this version does not know."""


@dataclass(frozen=True, slots=True)
class NodeJoined(TypedEvent):
    """A node joined the pool. `gpus` is how many GPUs it has."""

    kind = "node.joined"
    node: str
    host: str
    agent: str
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class NodeOwned(TypedEvent):
    """From now on the node serves the trainers of an owner: it joined, or a decision gave it to them."""

    kind = "node.owned"
    node: str
    owner: str


@dataclass(frozen=True, slots=True)
class NodeHandedOver(TypedEvent):
    """The agent of another owner has taken the place of the former one, `took_s` after that one was dismissed."""

    kind = "node.handed_over"
    node: str
    before: str
    owner: str
    took_s: float


@dataclass(frozen=True, slots=True)
class NodeGpusChanged(TypedEvent):
    """The agent of a node in the pool connected again, and the node has another number of GPUs than before."""

    kind = "node.gpus"
    node: str
    gpus: int


@dataclass(frozen=True, slots=True)
class HeadJoined(TypedEvent):
    """The agent beside the controller joined."""

    kind = "head.joined"
    node: str
    host: str
    agent: str


@dataclass(frozen=True, slots=True)
class NodeLeaving(TypedEvent):
    """A node announced that it will be taken. It belongs to the pool no more; `NodeLeft` follows."""

    kind = "node.leaving"
    node: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class NodeLeft(TypedEvent):
    """A node left, with or without announcement."""

    kind = "node.left"
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class HeadLeft(TypedEvent):
    """The agent beside the controller left."""

    kind = "head.left"
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerStarted(TypedEvent):
    """A worker was ordered to start."""

    kind = "worker.started"
    trainer: str
    node: str
    worker: str


@dataclass(frozen=True, slots=True)
class WorkerEnded(TypedEvent):
    """A worker ended. `status` is its exit status."""

    kind = "worker.ended"
    trainer: str
    node: str
    worker: str
    status: int | None
    outcome: str


@dataclass(frozen=True, slots=True)
class WorkerWarned(TypedEvent):
    """A worker started with an unexpected setup."""

    kind = "worker.warned"
    trainer: str
    node: str
    worker: str
    warning: str


@dataclass(frozen=True, slots=True)
class WorkerFailed(TypedEvent):
    """A newcomer failed on a node; its trainer goes on without it and tries the node again in `retry_s` seconds."""

    kind = "worker.failed"
    trainer: str
    node: str
    worker: str
    reason: str
    failures: int
    retry_s: float


@dataclass(frozen=True, slots=True)
class TrainerSubmitted(TypedEvent):
    """A user submitted a trainer."""

    kind = "trainer.submitted"
    trainer: str
    name: str
    owner: str


@dataclass(frozen=True, slots=True)
class StateChanged(TypedEvent):
    """A trainer went from one state to another. `from_` is empty for a new trainer."""

    kind = "trainer.state"
    trainer: str
    from_: str
    to: str
    reason: str


@dataclass(frozen=True, slots=True)
class LauncherChanged(TypedEvent):
    """A trainer goes on with another launcher, because the former one cannot run its script."""

    kind = "trainer.launcher"
    trainer: str
    before: str
    after: str
    why: str


@dataclass(frozen=True, slots=True)
class TrainerLearned(TypedEvent):
    """Everything about a trainer that decisions depend on, as the scheduler knows it from now on."""

    kind = "trainer.learned"
    trainer: str
    name: str
    curve: Mapping[str, Sequence[Any]]
    min_nodes: int
    max_nodes: int
    up_s: float
    down_s: float
    submit: float
    owner: str
    weight: float
    model: str
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainerPruned(TypedEvent):
    """Files of a trainer were removed. `by` is an owner, or `retention` for the settings."""

    kind = "trainer.pruned"
    trainer: str
    part: str
    bytes: int
    by: str


@dataclass(frozen=True, slots=True)
class Rescaled(TypedEvent):
    """The members of a trainer formed a new generation."""

    kind = "rescale"
    trainer: str
    generation: int
    world_before: int
    world: int
    pause_s: float | None
    form_s: float | None
    sync_s: float | None
    preempted: bool
    start_s: Sequence[float]
    """How many seconds each newcomer took from its start to the end of the rescale."""
    why: str
    """start, grow, shrink, move or preempt."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Parts of `pause_s` in seconds, by name."""


@dataclass(frozen=True, slots=True)
class Decided(TypedEvent):
    """A decision with its reasons and numbers: enough to repeat it (`report/rerun.py`)."""

    kind = "decision"
    allocator: str
    limits: Mapping[str, Any] | None
    pool: int
    horizon_s: float | None
    counts: Mapping[str, int]
    nodes: Mapping[str, Sequence[str]]
    """The nodes of every trainer that has some, after the decision."""
    changes: Sequence[Mapping[str, Any]]
    reasons: Sequence[str]
    waiting: int
    ms: float


@dataclass(frozen=True, slots=True)
class WeightLimited(TypedEvent):
    """A trainer's weight is above the maximum of its owner, so it counts with the maximum."""

    kind = "trainer.weight-limited"
    trainer: str
    weight: float
    max_weight: float


@dataclass(frozen=True, slots=True)
class OwnersChanged(TypedEvent):
    """The owners' limits were changed. `owners` are all rows of the store."""

    kind = "owners.changed"
    owners: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PoolPaused(TypedEvent):
    """Harvesting was paused."""

    kind = "pool.paused"


@dataclass(frozen=True, slots=True)
class PoolResumed(TypedEvent):
    """Harvesting was resumed."""

    kind = "pool.resumed"


@dataclass(frozen=True, slots=True)
class ServeStarted(TypedEvent):
    """A controller started. `pool` is the kind of its pool."""

    kind = "serve.started"
    pool: str


@dataclass(frozen=True, slots=True)
class ServeRestored(TypedEvent):
    """A controller took up the state that an earlier one had left."""

    kind = "serve.restored"
    trainers: int
    nodes: int


@dataclass(frozen=True, slots=True)
class ServeStopped(TypedEvent):
    """A controller stopped in order. `drained`: it gave all nodes back before."""

    kind = "serve.stopped"
    drained: bool


@dataclass(frozen=True, slots=True)
class ExcerptEnd(TypedEvent):
    """The end of an excerpt of the log. It is never stored."""

    kind = "report.end"


@dataclass(frozen=True, slots=True)
class PoolNote:
    """A note of a pool about itself, such as a command that failed. Every pool has its own notes."""

    prefix: ClassVar[str] = "pool."
    what: str
    facts: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """Kind of the row."""
        return self.prefix + self.what

    @classmethod
    def tells_trouble(cls, kind: str) -> bool:
        """Return whether a kind is that of a note that a person should see."""
        return kind.startswith(cls.prefix) and kind.endswith(("failed", f"{cls.prefix}not_drained"))


@dataclass(frozen=True, slots=True)
class OtherEvent:
    """An event given by its columns: one of a kind that this version does not know."""

    kind: str
    trainer: str = ""
    node: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


LogEvent = TypedEvent | PoolNote | OtherEvent


def kinds_of(*events: type[TypedEvent]) -> tuple[str, ...]:
    """Return the kinds of some classes, to ask the store for their rows."""
    return tuple(event.kind for event in events)


def quoted_kinds(*events: type[TypedEvent]) -> str:
    """Return the kinds of some classes as a list for SQL."""
    return ", ".join(f"'{event.kind}'" for event in events)
