"""Active trainers and node states are records kept by the reconciler.

An `ActiveTrainer` is a trainer that is not finished; it also saves its own state, progress and rescales to the store.
A `NodeState` is a node that is connected or awaited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

from bftrainer.cluster.config.keys import UNMEASURED_S
from bftrainer.cluster.controller.metric_history import MetricHistory
from bftrainer.cluster.jobs.base import TrainerJob
from bftrainer.cluster.jobs.elastic import ElasticJob
from bftrainer.cluster.jobs.learning import Learned, Prior
from bftrainer.cluster.jobs.opaque import OpaqueJob
from bftrainer.cluster.jobs.worker import JobSettings
from bftrainer.cluster.launchers.base import HEAD, Launch, Launcher
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

    reattach_s: float = 8.0
    """After a restart, how long agents that were connected have to come back."""
    silence_s: float = 10.0
    """A node whose agent sends nothing for this long is lost."""
    default_up_s: float = UNMEASURED_S
    default_down_s: float = UNMEASURED_S
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
    trainer: str | None = None
    """The trainer that the node is assigned to, by the last decision."""
    worker: str | None = None
    """The worker that runs there. Always None on the head, where any number of workers may run."""

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
    launcher: Launcher
    job: TrainerJob
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

    @classmethod
    def make(
        cls,
        trainer: str,
        name: str,
        owner: str,
        submitted: float,
        spec: TrainerSpec,
        launcher: Launcher,
        settings: ControllerSettings,
        learned: Any = None,
    ) -> Self:
        """Return a trainer with its job. `learned` is its stored measurements, if any (`Learned.as_json`)."""
        prior = Prior(spec.prior_curve(), spec.up_s, spec.down_s)
        usual_s = launcher.traits.rescale_s
        costs = (settings.default_up_s, settings.default_down_s) if usual_s is None else (usual_s, usual_s)
        known = Learned.from_json(learned, prior, *costs) if learned else Learned(prior, *costs)
        job = make_job(trainer, spec, launcher, settings.job)
        return cls(trainer, name, owner, submitted, spec, launcher, job, known)

    @property
    def launch(self) -> Launch:
        """The description that its launcher gets."""
        return Launch(self.id, self.name, self.spec)

    def give(self, hosts: Sequence[str]) -> None:
        """Pass the addresses of its nodes to its launcher. The trainer fails if the launcher cannot write its files."""
        try:
            self.launcher.given(self.launch, hosts)
        except OSError as problem:
            self.job.fail(f"cannot write {problem.filename}: {problem.strerror}")

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

    def take_news(self, store: Store, now: float) -> None:
        """Learn from the complete rescales, and log them and the failures of newcomers to the store."""
        news = self.job.take_news()
        for rescale in news.rescales:
            self.rescales += rescale.why != "start"
            if rescale.why != "start":
                kind: Literal["up", "down"] = "up" if rescale.world > rescale.world_before else "down"
                self.learned.rescaled(kind, rescale.pause_s, rescale.form_s, rescale.sync_s)
            for start_s in rescale.start_s:
                self.learned.started(start_s)
            self.stale = True
            self.started = self.started or now
            store.log(now, "rescale", trainer=self.id, data={**asdict(rescale), "why": rescale.why})
        for failure in news.failures:
            data = {name: value for name, value in asdict(failure).items() if name != "node"}
            store.log(now, "worker.failed", trainer=self.id, node=failure.node, data=data)

    def save(self, store: Store, now: float, *, at_once: bool = False) -> None:
        """Store the trainer's changes.

        Progress alone is stored every `PROGRESS_EVERY_S` seconds. A call with `at_once` stores only other changes.
        """
        job = self.job
        state = job.state
        changed = state != self.state
        shape = (job.generation, job.nodes, job.trained_by, job.next_worker, self.preemptions, job.reason)
        if not (changed or shape != self.stored) and (at_once or now - self.stored_at < PROGRESS_EVERY_S):
            return
        if changed:
            data = {"from": self.state, "to": state, "reason": job.reason}
            store.log(now, "trainer.state", trainer=self.id, data=data)
            self.state = state
        if shape != self.stored:
            members = list(job.generation.members)
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
            "generation": job.generation.id,
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


def make_job(trainer: str, spec: TrainerSpec, launcher: Launcher, settings: JobSettings) -> TrainerJob:
    """Return the job that matches a trainer's launcher. `max_restarts` of the spec limits its failures."""
    settings = replace(settings, most_failures=spec.max_restarts + 1)
    if launcher.traits.speaks:
        return ElasticJob(trainer, spec.min_nodes, settings)
    return OpaqueJob(trainer, spec.min_nodes, settings, launcher, spec.work)
