"""Preparing: tells agents what to import ahead for trainers that may get their nodes next.

The controller calls `prepare` at every tick. Each agent is told of each script once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bftrainer.cluster.controller.active import ActiveTrainer
from bftrainer.cluster.controller.effects import Effects
from bftrainer.cluster.controller.nodes.state import NodeState
from bftrainer.cluster.controller.start_up.preloads import Preloads
from bftrainer.cluster.launchers.base import HEAD, WorkerSlot
from bftrainer.cluster.store.preloads import Script
from bftrainer.cluster.wire.messages import Prepare

MOST_AHEAD = 2
"""How many scripts an agent imports for ahead, besides that of its present worker."""

_Wanted = tuple[Script, tuple[str, ...]]


class Preparer:
    """Remembers what each agent was told."""

    def __init__(self, preloads: Preloads) -> None:
        self._preloads = preloads
        self._told: dict[str, dict[_Wanted, None]] = {}
        """By agent, the scripts and modules, the last ones last."""

    def prepare(self, nodes: Mapping[str, NodeState], trainers: Mapping[str, ActiveTrainer]) -> Effects:
        """Return the messages for agents that do not know yet what to import ahead."""
        effects = Effects()
        wanted = list(self._wanted(trainers))
        here = {node.agent: node for node in nodes.values() if node.here and node.leave_by is None}
        self._told = {agent: told for agent, told in self._told.items() if agent in here}
        for agent, node in here.items():
            if node.name == HEAD:
                continue
            told = self._told.setdefault(agent, {})
            for live, key in wanted:
                if key not in told and node.serves(live.owner):
                    told[key] = None
                    effects.tell(node.name, self._message(live, node, key[1]))
            for old in list(told)[: -2 * MOST_AHEAD]:
                del told[old]
        return effects

    def _wanted(self, trainers: Mapping[str, ActiveTrainer]) -> Iterator[tuple[ActiveTrainer, _Wanted]]:
        """Return the first unfinished trainers of different scripts, and what they import."""
        found = dict[_Wanted, ActiveTrainer]()
        for live in trainers.values():
            may_start = live.job.outcome is None and live.launcher.traits.speaks
            modules = self._preloads.of(live.spec, live.owner) if may_start else ()
            if modules:
                found.setdefault((live.spec.identity, modules), live)
            if len(found) == MOST_AHEAD:
                break
        return ((live, key) for key, live in found.items())

    def _message(self, live: ActiveTrainer, node: NodeState, modules: tuple[str, ...]) -> Prepare:
        slot = WorkerSlot(f"{live.id}-0", node.name, node.host, ranks=live.spec.ranks_on(node.ranks))
        start = live.launcher.start(live.launch, slot)
        where = (start.cwd, start.python, start.submitted_python)
        spec = live.spec.as_json() if live.spec.signature else None
        return Prepare(start.argv, modules, start.env, *where, ranks=start.ranks, spec=spec)
