"""Futures of a pool, drawn from its past: traces that begin with the present nodes and go on as the past did.

A future is made of blocks of the past. For each block, a moment of the past is drawn that resembles the one reached: a
similar time of day, a pool of similar size. The nodes that joined in the block that followed it join in the future, and
each stays as long as it did. The present nodes share the fate of those that were there at the first such moment: in
the order of their ages, so that nodes that came together go together.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bftrainer.core.pool import Node
from bftrainer.core.trace import Floats, Trace, Window
from bftrainer.forecast.past import PoolPast, block_of

BLOCK_S = 12 * 3600.0
"""Length of a block."""
BLOCKS_IN_PAST = 4
"""A past has room for at least so many blocks; in a short one, blocks are shorter."""
SHORTEST_S = 1.0
"""A node that is there stays for at least so long."""


def draw_future(
    past: PoolPast,
    present: Mapping[Node, float],
    seconds: float,
    rng: np.random.Generator,
    grid_s: float = 0.0,
) -> Trace:
    """Draw a future of `seconds` seconds. `present` has the nodes that are there now and when each one joined.

    With `grid_s`, nodes join and leave at multiples of this time after now: there are fewer events to replay.
    """
    now, end = past.now, past.now + seconds
    block_s = min(BLOCK_S, past.trace.window.seconds / BLOCKS_IN_PAST)
    ends = past.ends(rng)
    nodes = tuple(dict.fromkeys((*present, *past.trace.nodes)))
    index = {node: place for place, node in enumerate(nodes)}
    here = np.fromiter((now - since for since in present.values()), np.float64, len(present))
    begun = past.like(now, len(present), block_s, rng)
    leave = now + np.maximum(_stays(past, here, ends, begun, rng), SHORTEST_S)
    busy = _FutureMachine(len(nodes), leave)
    home = np.array([index[node] for node in past.trace.nodes], dtype=np.int64)
    at = now
    while begun is not None and at < end:
        block = block_of(past, begun, min(block_s, end - at))
        lives = ends[block.rows] - past.trace.start[block.rows]
        busy.join(at + block.after_s, lives, home[past.trace.node[block.rows]])
        at += block_s
        begun = past.like(at, busy.size(at), block_s, rng)
    node, start, until = busy.fragments(len(present), now)
    if grid_s > 0:
        # To the nearest multiple: the pool has the same size on average. Short fragments may vanish.
        start, until = (now + np.rint((times - now) / grid_s) * grid_s for times in (start, until))
    kept = (until > start) & (start < end)
    node, start, until = node[kept], start[kept], until[kept]
    return Trace.build(nodes, node, start, np.minimum(until, end), until > end, Window(now, end))


def _stays(past: PoolPast, ages: Floats, ends: Floats, moment: float | None, rng: np.random.Generator) -> Floats:
    """How long each present node still stays, from what became of the pool after a moment of the past."""
    if moment is not None:
        rows = np.flatnonzero((past.trace.start <= moment) & (ends > moment))
        if len(rows) and len(ages):
            left = (ends[rows] - moment)[np.argsort(past.trace.start[rows], kind="stable")]
            place = (np.arange(len(ages)) + rng.random()) * (len(rows) / len(ages))
            stays = np.empty(len(ages))
            stays[np.argsort(-ages, kind="stable")] = left[np.minimum(place.astype(np.int64), len(rows) - 1)]
            return stays
    return past.lives_after(ages, rng) - ages


class _FutureMachine:
    """The nodes of a future: which are idle until when. A node that joins twice at a time is replaced by another."""

    def __init__(self, nodes: int, present: Floats) -> None:
        """The first nodes are `present`, until these times."""
        self._until = np.full(nodes, -np.inf)
        self._until[: len(present)] = present
        self._rows: list[tuple[int, float, float]] = [(place, -np.inf, end) for place, end in enumerate(present)]

    def join(self, starts: Floats, lives: Floats, homes: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Let nodes join, each on its own node or another one that is free; where none is free, it does not join."""
        until = self._until
        for start, life, home in zip(starts.tolist(), lives.tolist(), homes.tolist(), strict=True):
            place = home
            if until[place] >= start:
                place = int(until.argmin())
                if until[place] >= start:
                    continue
            until[place] = start + life
            self._rows.append((place, start, start + life))

    def size(self, time: float) -> int:
        """How many nodes are there at a time."""
        return sum(start <= time < end for _, start, end in self._rows)

    def fragments(self, present: int, now: float) -> tuple[Floats, Floats, Floats]:
        """The columns of a trace: node, start and end. The first rows are the present nodes."""
        node, start, end = np.array(self._rows, dtype=np.float64).reshape(-1, 3).T
        start[:present] = now
        return node, start, end
