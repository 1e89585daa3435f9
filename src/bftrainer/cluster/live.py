"""What the cluster keeps of a node and of a trainer that is not finished, and how the latter gets into the store."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from bftrainer.cluster import facts
from bftrainer.cluster.job import Job
from bftrainer.cluster.launchers.base import HEAD
from bftrainer.cluster.learning import Learned
from bftrainer.cluster.points import Points
from bftrainer.cluster.quiet_job import QuietJob
from bftrainer.cluster.spec import TrainerSpec
from bftrainer.cluster.store import Store
from bftrainer.cluster.workers import FINISHED, JobSettings, TrainerState
from bftrainer.core.trainer import Trainer

PROGRESS_EVERY_S = 2.0
"""How often the progress of a trainer is stored while nothing else happens."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """How patient the controller is."""

    reattach_s: float = 8.0
    """After a restart, agents that were here have so long to come back."""
    silence_s: float = 10.0
    """A node whose agent says nothing for so long is lost."""
    default_up_s: float = 1.0
    default_down_s: float = 1.0
    """What a rescale is taken to cost before the first one was measured."""
    dry_run: bool = False
    """Decide, and start nothing."""
    job: JobSettings = field(default_factory=JobSettings)


@dataclass(slots=True)
class NodeView:
    """A node that is here, or was and is awaited."""

    name: str
    host: str
    agent: str
    pid: int
    joined: float
    heard: float
    here: bool = True
    """Its agent is connected; otherwise it is awaited after a restart of the controller."""
    leave_by: float | None = None

    @property
    def in_pool(self) -> bool:
        """Whether it is a node that can be given to somebody."""
        return self.leave_by is None and self.name != HEAD


@dataclass(slots=True)
class Live:
    """A trainer that is not finished."""

    id: str
    name: str
    owner: str
    submitted: float
    spec: TrainerSpec
    job: Job | QuietJob
    learned: Learned
    state: TrainerState = "queued"
    known: Trainer | None = None
    """What the scheduler was told of it last."""
    preemptions: int = 0
    rescales: int = 0
    node_seconds: float = 0.0
    counted_at: float = 0.0
    counted_nodes: int = 0
    started: float | None = None
    stale: bool = True
    """More is known than the scheduler was told."""
    stored: Any = None
    stored_at: float = 0.0
    given: tuple[str, ...] | None = None
    """The nodes that its launcher was told of last."""
    points: Points = field(init=False)

    def __post_init__(self) -> None:
        self.points = Points(self.id)

    def count(self, now: float) -> None:
        """Add up the node-seconds it has held: of nodes that are its own. What packs up on another's is nobody's."""
        if self.counted_at:
            self.node_seconds += self.counted_nodes * (now - self.counted_at)
        self.counted_at = now
        self.counted_nodes = len(self.job.nodes)

    def held(self, now: float) -> float:
        """The node-seconds it has held up to now."""
        return self.node_seconds + (self.counted_nodes * (now - self.counted_at) if self.counted_at else 0.0)

    def take_rescales(self, store: Store, now: float) -> None:
        """Learn from the rescales that are complete, and write them and the failures of newcomers down."""
        for rescale in self.job.rescales:
            self.rescales += rescale.why != "start"
            if rescale.why != "start":
                kind: Literal["up", "down"] = "up" if rescale.world > rescale.world_before else "down"
                self.learned.rescaled(kind, rescale.pause_s, rescale.form_s, rescale.sync_s)
            for start_s in rescale.start_s:
                self.learned.started(start_s)
            self.stale = True
            self.started = self.started or now
            store.log(now, "rescale", trainer=self.id, data={**asdict(rescale), "why": rescale.why})
        self.job.rescales.clear()
        for failure in self.job.node_failures:
            data = {name: value for name, value in asdict(failure).items() if name != "node"}
            store.log(now, "worker.failed", trainer=self.id, node=failure.node, data=data)
        self.job.node_failures.clear()

    def save(self, store: Store, now: float, *, at_once: bool = False) -> None:
        """Store what changed; progress alone only now and then, unless it is to be `at_once`."""
        job = self.job
        state = job.state
        changed = state != self.state
        shape = (job.roster.generation, job.nodes, job.trained_by, job.next_worker, self.preemptions, job.reason)
        if not (changed or shape != self.stored) and (at_once or now - self.stored_at < PROGRESS_EVERY_S):
            return
        if changed:
            data = {"from": self.state, "to": state, "reason": job.reason}
            store.log(now, "trainer.state", trainer=self.id, data=data)
            self.state = state
        if shape != self.stored:
            members = list(job.roster.generation.members)
            kept = {"members": members, "trained_by": sorted(job.trained_by), "nodes": list(job.nodes)}
            store.keep(f"job.{self.id}", kept)
        self.stored, self.stored_at = shape, now
        self.count(now)
        columns = facts.columns(self, now if state in FINISHED else None)
        if not at_once or state in FINISHED:  # it is much, and soon stored with the progress
            columns["learned"] = self.learned.as_json()
        store.update_trainer(self.id, **columns)
        self.points.note(store, now, job.progress.samples, *job.progress.noted.both(), last=state in FINISHED)
