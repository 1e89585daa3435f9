"""Gaps of the event log that reports fill: the pool where a trimmed log begins, and losses while no controller ran.

`usage.py` asks for both before it reads the log.
"""

from __future__ import annotations

from bftrainer.cluster.store.events import NodeLeft, ServeRestored, kinds_of
from bftrainer.cluster.store.replay import POOL_EVENTS, PoolReplay
from bftrainer.cluster.store.store import Store

_BACK = 2000


def here_at_the_cut(store: Store, first: float) -> dict[str, int]:
    """Return the nodes that were in the pool at the beginning of a log whose older part was dropped.

    Each has the number of GPUs that it had when it was last seen.
    """
    pool = PoolReplay()
    replayed = pool.read(store.all_events(kinds_of(*POOL_EVENTS)))
    here = {at.row.node for at in replayed if at.lost and at.since is None}
    known = {row.node: row for row in store.nodes(here=False)}
    still = {row.node for row in known.values() if row.left is None and row.joined <= first and row.leaving is None}
    present = here | (still - pool.here.keys() - pool.gone)
    return {node: known[node].gpus if node in known else 0 for node in present}


def lost_while_away(store: Store) -> dict[str, list[float]]:
    """Return the times at which nodes left while no controller ran, by node.

    Such a time is that of the last event before the restart.
    """
    lost: dict[str, list[float]] = {}
    away = 0.0
    for at in PoolReplay().read(store.all_events(kinds_of(ServeRestored, NodeLeft))):
        match at.event:
            case ServeRestored():
                # Events of the same time belong to the restart: they tell the trainers' states that it found.
                before = store.events(after=max(0, at.seq - _BACK), limit=_BACK - 1)
                away = max((row.time for row in before if row.time < at.time), default=at.time)
            case NodeLeft(node=node, reason="did not come back"):
                lost.setdefault(node, []).append(away)
    return lost
