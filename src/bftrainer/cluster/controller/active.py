"""Active trainers and node states are records kept by the reconciler.

An `ActiveTrainer` is a trainer that is not finished; it also saves its own state, progress and rescales to the store.
A `NodeState` is a node that is connected or awaited.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from bftrainer.cluster.config.keys import DEFAULTS
from bftrainer.cluster.controller.metric_history import MetricHistory
from bftrainer.cluster.jobs.elastic import ElasticJob
from bftrainer.cluster.jobs.learning import Learned
from bftrainer.cluster.jobs.opaque import OpaqueJob
from bftrainer.cluster.jobs.worker import JobSettings
from bftrainer.cluster.launchers.base import HEAD, Launch
from bftrainer.cluster.spec.states import FINISHED, TrainerState
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.wire.worker_messages import LEAST, MOST
from bftrainer.core.curve import Curve
from bftrainer.core.trainer import Trainer

PROGRESS_EVERY_S = 2.0
"""How often, in seconds, a trainer's progress is stored while nothing else happens."""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Timeouts and default costs of the controller."""

    reattach_s: float = DEFAULTS.agents.reattach_s
    """After a restart, how long agents that were connected have to come back."""
    silence_s: float = DEFAULTS.agents.silence_s
    """A node whose agent sends nothing for this long is lost."""
    default_up_s: float = DEFAULTS.trainers.default_up_s
    default_down_s: float = DEFAULTS.trainers.default_down_s
    """The assumed costs of growing and shrinking, before the first one was measured."""
    dry_run: bool = False
    """Make decisions, but start nothing."""
    job: JobSettings = field(default_factory=JobSettings)


@dataclass(slots=True)
class NodeState:
    """A node whose agent is connected, or is awaited after a restart of the controller."""

    name: str
    host: str
    agent: str
    pid: int
    joined: float
    heard: float
    here: bool = True
    """Whether its agent is connected; otherwise it is awaited."""
    leave_by: float | None = None

    @property
    def in_pool(self) -> bool:
        """Whether the node can be assigned to a trainer."""
        return self.leave_by is None and self.name != HEAD


@dataclass(slots=True)
class ActiveTrainer:
    """A trainer that is not finished."""

    id: str
    name: str
    owner: str
    submitted: float
    spec: TrainerSpec
    job: ElasticJob | OpaqueJob
    learned: Learned
    state: TrainerState = "queued"
    known: Trainer | None = None
    """The description that the scheduler got last; None before the first, and once the trainer has ended."""
    preemptions: int = 0
    rescales: int = 0
    node_seconds: float = 0.0
    counted_at: float = 0.0
    counted_nodes: int = 0
    started: float | None = None
    stale: bool = True
    """Whether something changed that the scheduler was not told yet."""
    stored: Any = None
    stored_at: float = 0.0
    given: tuple[str, ...] | None = None
    """The nodes that its launcher got last."""
    points: MetricHistory = field(init=False)

    def __post_init__(self) -> None:
        self.points = MetricHistory(self.id)

    @property
    def launch(self) -> Launch:
        """The description that its launcher gets."""
        return Launch(self.id, self.name, self.spec)

    def as_trainer(self, usual_rate: float) -> Trainer:
        """Return the description for the scheduler. Its name there is the trainer's id."""
        spec, learned = self.spec, self.learned
        curve = learned.curve(spec.min_nodes, spec.max_nodes, usual_rate)
        return Trainer(
            self.id,
            Curve(curve.nodes, (0.0, *(min(max(rate, LEAST), MOST) for rate in curve.rates[1:]))),
            spec.min_nodes,
            spec.max_nodes,
            min(learned.growth_s(len(self.job.nodes)), MOST),
            min(learned.down_s, MOST),
            submit=self.submitted,
            owner=self.owner,
            weight=min(max(spec.weight, LEAST), MOST),
            model=spec.model,
        )

    def count(self, now: float) -> None:
        """Accumulate the node-seconds of the assigned nodes.

        Workers still shutting down on a node that was given to another trainer are not counted.
        """
        if self.counted_at:
            self.node_seconds += self.counted_nodes * (now - self.counted_at)
        self.counted_at = now
        self.counted_nodes = len(self.job.nodes)

    def held(self, now: float) -> float:
        """Return the node-seconds that the trainer has held up to now."""
        return self.node_seconds + (self.counted_nodes * (now - self.counted_at) if self.counted_at else 0.0)

    def take_rescales(self, store: Store, now: float) -> None:
        """Learn from the complete rescales, and log them and the failures of newcomers to the store."""
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
        """Store the trainer's changes.

        Progress alone is stored every `PROGRESS_EVERY_S` seconds. A call with `at_once` stores only other changes.
        """
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
        columns = self._columns(now if state in FINISHED else None)
        if not at_once or state in FINISHED:  # it is large, and stored soon with the progress
            columns["learned"] = self.learned.as_json()
        store.update_trainer(self.id, **columns)
        self.points.note(store, now, job.progress.samples, *job.progress.noted.both(), last=state in FINISHED)

    def _columns(self, ended: float | None) -> dict[str, Any]:
        """Return the trainer's columns in the store."""
        job = self.job
        progress = job.progress
        metrics, metrics_at = progress.noted.both()
        return {
            "state": self.state,
            "reason": job.reason,
            "started": self.started,
            "ended": ended,
            "generation": job.roster.generation.id,
            "next_worker": job.next_worker,
            "samples": progress.samples,
            "total": progress.total if progress.total is not None else self.spec.work,
            "epoch": progress.epoch,
            "step": progress.step,
            "metrics": metrics,
            "metrics_at": {name: list(at) for name, at in metrics_at.items()},
            "rescales": self.rescales,
            "preemptions": self.preemptions,
            "failures": job.failures_in_all,
            "samples_redone": progress.redone,
            "node_seconds": self.node_seconds,
            "error": job.error,
            "traceback": job.traceback,
        }


def job_settings(settings: JobSettings, spec: TrainerSpec) -> JobSettings:
    """Return the job settings for one trainer: `max_restarts` of its spec limits the failures."""
    return replace(settings, most_failures=spec.max_restarts + 1)
