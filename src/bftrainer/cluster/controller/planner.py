"""The planner keeps the scheduler's state and makes the decisions.

The `Reconciler` tells it about nodes and trainers that come and go, and carries out its decisions. The planner logs all
that a decision depends on, so that decisions can be replayed. It also reads the owners' limits and counts the pool's
node time and GPU time.
"""

from __future__ import annotations

import math
import time as clock
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from bftrainer.cluster.controller.active import PROGRESS_EVERY_S, ActiveTrainer
from bftrainer.cluster.controller.nodes.hand_over import HandOvers
from bftrainer.cluster.controller.nodes.state import NodeState
from bftrainer.cluster.controller.owners import OwnerLimits
from bftrainer.cluster.jobs.beliefs import Beliefs
from bftrainer.cluster.store import events
from bftrainer.cluster.store.event_columns import columns_of
from bftrainer.cluster.store.scheduling_events import decision_event, learned_event
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.wire.worker_messages import MOST
from bftrainer.core.node_time import GpuCounts, NodeTime
from bftrainer.core.pool import Event, Node, Pool
from bftrainer.core.trainer import Trainer
from bftrainer.scheduler import Policy, PoolStatistics, Scheduler, State

_HarvestQuestion = tuple[State, Policy, tuple[Node, ...], Mapping[Node, str]]
"""All that an answer of `Planner.owners_for` depends on."""


