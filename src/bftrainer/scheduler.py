"""Scheduler: combines queue, allocator and placement into one decision. State in, plan out.

It uses no clock, input or output. The simulator and the live system keep a `State` and tell it what happens
(`pool_changed`, `submitted`, `finished`). They ask `Scheduler.decide` for a `Plan`, carry it out, and continue from
`state.after(plan)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from bftrainer.allocate.admission import USUAL_PARALLEL, admit, admit_for_idle, automatic_parallel
from bftrainer.allocate.exact import ExactAllocator
from bftrainer.allocate.place import Homes, Placed, Placement, Stable, place
from bftrainer.allocate.problem import Allocator, Claim, Decision, Limits, Problem
from bftrainer.allocate.quotas import Quota, limits_in_force
from bftrainer.allocate.registry import make_allocator
from bftrainer.core.curve import Curve
from bftrainer.core.objective import Objective, throughput
from bftrainer.core.pool import Event, Node, Pool
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError

DEFAULT_HORIZON_S = 120.0
LEAST_HORIZON_S, MOST_HORIZON_S = 10.0, 3600.0
_MOST_REMEMBERED = 4096
EXCLUSIVE_S = 0.25
"""Time limit of `milp` where trainers exclude each other; after it, the best decision found so far counts."""
STARTS_IN_HORIZON = 2.0
"""A horizon is at least this many times as long as the time that nodes take to start."""
LEAVES_TO_JUDGE = 10
"""Number of leaves seen before an automatic horizon is trusted."""

Action = Literal["start", "grow", "shrink", "stop", "keep", "wait"]


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of the scheduler's decisions."""

    allocator: Allocator = field(default_factory=ExactAllocator)
    objective: Objective = throughput
    horizon_s: float | None = DEFAULT_HORIZON_S
    """T_fwd; None: the mean time between leaves seen so far."""
    max_parallel: int | None = USUAL_PARALLEL
    """Pj_max, how many trainers are considered at once; None: as many as the pool's size and the trainers' sizes ask
    for, and more while nodes are idle that waiting trainers could use."""
    placement: Placement = field(default_factory=Stable)
    limits: Limits = field(default_factory=Limits)
    quotas: Mapping[str, Quota] = field(default_factory=lambda: MappingProxyType({}))
    """Quotas by owner; the limits that follow from them depend on the pool and the queue."""

    def __post_init__(self) -> None:
        if self.horizon_s is not None and not (math.isfinite(self.horizon_s) and self.horizon_s > 0):
            raise InputError(f"horizon must be a number of seconds above 0, or auto, but got {self.horizon_s}")
        if self.max_parallel is not None and self.max_parallel < 1:
            raise InputError(f"max parallel must be 1 or more, or auto, but got {self.max_parallel}")


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Statistics of the pool so far."""

    since: float = math.nan
    last: float = math.nan
    leaves: int = 0
    node_seconds: float = 0.0

    def then(self, event: Event, pool_before: int) -> PoolStatistics:
        """The statistics with one more event, which found `pool_before` nodes in the pool."""
        if math.isnan(self.since):
            return PoolStatistics(event.time, event.time, bool(event.left), 0.0)
        passed = event.time - self.last
        return PoolStatistics(
            self.since, event.time, self.leaves + bool(event.left), self.node_seconds + passed * pool_before
        )

    @property
    def between_leaves_s(self) -> float | None:
        """Mean time between leaves; None before enough leaves were seen."""
        if self.leaves < LEAVES_TO_JUDGE:
            return None
        return (self.last - self.since) / self.leaves

    @property
    def mean_pool(self) -> float | None:
        """The mean size of the pool."""
        passed = self.last - self.since
        return self.node_seconds / passed if passed > 0 else None


@dataclass(frozen=True, slots=True)
class State:
    """Everything a decision depends on: pool, trainers and assignments."""

    pool: Pool = field(default_factory=Pool)
    admitted: tuple[Trainer, ...] = ()
    """Trainers that are considered, in the order in which they were admitted. They stay so until they finish."""
    waiting: tuple[Trainer, ...] = ()
    """Trainers that are not considered yet, in order of submission, first come first served."""
    assigned: Mapping[str, tuple[Node, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """The nodes of each trainer that runs."""
    seen: PoolStatistics = field(default_factory=PoolStatistics)
    homes: Mapping[Node, str] = field(default_factory=lambda: MappingProxyType({}))
    """The owner whose trainers each node serves, where a node serves one owner at a time; see `place.Homes`."""

    def pool_changed(self, event: Event) -> tuple[State, Mapping[str, tuple[Node, ...]]]:
        """The state once nodes have joined and left, and the nodes that each trainer lost.

        A trainer left with fewer nodes than its minimum has stopped: its other nodes are free.
        """
        lost: dict[str, tuple[Node, ...]] = {}
        assigned = self.assigned
        if event.left:
            gone = frozenset(event.left)
            minimum = {trainer.name: trainer.min_nodes for trainer in self.admitted}
            kept: dict[str, tuple[Node, ...]] = {}
            for name, nodes in assigned.items():
                if gone.isdisjoint(nodes):
                    kept[name] = nodes
                    continue
                lost[name] = tuple(node for node in nodes if node in gone)
                left = tuple(node for node in nodes if node not in gone)
                if len(left) >= minimum[name]:
                    kept[name] = left
            assigned = MappingProxyType(kept)
        homes = self.homes
        if homes and event.left:
            homes = MappingProxyType({node: owner for node, owner in homes.items() if node not in event.left})
        seen = self.seen.then(event, len(self.pool))
        state = replace(self, pool=self.pool.after(event), assigned=assigned, seen=seen, homes=homes)
        return state, MappingProxyType(lost)

    def owned(self, node: Node, owner: str) -> State:
        """The state once a node serves the trainers of an owner."""
        return replace(self, homes=MappingProxyType({**self.homes, node: owner}))

    def submitted(self, *trainers: Trainer) -> State:
        """The state with more trainers, behind those submitted before them.

        The caller makes sure that no two trainers have the same name.
        """
        waiting = (*self.waiting, *trainers)
        # Waiting trainers are in order already: check only from where the new ones begin.
        if any(b.submit < a.submit for a, b in pairwise(waiting[-len(trainers) - 1 :])):
            waiting = tuple(sorted(waiting, key=lambda trainer: trainer.submit))
        return replace(self, waiting=waiting)

    def relearned(self, trainer: Trainer) -> State:
        """The state with `trainer` in place of the earlier description of the same trainer."""

        def put(queue: tuple[Trainer, ...]) -> tuple[Trainer, ...]:
            return tuple(trainer if known.name == trainer.name else known for known in queue)

        return replace(self, admitted=put(self.admitted), waiting=put(self.waiting))

    def finished(self, name: str) -> State:
        """The state without one trainer, whose nodes become free."""
        admitted = tuple(trainer for trainer in self.admitted if trainer.name != name)
        waiting = self.waiting
        if len(admitted) == len(self.admitted):
            waiting = tuple(trainer for trainer in waiting if trainer.name != name)
            if len(waiting) == len(self.waiting):
                raise InputError(f"trainer {name!r} is not in the queue")
        assigned = MappingProxyType({other: nodes for other, nodes in self.assigned.items() if other != name})
        return replace(self, admitted=admitted, waiting=waiting, assigned=assigned)

    def after(self, plan: Plan) -> State:
        """The state once the plan is carried out."""
        newcomers = plan.considered[len(self.admitted) :]
        waiting = self.waiting[len(newcomers) :]
        if newcomers != self.waiting[: len(newcomers)]:  # some were passed over
            names = {trainer.name for trainer in newcomers}
            waiting = tuple(trainer for trainer in self.waiting if trainer.name not in names)
        assigned = MappingProxyType({name: nodes for name, nodes in plan.placed.nodes.items() if nodes})
        return replace(self, admitted=plan.considered, waiting=waiting, assigned=assigned)


@dataclass(frozen=True, slots=True)
class Change:
    """Effect of a plan on one trainer, and the reason."""

    claim: Claim
    after: int
    horizon_s: float
    pool: int
    limited: bool = False
    """Whether owners have limits."""

    @property
    def trainer(self) -> str:
        """Name of the trainer."""
        return self.claim.name

    @property
    def before(self) -> int:
        """Number of nodes the trainer runs on now."""
        return self.claim.running

    @property
    def action(self) -> Action:
        """Action that the trainer has to take."""
        before, after = self.claim.running, self.after
        if after == before:
            return "keep" if after else "wait"
        if after > before:
            return "grow" if before else "start"
        return "shrink" if after else "stop"

    @property
    def gain(self) -> float:
        """Additional value of the new size over the old one within the horizon, T·(O(after) − O(before))."""
        return self.horizon_s * (self.claim.value.rate(self.after) - self.claim.value.rate(self.before))

    @property
    def cost(self) -> float:
        """Value lost by rescaling, O(before)·R, and while nodes start."""
        return self.horizon_s * self.claim.value.rate(self.after) - self.claim.gain_at(self.after, self.horizon_s)

    @property
    def reason(self) -> str:
        """The decision in words, with its numbers."""
        action = self.action
        if action == "wait" and self.claim.min_nodes > self.pool:
            return f"{self.trainer} waits: it needs at least {self.claim.min_nodes} nodes; the pool has {self.pool}"
        if action == "wait":
            return f"{self.trainer} waits: the nodes are worth more elsewhere"
        if action == "keep":
            return f"{self.trainer} keeps {self.after} nodes: no change is worth its cost"
        verb = {"start": "starts on", "grow": "grows to", "shrink": "shrinks to", "stop": "stops, with"}[action]
        worth = f"worth {self.gain:+,.6g} over {self.horizon_s:g} s, less {self.cost:,.6g} lost in rescaling"
        if self.gain < self.cost:
            worth += "; others gain more from its nodes" + (", or owners' limits ask for it" if self.limited else "")
        return f"{self.trainer} {verb} {self.after} nodes (from {self.before}): {worth}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Decision of the scheduler: node counts and nodes of each trainer, with reasons."""

    decision: Decision
    placed: Placed
    changes: tuple[Change, ...]
    """One change for each trainer that was considered, in order of admission."""
    considered: tuple[Trainer, ...]
    horizon_s: float
    pool: int
    limits: Limits = field(default_factory=Limits)
    """The limits that were in force."""
    allocator: str = ""
    """Name of the allocator that decided."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of nodes for each trainer considered."""
        return {change.trainer: change.after for change in self.changes}


