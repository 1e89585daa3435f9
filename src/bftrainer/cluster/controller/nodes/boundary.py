"""The boundary between owners: of which workers an agent may speak."""

from __future__ import annotations

from bftrainer.cluster.controller.active import ActiveTrainer
from bftrainer.cluster.controller.nodes.state import NodeState


def may_speak_of(worker: str, live: ActiveTrainer, node: NodeState | None, *, own_users: bool) -> bool:
    """Return whether what the agent of a node says of a trainer's worker counts. `own_users`: agents have owners.

    An agent that has an owner speaks of this owner's workers on its own node only, and one of an unknown node of none.
    """
    if worker not in live.job.workers:
        return False
    if not own_users and (node is None or not node.owner):
        return True
    here = node is not None and live.job.workers[worker].node == node.name
    return here and node is not None and node.owner == live.owner
