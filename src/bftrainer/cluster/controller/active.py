"""Active trainers and node states are records kept by the reconciler.

An `ActiveTrainer` is a trainer that is not finished; it also saves its own state, progress and rescales to the store.
A `NodeState` is a node that is connected or awaited.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self, cast

from bftrainer.cluster.config.keys import DEFAULTS
from bftrainer.cluster.controller.metric_history import MetricHistory
from bftrainer.cluster.controller.node_ranks import default_ranks
from bftrainer.cluster.jobs.base import JobRecord, TrainerJob
from bftrainer.cluster.jobs.beliefs import Beliefs, belief_key
from bftrainer.cluster.jobs.elastic import ElasticJob
from bftrainer.cluster.jobs.learning import Learned, Prior
from bftrainer.cluster.jobs.opaque import OpaqueJob
from bftrainer.cluster.jobs.progress import TrainerProgress
from bftrainer.cluster.jobs.worker import JobSettings
from bftrainer.cluster.launchers.base import HEAD, Launch, Launcher
from bftrainer.cluster.spec.states import FINISHED, TrainerState
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store import events
from bftrainer.cluster.store.rows import NodeRow, TrainerRow, WorkerRow
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.wire.messages import Gpu, GpuUse, Join
from bftrainer.cluster.wire.worker_messages import LEAST, MOST
from bftrainer.core.curve import Curve
from bftrainer.core.node_time import GpuCounts, NodeTime
from bftrainer.core.trainer import Trainer
from bftrainer.elastic.metrics import Position
from bftrainer.elastic.protocol import CANNOT_STAND_IN, Generation

RESTORED_GRACE_S = 2.0
"""The time that a leaving node still has after a restart of the controller, which may have taken long."""
GPU_USE_S = 120.0
"""How long, in seconds, the reading of a node's GPUs is shown after it was sent."""
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
    job: JobSettings = field(default_factory=JobSettings)


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection of an agent has ended without a `Going`. The agent may come back."""

    reason: str


@dataclass(slots=True)
class NodeState:
    """A node whose agent is connected, or is awaited: its connection broke, or the controller was restarted."""

    name: str
    host: str
    agent: str
    pid: int
    joined: float
    heard: float
    here: bool = True
    """Whether its agent is connected; otherwise it is awaited."""
    cut: bool = False
    """Whether its agent is awaited because its connection broke, and not because the controller was restarted."""
    leave_by: float | None = None
    trainer: str | None = None
    """The trainer that the node is assigned to, by the last decision."""
    worker: str | None = None
    """The worker that runs there. Always None on the head, where any number of workers may run."""
    gpus: tuple[Gpu, ...] = ()
    slots: int = 0
    """How many ranks its pool said that it has; 0: nothing."""
    knows_ranks: bool = False
    """Whether its agent's workers can be in a generation with workers that have several ranks."""
    gpu_count: int = 0
    """How many GPUs it has. After a restart of the controller this is known before its agent is back."""
    gpu_use: tuple[GpuUse, ...] = ()
    """The newest reading that its agent sent."""
    gpu_use_at: float = 0.0

    @classmethod
    def from_row(cls, row: NodeRow, now: float) -> Self:
        """Return a node that an earlier controller stored. Its agent is awaited."""
        leave_by = now + RESTORED_GRACE_S if row.leaving is not None else None
        node = cls(row.node, row.host, row.agent, row.pid, row.joined, now, here=False, leave_by=leave_by)
        node.gpu_count, node.slots = row.gpus, row.slots
        return node

    @classmethod
    def from_join(cls, join: Join, now: float) -> Self:
        """Return a node whose agent connected for the first time."""
        node = cls(join.node, join.host, join.agent, join.pid, now, now, gpus=join.gpus, slots=join.slots)
        node.gpu_count, node.knows_ranks = len(join.gpus), join.knows_ranks
        return node

    def save_joined(self, store: Store) -> None:
        """Store the node, and log that it joined."""
        name, host, agent, gpus = self.name, self.host, self.agent, self.gpu_count
        store.put_node(name, host=host, agent=agent, pid=self.pid, joined=self.joined, gpus=gpus, slots=self.slots)
        is_head = name == HEAD
        event = events.HeadJoined(name, host, agent) if is_head else events.NodeJoined(name, host, agent, gpus)
        store.log(self.joined, event)

    @property
    def ranks(self) -> int:
        """How many ranks a worker has there by default."""
        return default_ranks(self.gpus or range(self.gpu_count), self.slots)

    @property
    def is_free(self) -> bool:
        """Whether a worker can be started there."""
        return self.here and self.leave_by is None and self.worker is None

    @property
    def in_pool(self) -> bool:
        """Whether the node can be assigned to a trainer."""
        return self.leave_by is None and self.name != HEAD

    def beat(self, now: float, gpus: tuple[GpuUse, ...] = ()) -> None:
        """Record that its agent is alive. `gpus` is a new reading of its GPUs, if there is one."""
        self.heard = now
        if gpus:
            self.gpu_use, self.gpu_use_at = gpus, now

    def rejoined(self, join: Join, now: float) -> bool:
        """Record that its agent is back. Returns whether its number of ranks is another than was known."""
        before = self.ranks
        self.here, self.cut, self.heard, self.host = True, False, now, join.host
        self.gpus, self.slots, self.knows_ranks = join.gpus, join.slots, join.knows_ranks
        return self.ranks != before

    def gpu_uses(self, now: float) -> dict[str, GpuUse]:
        """Return how much of each GPU is in use, by its id. GPUs without a fresh reading are left out."""
        return {use.id: use for use in self.gpu_use} if now - self.gpu_use_at <= GPU_USE_S else {}

    def shift(self, seconds: float, now: float) -> None:
        """Move all times by `seconds`: the clock was set, or stood still."""
        if seconds > 0:
            self.heard = min(self.heard + seconds, now)
        elif self.heard > now:  # it was heard before the clock was set back
            self.heard += seconds
        self.leave_by = None if self.leave_by is None else self.leave_by + seconds


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
        return self.spec.launcher == "ddp" and self.job.outcome == "failed" and refused

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