class Scheduler:
    """Takes decisions by a policy. It caches only values that it could compute again."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self._values: dict[str, tuple[Trainer, Curve]] = {}
        self._claims: dict[str, tuple[Trainer, dict[int, Claim]]] = {}
        self._limited: dict[str, Allocator] = {}

    def horizon_s(self, state: State) -> float:
        """The forward-looking time in force."""
        if self.policy.horizon_s is not None:
            return self.policy.horizon_s
        between = state.seen.between_leaves_s
        return DEFAULT_HORIZON_S if between is None else min(max(between, LEAST_HORIZON_S), MOST_HORIZON_S)

    def max_parallel(self, state: State) -> int:
        """The number of trainers to consider; see `automatic_parallel` if the policy names none."""
        if self.policy.max_parallel is not None:
            return self.policy.max_parallel
        mean = state.seen.mean_pool
        pool = float(len(state.pool)) if mean is None else mean
        return automatic_parallel(pool, (*state.admitted, *state.waiting))

    def limits(self, state: State) -> Limits:
        """Current limits of owners, from the policy's quotas and its own limits."""
        limits, quotas = self.policy.limits, self.policy.quotas
        if not quotas:
            return limits
        found = limits_in_force(quotas, len(state.pool), (*state.admitted, *state.waiting))
        return replace(
            limits,
            owner_caps=MappingProxyType({**limits.owner_caps, **found.owner_caps}),
            owner_shares=MappingProxyType({**limits.owner_shares, **found.owner_shares}),
        )

    def decide(self, state: State, limits: Limits | None = None) -> Plan:
        """The best use of the pool for the trainers considered. `limits`: those of an earlier decision, to redo it."""
        limits = self.limits(state) if limits is None else limits
        newcomers = self._newcomers(state, state.waiting, limits)
        plan = self._plan(state, (*state.admitted, *newcomers) if newcomers else state.admitted, limits)
        if self.policy.max_parallel is None:
            wanted = idle = plan.pool - sum(plan.decision.counts)
            while more := admit_for_idle(plan.considered, plan.decision.counts, state.waiting, limits, idle, wanted):
                plan = self._plan(state, (*plan.considered, *more), limits)
                idle = plan.pool - sum(plan.decision.counts)
                wanted = max(2 * wanted, idle)  # so that few rounds are enough, whatever the newcomers use
        return plan

    def would_consider(self, state: State, trainer: Trainer) -> bool:
        """Whether a decision would consider a trainer that is submitted now."""
        if self.policy.max_parallel is None or self.policy.quotas:
            return True  # it may: nodes may be idle, or its owner may have a share
        return trainer in self._newcomers(state, (*state.waiting, trainer), self.policy.limits)

    def _newcomers(self, state: State, waiting: Sequence[Trainer], limits: Limits) -> tuple[Trainer, ...]:
        room = self.max_parallel(state) - len(state.admitted)
        return admit(state.admitted, waiting, room, limits, len(state.pool))

    def _plan(self, state: State, considered: tuple[Trainer, ...], limits: Limits) -> Plan:
        """The best use of the pool for these trainers."""
        # With a horizon in which new nodes hardly compute, no trainer would ever grow.
        longest_start_s = max((trainer.start_s for trainer in considered), default=0.0)
        pool, horizon_s = len(state.pool), max(self.horizon_s(state), STARTS_IN_HORIZON * longest_start_s)
        claims = tuple(self._claim(trainer, len(state.assigned.get(trainer.name, ()))) for trainer in considered)
        problem = Problem(pool, horizon_s, claims, _among(limits, considered))
        decision, allocator = self._allocate(problem)
        counts = {claim.name: count for claim, count in zip(claims, decision.counts, strict=True)}
        homes = Homes(state.homes, {trainer.name: trainer.owner for trainer in considered} if state.homes else {})
        placed = place(state.pool, state.assigned, counts, self.policy.placement, homes)
        limited = bool(problem.limits)
        changes = tuple(
            Change(claim, count, horizon_s, pool, limited) for claim, count in zip(claims, decision.counts, strict=True)
        )
        return Plan(decision, placed, changes, considered, horizon_s, pool, limits, allocator.name)

    def _allocate(self, problem: Problem) -> tuple[Decision, Allocator]:
        """A decision, and the allocator that made it."""
        own = self.policy.allocator
        if not problem.limits or own.name == "milp" or (own.name == "exact" and not problem.limits.exclusive):
            return own.allocate(problem), own
        name = "milp" if problem.limits.exclusive else "exact"
        if name not in self._limited:
            self._limited[name] = make_allocator(name, time_limit_s=EXCLUSIVE_S)
        return self._limited[name].allocate(problem), self._limited[name]

    def value_of(self, trainer: Trainer) -> Curve:
        """The trainer's value curve under the objective."""
        known = self._values.get(trainer.name)
        if known is None or known[0] is not trainer:
            known = self._values[trainer.name] = (trainer, self.policy.objective(trainer))
        return known[1]

    def forget(self, name: str) -> None:
        """Drop the cached values of a finished trainer."""
        self._values.pop(name, None)
        self._claims.pop(name, None)

    def _claim(self, trainer: Trainer, held: int) -> Claim:
        claims = self._claims.get(trainer.name)
        if claims is None or claims[0] is not trainer:
            if len(self._claims) >= _MOST_REMEMBERED:
                self._claims.clear()
            claims = self._claims[trainer.name] = (trainer, {})
        claim = claims[1].get(held)
        if claim is None:
            claim = claims[1][held] = Claim(
                trainer.name,
                held,
                trainer.min_nodes,
                trainer.max_nodes,
                self.value_of(trainer),
                trainer.up_s,
                trainer.down_s,
                trainer.owner,
                trainer.start_s,
            )
        return claim


def _among(limits: Limits, considered: Sequence[Trainer]) -> Limits:
    """The limits restricted to the trainers that are considered now."""
    if not limits.exclusive:
        return limits
    names = {trainer.name for trainer in considered}
    groups = (group & names for group in limits.exclusive)
    return replace(limits, exclusive=tuple(group for group in groups if len(group) > 1))
