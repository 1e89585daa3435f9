"""Questions to the process that predicts: the nodes, the queue and the trainers of one moment, as plain values.

The controller makes a `Question` of its state (`question_of`), which takes well under a millisecond per hundred
trainers. It is sent as one line of JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from bftrainer.cluster.config.keys import PolicySettings
from bftrainer.cluster.jobs.base import TrainerJob
from bftrainer.cluster.jobs.learning import Learned
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.scripts.beliefs import BeliefKey
from bftrainer.core.trainer import Trainer
from bftrainer.scheduler import Scheduler, State

WHAT_IF = "what-if"
"""The set of trainers that a user asks about; ids of trainers that are not submitted begin with it, too."""


@dataclass(frozen=True, slots=True)
class PredictorSettings:
    """Settings of the process, which hold for all its answers."""

    policy: PolicySettings
    snapshot_every_s: float
    profile: str
    """Machine to take the futures from while the pool's own past is too short; `steady`: the nodes stay."""

    def as_text(self) -> str:
        """The settings as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> PredictorSettings:
        """The settings in JSON."""
        found = json.loads(text)
        return cls(**{**found, "policy": PolicySettings(**found["policy"])})


@dataclass(frozen=True, slots=True)
class AskedTrainer:
    """A trainer as far as predictions depend on it."""

    id: str
    owner: str
    group: str
    script: tuple[str, str]
    """What trainers of one script have in common: see `TrainerSpec.identity`."""
    args: tuple[str, ...]
    min_nodes: int
    max_nodes: int
    weight: float
    submitted: float
    samples: int = 0
    total: int | None = None
    """All samples; None: not known."""
    model: str = ""
    is_known: bool = False
    """Whether the controller knows the speed of its script."""
    curve: Mapping[str, Any] | None = None
    """The user's estimate of its speed."""
    up_s: float | None = None
    down_s: float | None = None
    default_up_s: float = 1.0
    default_down_s: float = 1.0
    deadline: float | None = None

    @classmethod
    def of_spec(cls, spec: TrainerSpec, id_: str, owner: str, now: float) -> AskedTrainer:
        """A trainer that is submitted now, or was."""
        return cls(
            *(id_, owner, spec.group, spec.identity, spec.args, spec.min_nodes, spec.max_nodes, spec.weight, now),
            total=spec.work,
            model=spec.model,
            curve=None if spec.curve is None else spec.curve.model_dump(),
            up_s=spec.up_s,
            down_s=spec.down_s,
            deadline=spec.deadline,
        )

    @property
    def belief(self) -> BeliefKey:
        """The key of its script's belief."""
        return BeliefKey(self.owner, *self.script, self.model)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> AskedTrainer:
        """The trainer in a question."""
        return cls(**{**found, "script": tuple(found["script"]), "args": tuple(found["args"])})


@dataclass(frozen=True, slots=True)
class Question:
    """All that a prediction depends on, but for the controller's database."""

    now: float
    pool: Mapping[str, float]
    """The nodes of the pool, and when each one joined."""
    trainers: tuple[AskedTrainer, ...]
    """The trainers that are not finished, in order of submission."""
    considered: tuple[str, ...]
    assigned: Mapping[str, tuple[str, ...]]
    seen: Mapping[str, Any] | None = None
    """Statistics of the pool, which automatic settings of the policy depend on."""
    quotas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What is asked: when all trainers of a set are done."""
    futures: int = 40
    cpu_s: float = 3.0
    """After so many CPU seconds no more futures are begun."""

    @property
    def has_speeds(self) -> bool:
        """Whether the speed of some trainer is measured or given."""
        return any(one.is_known or one.curve is not None for one in self.trainers)

    def as_line(self) -> bytes:
        """The question as a line of JSON."""
        return json.dumps(asdict(self), allow_nan=False).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes | str) -> Question:
        """The question in a line of JSON."""
        found = json.loads(line)
        trainers = tuple(AskedTrainer.from_json(one) for one in found.pop("trainers"))
        return cls(**found, trainers=trainers)

    def with_sizes(self, ids: Collection[str], least: int, most: int) -> Question:
        """The question if these trainers had other limits of their number of nodes."""
        changed = tuple(
            replace(one, min_nodes=least, max_nodes=most) if one.id in ids else one for one in self.trainers
        )
        held = {id_: nodes[:most] if id_ in ids else nodes for id_, nodes in self.assigned.items()}
        kept = {id_: nodes for id_, nodes in held.items() if id_ not in ids or len(nodes) >= least}
        return replace(self, trainers=changed, assigned=kept)

    def with_more(self, trainers: Iterable[AskedTrainer]) -> Question:
        """The question if these trainers were submitted now."""
        return replace(self, trainers=(*self.trainers, *trainers))


class LiveTrainer(Protocol):
    """A trainer of the controller that is not finished."""

    id: str
    owner: str
    submitted: float
    spec: TrainerSpec
    learned: Learned
    job: TrainerJob
    known: Trainer | None


class LivePlanner(Protocol):
    """The controller's scheduler and its state."""

    state: State
    scheduler: Scheduler


class LiveCluster(Protocol):
    """The part of the controller that a question is made of."""

    paused: bool

    @property
    def planner(self) -> LivePlanner:
        """The scheduler and its state."""
        ...

    @property
    def trainers(self) -> Mapping[str, LiveTrainer]:
        """The trainers that are not finished, by id."""
        ...


def question_of(cluster: LiveCluster, now: float) -> Question:
    """The question when each trainer and each group is done."""
    state = cluster.planner.state
    trainers = tuple(_asked(live) for live in cluster.trainers.values() if live.job.state not in FINISHED)
    sets: dict[str, tuple[str, ...]] = {one.id: (one.id,) for one in trainers}
    for one in trainers:
        if one.group:
            key = group_key(one.owner, one.group)
            sets[key] = (*sets.get(key, ()), one.id)
    known = {one.id for one in trainers}
    return Question(
        now,
        dict(state.pool.since),
        trainers,
        tuple(trainer.name for trainer in state.admitted if trainer.name in known),
        {name: nodes for name, nodes in state.assigned.items() if name in known},
        None if math.isnan(state.seen.since) else asdict(state.seen),
        {owner: asdict(quota) for owner, quota in cluster.planner.scheduler.policy.quotas.items()},
        sets,
    )


def group_key(owner: str, group: str) -> str:
    """The name of the set of a group's trainers."""
    return f"{owner}/{group}"


def _asked(live: LiveTrainer) -> AskedTrainer:
    asked = AskedTrainer.of_spec(live.spec, live.id, live.owner, live.submitted)
    progress, learned = live.job.progress, live.learned
    return replace(
        asked,
        weight=asked.weight if live.known is None else live.known.weight,
        samples=progress.samples,
        total=progress.total if progress.total is not None else asked.total,
        is_known=learned.script.rates.is_known,
        default_up_s=learned.up_s,
        default_down_s=learned.down_s,
    )
