"""Active trainers are records kept by the reconciler.

An `ActiveTrainer` is a trainer that is not finished; it also saves its own state, progress and rescales to the store.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self, cast

from bftrainer.cluster.config.keys import DEFAULTS
from bftrainer.cluster.controller.metric_history import MetricHistory
from bftrainer.cluster.jobs.base import JobRecord, TrainerJob
from bftrainer.cluster.jobs.beliefs import Beliefs, belief_key
from bftrainer.cluster.jobs.elastic import ElasticJob
from bftrainer.cluster.jobs.learning import Learned, Prior
from bftrainer.cluster.jobs.opaque import OpaqueJob
from bftrainer.cluster.jobs.progress import TrainerProgress
from bftrainer.cluster.jobs.worker import JobSettings
from bftrainer.cluster.launchers.base import Launch, Launcher
from bftrainer.cluster.spec.states import FINISHED, TrainerState
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store import events
from bftrainer.cluster.store.rows import TrainerRow, WorkerRow
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.wire.worker_messages import LEAST, MOST
from bftrainer.core.curve import Curve
from bftrainer.core.node_time import GpuCounts, NodeTime
from bftrainer.core.trainer import Trainer
from bftrainer.elastic.metrics import Position
from bftrainer.elastic.protocol import CANNOT_STAND_IN, Generation

PROGRESS_EVERY_S = 2.0
"""How often, in seconds, a trainer's progress is stored while nothing else happens."""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Timeouts and default costs of the controller."""

    reattach_s: float = DEFAULTS.agents.reattach_s
    """After a restart, how long agents that were connected have to come back."""
    reconnect_s: float = DEFAULTS.agents.reconnect_s
    """After its connection broke, how long an agent has to come back."""
    silence_s: float = DEFAULTS.agents.silence_s
    """A node whose agent sends nothing for this long is lost."""
    default_up_s: float = DEFAULTS.trainers.default_up_s
    default_down_s: float = DEFAULTS.trainers.default_down_s
    """The assumed costs of growing and shrinking, before the first one was measured."""
    max_weight: float = DEFAULTS.policy.max_weight
    """The largest weight of a trainer whose owner has no maximum of their own."""
    dry_run: bool = False
    """Make decisions, but start nothing."""
    own_users: bool = False
    """Trainers run as their owners: only signed ones can be started."""
    job: JobSettings = field(default_factory=JobSettings)


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection of an agent has ended without a `Going`. The agent may come back."""

    reason: str


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
    held: NodeTime = field(default_factory=NodeTime)
    """The time of the nodes that were assigned to it."""
    gpu_counts: GpuCounts = field(default_factory=GpuCounts)
    """How many GPUs each node of the pool has."""
    started: float | None = None
    stale: bool = True
    """Whether something changed that the scheduler was not told yet."""
    hand_over_s: float = 0.0
    """How much longer its next node takes to start because that node must change its owner, as the scheduler knows."""
    stored: Any = None
    stored_at: float = 0.0
    given: tuple[str, ...] | None = None
    """The nodes that its launcher got last."""
    beliefs: Beliefs | None = None
    """Where the belief of its script is stored."""
    points: MetricHistory = field(init=False)

    def __post_init__(self) -> None:
        self.points = MetricHistory(self.id)

    @classmethod
    def from_row(
        cls,
        row: TrainerRow,
        launchers: Mapping[str, Launcher],
        settings: ControllerSettings,
        now: float,
        *,
        spec: TrainerSpec | None = None,
        kept: Mapping[str, Any] | None = None,
        workers: Iterable[WorkerRow] = (),
        nodes: Collection[str] = (),
        gpu_counts: GpuCounts | None = None,
        beliefs: Beliefs | None = None,
    ) -> Self:
        """Return a trainer as it is stored: a new one, or one of an earlier controller.

        `spec` is that of a new one. `kept` is the result of `job_as_json`. `workers` may still run. Nodes that are not
        among `nodes` are gone. Without `beliefs` nothing is known of the script but what the trainer measured.
        """
        spec = spec or TrainerSpec.model_validate(row.spec)
        launcher = launchers[spec.launcher]
        prior = Prior(spec.prior_curve(), spec.up_s, spec.down_s)
        usual_s = launcher.traits.rescale_s
        costs = (settings.default_up_s, settings.default_down_s) if usual_s is None else (usual_s, usual_s)
        belief = None if beliefs is None else beliefs.of(belief_key(row.owner, spec))
        learned = Learned.from_json(row.learned or {}, prior, *costs, name=row.id, script=belief)
        job = make_job(row.id, spec, launcher, settings.job)
        job.progress = TrainerProgress(row.samples, row.total, row.epoch, step=row.step, redone=row.samples_redone)
        job.progress.reported.take(row.metrics, row.metrics_at, Position(row.epoch, row.step, row.samples))
        job.progress.extremes.load(row.extremes)
        for worker in workers:
            job.expect(worker.worker, worker.node, worker.started)
        kept = kept or {}
        record = JobRecord(
            Generation(row.generation, tuple(kept.get("members", ()))),
            frozenset(kept.get("trained_by", ())),
            tuple(node for node in kept.get("nodes", ()) if node in nodes),
            row.next_worker,
            row.failures,
            row.reason,
            ever_ran=row.started is not None,
        )
        job.resume(record)
        counts = GpuCounts() if gpu_counts is None else gpu_counts
        return cls(
            row.id,
            row.name,
            row.owner,
            row.submitted,
            spec,
            launcher,
            job,
            learned,
            state=cast(TrainerState, row.state),
            preemptions=row.preemptions,
            rescales=row.rescales,
            held=NodeTime(row.node_seconds, row.gpu_seconds, len(record.nodes), counts.of(record.nodes), now),
            gpu_counts=counts,
            started=row.started,
            beliefs=beliefs,
        )

    def as_row(self) -> dict[str, Any]:
        """Return the columns in the store that change, but for `learned` and `ended`."""
        job = self.job
        record, progress = job.record, job.progress
        metrics, metrics_at = progress.reported.both()
        return {
            "state": self.state,
            "reason": record.reason,
            "started": self.started,
            "generation": record.generation.id,
            "next_worker": record.next_worker,
            "samples": progress.samples,
            "total": progress.total if progress.total is not None else self.spec.work,
            "epoch": progress.epoch,
            "step": progress.step,
            "metrics": metrics,
            "metrics_at": {name: list(at) for name, at in metrics_at.items()},
            "extremes": progress.extremes.as_json(),
            "rescales": self.rescales,
            "preemptions": self.preemptions,
            "failures": record.failures,
            "samples_redone": progress.redone,
            "node_seconds": self.held.node_s,
            "gpu_seconds": self.held.gpu_s,
            "error": job.error,
            "traceback": job.traceback,
        }

    def job_as_json(self) -> dict[str, Any]:
        """Return the part of the job's record that has no columns."""
        record = self.job.record
        members = list(record.generation.members)
        return {"members": members, "trained_by": sorted(record.trained_by), "nodes": list(record.nodes)}

    @property
    def launch(self) -> Launch:
        """The description that its launcher gets."""
        return Launch(self.id, self.name, self.spec)

    @property
    def weight(self) -> float:
        """The weight that its user asked for, within the bounds of numbers."""
        return min(max(self.spec.weight, LEAST), MOST)

    @property
    def falls_back(self) -> bool:
        """Whether the ddp launcher cannot run its script, so that it must go on with another one."""
        refused = CANNOT_STAND_IN in (self.job.error or "")
        may = self.spec.launcher == "ddp" and not self.spec.signature  # its owner has signed for this launcher alone
        return may and self.job.outcome == "failed" and refused

    @property
    def present_state(self) -> TrainerState:
        """The state of its job, unless that has failed and another one follows."""
        return self.state if self.falls_back else self.job.state

    def as_trainer(self, usual_rate: float) -> Trainer:
        """Return the description for the scheduler. Its name there is the trainer's id."""
        spec, learned = self.spec, self.learned
        curve = learned.curve(spec.min_nodes, spec.max_nodes, usual_rate)
        return Trainer(
            self.id,
            Curve(curve.nodes, (0.0, *(min(max(rate, LEAST), MOST) for rate in curve.rates[1:]))),
            spec.min_nodes,
            spec.max_nodes,
            min(learned.up_s, MOST),
            min(learned.down_s, MOST),
            submit=self.submitted,
            owner=self.owner,
            weight=self.weight,
            model=spec.model,
            start_s=min(learned.start_s, MOST),
        )

    def count(self, now: float) -> None:
        """Accumulate the time of the assigned nodes and of their GPUs.

        Workers still shutting down on a node that was given to another trainer are not counted.
        """
        nodes = self.job.nodes
        self.held.count(now, len(nodes), self.gpu_counts.of(nodes))

    def take_news(self, store: Store, now: float) -> None:
        """Learn from the complete rescales, and log them and the failures of newcomers to the store."""
        news = self.job.take_news()
        for rescale in news.rescales:
            self.rescales += rescale.why != "start"
            if rescale.why != "start":
                kind: Literal["up", "down"] = "up" if rescale.world > rescale.world_before else "down"
                self.learned.rescaled(kind, rescale.pause_s, rescale.form_s, rescale.sync_s, rescale.parts)
            for start_s in rescale.start_s:
                self.learned.started(start_s)
            self.stale = True
            self.started = self.started or now
            store.log(now, events.Rescaled(self.id, **asdict(rescale), why=rescale.why))
        for failure in news.failures:
            store.log(now, events.WorkerFailed(self.id, **asdict(failure)))

    def save(self, store: Store, now: float, *, at_once: bool = False) -> None:
        """Store the trainer's changes.

        Progress alone is stored every `PROGRESS_EVERY_S` seconds. A call with `at_once` stores only other changes.
        """
        if self.falls_back:
            return  # it has not failed
        state = self.job.state
        changed, shape = state != self.state, (self.job.record, self.preemptions)
        if not (changed or shape != self.stored) and (at_once or now - self.stored_at < PROGRESS_EVERY_S):
            return
        if changed:
            store.log(now, events.StateChanged(self.id, self.state, state, self.job.reason))
            self.state = state
        if shape != self.stored:
            store.keep(f"job.{self.id}", self.job_as_json())
        self.stored, self.stored_at = shape, now
        self.count(now)
        columns = self.as_row()
        finished = state in FINISHED
        columns["ended"] = now if finished else None
        if not at_once or finished:  # it is large, and stored soon with the progress
            columns["learned"] = self.learned.as_json()
            if self.beliefs is not None:
                self.beliefs.save(belief_key(self.owner, self.spec), now)
        store.update_trainer(self.id, **columns)
        progress = self.job.progress
        self.points.note(store, now, progress.samples, *progress.reported.both(), last=finished)


def make_job(trainer: str, spec: TrainerSpec, launcher: Launcher, settings: JobSettings) -> TrainerJob:
    """Return the job that matches a trainer's launcher. `max_restarts` of the spec limits its failures."""
    settings = replace(settings, most_failures=spec.max_restarts + 1)
    if launcher.traits.speaks:
        return ElasticJob(trainer, spec.min_nodes, settings)
    return OpaqueJob(trainer, spec.min_nodes, settings, launcher, spec.work)
