"""The controller's side of a pool: it passes the pool's reports on nodes to the reconciler."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bftrainer.cluster.controller.agents import AgentHub
from bftrainer.cluster.controller.event_runner import EventRunner
from bftrainer.cluster.controller.nodes.invitations import Invitations
from bftrainer.cluster.controller.owners import OwnerReach
from bftrainer.cluster.owners.accounts import Accounts
from bftrainer.cluster.pools.base import KnowsOwners, Pool
from bftrainer.cluster.store import events
from bftrainer.processes import variables


class ControllerPoolHost:
    """Implements `pools.base.PoolHost`, which documents the methods."""

    def __init__(
        self,
        runner: EventRunner,
        agents: AgentHub,
        agent_environment: Mapping[str, str],
        accounts: Accounts | None = None,
    ) -> None:
        """`accounts`: those of owners, where agents have owners."""
        self._runner = runner
        self._agents = agents
        self.agent_environment = dict(agent_environment)
        self.accounts = accounts or Accounts()
        self.own_users = accounts is not None
        self._most: int | None = None

    @property
    def observing(self) -> bool:
        """See `PoolHost`."""
        return self._runner.cluster.settings.dry_run

    @property
    def nodes(self) -> frozenset[str]:
        """See `PoolHost`."""
        return self._agents.nodes

    @property
    def demand(self) -> int:
        """See `PoolHost`."""
        return self._runner.cluster.planner.demand(self._most)

    @property
    def used(self) -> frozenset[str]:
        """See `PoolHost`."""
        nodes = self._runner.cluster.nodes.values()
        return frozenset(node.name for node in nodes if node.trainer is not None or node.worker is not None)

    @property
    def owners(self) -> Mapping[str, str]:
        """See `PoolHost`."""
        return {node.name: node.owner for node in self._runner.cluster.nodes.values() if node.owner}

    def owners_for(self, nodes: Sequence[str]) -> Mapping[str, str]:
        """See `PoolHost`."""
        now, cluster = time.time(), self._runner.cluster
        kept = {node: cluster.nodes[node].heir or cluster.nodes[node].owner for node in nodes if node in cluster.nodes}
        invited = self._invitations.pending(now)
        return {**cluster.planner.owners_for([node for node in nodes if node not in kept], invited, now), **kept}

    def invitation(self, node: str, owner: str, *, within_s: float | None = None) -> Mapping[str, str]:
        """See `PoolHost`."""
        with self._runner.event():
            secret = self._invitations.invite(node, owner, time.time(), within_s)
        return {**self.agent_environment, variables.SECRET: secret, variables.NODE: node, variables.OWNER: owner}

    def not_coming(self, node: str, reason: str) -> None:
        """See `PoolHost`."""
        with self._runner.event() as effects:
            self._invitations.withdraw(node)
            state = self._runner.cluster.nodes.get(node)
            if state is not None and state.dismissed is not None:
                effects.add(self._runner.cluster.lost(node, reason, time.time()))

    def see_reach(self, pool: Pool) -> None:
        """Note for which owners the pool cannot start agents, so that nodes go to others meanwhile."""
        if not self.own_users or not isinstance(pool, KnowsOwners):
            return
        cluster, has = self._runner.cluster, Counter(self.owners.values())
        reach: dict[str, OwnerReach] = {}
        for owner in {live.owner for live in cluster.trainers.values()}:
            why, most = pool.why_not(owner), pool.most_nodes(owner)
            if why:
                reach[owner] = OwnerReach(has[owner], why)
            elif most is not None:
                reach[owner] = OwnerReach(most)
        cluster.planner.limits.reach = reach

    @property
    def _invitations(self) -> Invitations:
        assert self._agents.invitations is not None, "the pool asks only where agents have owners"
        return self._agents.invitations

    def could_have(self, nodes: int) -> None:
        """See `PoolHost`."""
        self._most = nodes

    def available(self, node: str) -> None:
        """See `PoolHost`."""
        with self._runner.event() as effects:
            effects.add(self._runner.cluster.available(node, time.time()))

    def leaving(self, node: str, grace_s: float) -> None:
        """See `PoolHost`."""
        with self._runner.event() as effects:
            effects.add(self._runner.cluster.leaving(node, grace_s, time.time()))

    def gone(self, node: str, reason: str) -> None:
        """See `PoolHost`."""
        self._agents.gone(node, reason)

    def dismiss(self, node: str, reason: str) -> None:
        """See `PoolHost`."""
        self._agents.dismiss(node, reason)

    def remember(self, key: str, value: Any) -> None:
        """See `PoolHost`."""
        with self._runner.event():
            self._runner.cluster.store.keep(f"pool.{key}", value)

    def recall(self, key: str) -> Any:
        """See `PoolHost`."""
        return self._runner.cluster.store.kept(f"pool.{key}")

    def note(self, what: str, **facts: Any) -> None:
        """See `PoolHost`."""
        with self._runner.event():
            self._runner.cluster.store.log(time.time(), events.PoolNote(what, facts))