class Planner:
    """The scheduler, its state, and what it is told about trainers and owners."""

    def __init__(self, store: Store, scheduler: Scheduler, max_weight: float) -> None:
        self.scheduler = scheduler
        self.state = State()
        self.limits = OwnerLimits(store, max_weight)
        self.beliefs = Beliefs(store)
        self.last_decision: Mapping[str, Any] | None = None
        self.decisions = 0
        self._store = store
        self._decided = self.state
        """The state after the last decision."""
        self._demand: tuple[State, Policy, int | None, int] | None = None
        """The last state, policy and size of the pool for which the demand was counted, and the demand."""
        self._harvest: tuple[_HarvestQuestion, Mapping[Node, str]] | None = None
        """The last question of `owners_for`, and the answer."""
        self._idle_owners: tuple[Mapping[Node, str], Mapping[str, Any], frozenset[str], frozenset[str]] | None = None
        """Whose nodes are idle and who has nodes, with the parts of the state of which that was said."""
        self.hand_overs: HandOvers | None = None
        """Knows how long a node takes to change its owner. Set by the reconciler."""
        self.gpus = GpuCounts()
        """How many GPUs each node of the pool has."""
        self.pool_time = NodeTime()
        """The time of the nodes of the pool."""
        self._totals_at = 0.0
        self._limited_weights: dict[str, float] = store.kept("limited_weights") or {}
        """The weight in force of each trainer that asked for more than its owner may use. Each is logged once."""
        self._obey_limits()

    @property
    def undecided(self) -> bool:
        """Whether nodes or trainers changed since the last decision."""
        return self.state is not self._decided

    def demand(self, most: int | None = None) -> int:
        """Return how many nodes all trainers could use now, if the pool can have `most`; None: any number."""
        state, policy = self.state, self.scheduler.policy
        last = self._demand
        if last is None or last[0] is not state or last[1] is not policy or last[2] != most:
            trainers = (*state.admitted, *state.waiting)
            able = [trainer for trainer in trainers if most is None or trainer.min_nodes <= most]
            last = self._demand = (state, policy, most, _usable_nodes(able, policy))
        return last[3]

    def restore(self, nodes: Mapping[Node, float], trainers: Sequence[ActiveTrainer], now: float) -> None:
        """Restore the state of the last decision. `nodes` has the nodes of the pool and when they joined.

        The GPUs of the nodes must be set before, in `gpus`.
        """
        totals = self._store.kept("totals") or {}
        self.decisions = totals.get("decisions", 0)
        times = (totals.get("pool_node_s", 0.0), totals.get("pool_gpu_s", 0.0))
        self.pool_time = NodeTime(*times, len(nodes), self.gpus.total, now)
        usual_rate = _usual_rate(trainers)
        waiting = {live.id: self._describe(live, usual_rate, now) for live in trainers}
        admitted = [waiting.pop(name) for name in self._store.kept("admitted") or () if name in waiting]
        seen = self._store.kept("seen")
        self.state = State(
            Pool(MappingProxyType(dict(nodes))),
            tuple(admitted),
            tuple(waiting.values()),
            MappingProxyType({live.id: live.job.nodes for live in trainers if live.job.nodes}),
            PoolStatistics(**seen) if seen else PoolStatistics(),
        )

    def pool_changed(self, event: Event, now: float, gpus: int = 0) -> list[str]:
        """Handle nodes that joined, each with this number of GPUs, or left. Returns the trainers that lost a node."""
        self.state, lost = self.state.pool_changed(event)
        for node in (*event.joined, *event.left):
            self.gpus.set(node, gpus if node in self.state.pool else 0)
        self.pool_time.count(now, len(self.state.pool), self.gpus.total)
        return list(lost)

    def owned(self, nodes: Iterable[NodeState]) -> None:
        """Handle nodes that serve another owner than before, or have joined for one."""
        for node in nodes:
            if node.owner and node.in_pool:
                self.state = self.state.owned(node.name, node.heir or node.owner)

    def owners_for(self, nodes: Sequence[Node], invited: Mapping[Node, str], now: float) -> Mapping[Node, str]:
        """Return whose trainers would get nodes that have no agent yet, if all of them joined now.

        `invited` are nodes whose agents are on their way, and for whom. Nodes that nobody could use are left out.
        """
        coming = {node: owner for node, owner in invited.items() if node not in self.state.pool and node not in nodes}
        new = [node for node in nodes if node not in self.state.pool]
        state = self.state
        if not new or not (state.admitted or state.waiting):
            return {}
        question = (state, self.scheduler.policy, tuple(new), coming)  # the policy: quotas change with lenders
        if self._harvest is None or self._harvest[0] != question:
            joined, _ = state.pool_changed(Event(max(now, state.seen.last), joined=(*coming, *new)))
            for node, owner in coming.items():
                joined = joined.owned(node, owner)
            plan = self.scheduler.decide(joined)
            owner_of = {trainer.name: trainer.owner for trainer in plan.considered}
            given = {node: owner_of[name] for name, held in plan.placed.nodes.items() for node in held}
            self._harvest = (question, {node: given[node] for node in new if node in given})
        return self._harvest[1]

    def see_gpus(self, node: NodeState, gpus: int, now: float) -> None:
        """Take the number of GPUs that the agent of a known node reports, and log it if it is another than before."""
        if node.gpu_count == gpus:
            return
        node.gpu_count = gpus
        self._store.update_node(node.name, gpus=gpus)
        if node.in_pool:
            self._store.log(now, events.NodeGpusChanged(node.name, gpus))
            self.gpus.set(node.name, gpus)
            self.pool_time.count(now, len(self.state.pool), self.gpus.total)

    def submitted(self, live: ActiveTrainer, trainers: Mapping[str, ActiveTrainer], now: float) -> None:
        """Add a trainer to the queue."""
        self.state = self.state.submitted(self._describe(live, _usual_rate(trainers.values()), now))

    def finished(self, live: ActiveTrainer) -> None:
        """Remove a trainer that has ended."""
        live.known = None
        live.learned.trial.ended()
        self.state = self.state.finished(live.id)
        self.scheduler.forget(live.id)
        if self._limited_weights.pop(live.id, None) is not None:
            self._store.keep("limited_weights", self._limited_weights)

    def decide(self, trainers: Mapping[str, ActiveTrainer], now: float) -> Mapping[str, tuple[Node, ...]]:
        """Decide which nodes each trainer has from now on, and return the nodes by trainer."""
        usual_rate = _usual_rate(trainers.values())
        soon = self._considered_soon()
        for live in trainers.values():
            if live.known is None:
                continue
            is_told = not live.stale and live.known.weight == self._weight(live)
            is_told = is_told and live.hand_over_s == self._hand_over_s(live.owner)
            if not is_told or (live.id in soon and live.learned.has_news(live.known, live.hand_over_s)):
                self.state = self.state.relearned(self._describe(live, usual_rate, now))
        began = clock.perf_counter()
        plan = self.scheduler.decide(self.state)
        took_ms = (clock.perf_counter() - began) * 1e3
        self.state = self._decided = self.state.after(plan)
        self.decisions += 1
        names = {name: live.name for name, live in trainers.items()}
        decision = decision_event(plan, self.state, names, took_ms)
        self.last_decision = {"time": now, **columns_of(decision).data}
        self._store.log(now, decision)
        self._store.keep("admitted", [trainer.name for trainer in self.state.admitted])
        if not math.isnan(self.state.seen.since):
            self._store.keep("seen", asdict(self.state.seen))
        self._keep_totals(now)
        return self.state.assigned

    def _considered_soon(self) -> set[str]:
        """Return the trainers that the next decision may consider."""
        state, scheduler = self.state, self.scheduler
        room = max(scheduler.max_parallel(state) - len(state.admitted), 0)
        if scheduler.policy.max_parallel is None:  # more are admitted while nodes are idle
            room += len(state.pool)
        return {trainer.name for trainer in (*state.admitted, *state.waiting[:room])}

    def tick(self, now: float) -> bool:
        """Read the owners' limits, and store the totals from time to time. Returns whether the quotas changed."""
        if now - self._totals_at >= PROGRESS_EVERY_S:
            self._keep_totals(now)
        return self.read_limits(now)

    def read_limits(self, now: float) -> bool:
        """Read the owners' limits, which commands change in the store. Returns whether a decision depends on it."""
        self.limits.read()
        if self.limits.quotas == self.scheduler.policy.quotas and self.limits.max_weights == self._max_weights:
            return False
        self._obey_limits()
        self._store.log(now, events.OwnersChanged([asdict(row) for row in self.limits.rows]))
        return True

    def _obey_limits(self) -> None:
        self.scheduler.policy = replace(self.scheduler.policy, quotas=self.limits.quotas)
        self._max_weights = self.limits.max_weights

    def _keep_totals(self, now: float) -> None:
        self._totals_at = now
        seconds = {"pool_node_s": self.pool_time.node_seconds(now), "pool_gpu_s": self.pool_time.gpu_seconds(now)}
        self._store.keep("totals", {**seconds, "decisions": self.decisions})

    def _describe(self, live: ActiveTrainer, usual_rate: float, now: float) -> Trainer:
        """Return the scheduler's description of a trainer, and log it so that decisions can be replayed."""
        known = live.as_trainer(usual_rate)
        if known.weight > (weight := self._weight(live)):
            if self._limited_weights.get(live.id) != weight:
                self._store.log(now, events.WeightLimited(live.id, live.spec.weight, weight))
                self._limited_weights[live.id] = weight
                self._store.keep("limited_weights", self._limited_weights)
            known = replace(known, weight=weight)
        live.hand_over_s = self._hand_over_s(live.owner)
        if live.hand_over_s:
            known = replace(known, start_s=min(known.start_s + live.hand_over_s, MOST))
        live.known = known
        live.stale = False
        self._store.log(now, learned_event(known))
        return known

    def _hand_over_s(self, owner: str) -> float:
        """Return what an owner's trainers wait for a further node because it serves another owner now.

        Nothing while a node of the owner is idle, or where all nodes are the owner's.
        """
        homes, assigned = self.state.homes, self.state.assigned
        if not homes or self.hand_overs is None:
            return 0.0
        known = self._idle_owners
        if known is None or known[0] is not homes or known[1] is not assigned:
            taken = {node for nodes in assigned.values() for node in nodes}
            idle = frozenset(home for node, home in homes.items() if node not in taken)
            known = self._idle_owners = (homes, assigned, idle, frozenset(homes.values()))
        return 0.0 if owner in known[2] or known[3] == {owner} else self.hand_overs.cost_s

    def _weight(self, live: ActiveTrainer) -> float:
        """Return the weight with which a trainer counts."""
        return min(live.weight, self.limits.max_weight(live.owner))


def _usable_nodes(trainers: Iterable[Trainer], policy: Policy) -> int:
    """Return how many nodes trainers could use: the largest ones that may run side by side, within owners' limits."""
    caps = {owner: quota.max_nodes for owner, quota in policy.quotas.items() if quota.max_nodes is not None}
    able = [trainer for trainer in trainers if trainer.min_nodes <= caps.get(trainer.owner, trainer.min_nodes)]
    by_owner: dict[str, int] = {}
    for trainer in sorted(able, key=lambda trainer: -trainer.max_nodes)[: policy.max_parallel]:
        by_owner[trainer.owner] = by_owner.get(trainer.owner, 0) + trainer.max_nodes
    return sum(min(nodes, caps.get(owner, nodes)) for owner, nodes in by_owner.items())


def _usual_rate(trainers: Iterable[ActiveTrainer]) -> float:
    """Return the best measured rate per node. It is assumed for unmeasured trainers, so that they are tried."""
    scripts = {id(live.learned.script): live.learned.script for live in trainers}
    return max((script.best_rate_per_node for script in scripts.values()), default=0.0) or 1.0
