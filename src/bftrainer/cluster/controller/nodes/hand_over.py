"""Hand-over: a node goes from one owner to another without leaving the pool.

A decision gives a node to a trainer of an owner whose agent is not the one there. When the former owner's worker has
ended, its agent is dismissed, and the pool is told to start the agent of the other owner, the heir. The node stays
assigned meanwhile. If the new agent does not come in time, the node is lost, and the pool starts again with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bftrainer.cluster.controller.active import ActiveTrainer
from bftrainer.cluster.controller.effects import Effects
from bftrainer.cluster.controller.nodes.state import NodeState
from bftrainer.cluster.store import events
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.wire.messages import Bye, Join

UNMEASURED_S = 5.0
"""The assumed time of a hand-over, until one was measured."""
MOST_S = 120.0
"""The node is lost if the heir's agent has not joined this long after the former one was dismissed."""
SETTLE_S = 1.0
"""While more agents are on their way, a hand-over waits this long: the next decision may want the node as it is."""
MEASURED = 31
"""The cost of a hand-over is the median of so many."""
_KEY = "hand_over_s"


class HandOvers:
    """The nodes that change their owner, and how long that takes."""

    def __init__(self, store: Store, nodes: Mapping[str, NodeState]) -> None:
        self._store = store
        self._nodes = nodes
        self._took_s: list[float] = list(store.kept(_KEY) or ())
        self.count = int(store.kept("hand_overs") or 0)
        """How often a node was handed over."""
        self.more_come: Callable[[float], bool] = lambda now: False
        """Whether agents of other nodes are on their way at a time. Set by the controller."""

    @property
    def cost_s(self) -> float:
        """How long a node that changes its owner has no agent."""
        return statistics.median(self._took_s) if self._took_s else UNMEASURED_S

    def describe(self) -> dict[str, Any]:
        """Return the figures for `status`."""
        under_way = sum(bool(node.heir) for node in self._nodes.values())
        return {"hand_overs": self.count, "cost_s": round(self.cost_s, 2), "under_way": under_way}

    def decided(self, trainers: Mapping[str, ActiveTrainer], now: float, effects: Effects) -> list[str]:
        """Begin the hand-overs that a decision needs, and end those that it has made needless.

        Returns the nodes that serve another owner from now on.
        """
        changed = []
        for node in self._nodes.values():
            live = trainers.get(node.trainer or "")
            if not node.owner or live is None or live.owner == (node.heir or node.owner) or not node.in_pool:
                continue
            if live.owner == node.owner and node.dismissed is None:
                node.heir = ""
            else:
                node.heir, node.heir_since = live.owner, now
                if node.dismissed is not None:
                    node.dismissed = now
                    effects.hand_over.append((node.name, node.heir))
            node.save(self._store)
            self._store.log(now, events.NodeOwned(node.name, live.owner))
            changed.append(node.name)
            self.proceed(node, now, effects)
        return changed

    def proceed(self, node: NodeState, now: float, effects: Effects) -> None:
        """Dismiss the agent of a node that has an heir, once its worker has ended."""
        if not node.heir or node.worker is not None or not node.in_pool:
            return
        if node.dismissed is None:
            if now - node.heir_since < SETTLE_S and self.more_come(now):
                return  # `Reconciler.tick` asks again
            node.dismissed = now
            effects.hand_over.append((node.name, node.heir))
        if node.here:
            effects.tell(node.name, Bye("the node goes to another owner"))

    def vacated(self, name: str) -> bool:
        """Record that the agent of a node has gone. Returns whether the heir's takes its place, so nothing is lost."""
        node = self._nodes.get(name)
        if node is None or not node.heir or node.dismissed is None or not node.in_pool:
            return False
        node.here = node.cut = False
        return True

    def succeeds(self, join: Join, owner: str, now: float) -> bool:
        """Let the agent of the heir take over its node. Returns whether it is that one."""
        node = self._nodes.get(join.node)
        if node is None or not node.heir or node.heir != owner or node.dismissed is None or join.agent == node.agent:
            return False
        before, took_s = node.owner, max(0.0, now - node.dismissed)
        node.succeeded(join, now)
        node.save(self._store)
        self._store.log(now, events.NodeHandedOver(node.name, before, owner, round(took_s, 3)))
        self._took_s = [*self._took_s, took_s][-MEASURED:]
        self.count += 1
        self._store.keep(_KEY, self._took_s)
        self._store.keep("hand_overs", self.count)
        return True

    def overdue(self, now: float) -> Iterable[str]:
        """Return the nodes whose heir's agent has not come, and those that leave meanwhile."""
        awaited = [(node, node.dismissed) for node in self._nodes.values() if node.dismissed is not None]
        return [node.name for node, since in awaited if now > since + MOST_S or not (node.here or node.in_pool)]
