"""Futures of a pool, drawn from its past: traces that begin with the present nodes and go on as the past did.

A future is made of blocks of the past. For each block, a moment of the past is drawn that resembles the one reached: a
similar time of day, a pool of similar size, and as many nodes that have been there for long. The nodes that joined in
the block that followed it join in the future, and each stays as long as it did. The present nodes share the fate of
those that were there at the first such moment: in the order of their ages, so that nodes that came together go
together.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bftrainer.core.pool import Node
from bftrainer.core.trace import Floats, Trace, Window
from bftrainer.forecast.past import OLD_S, Draw, PoolMoment, PoolPast, block_of

BLOCK_S = 12 * 3600.0
"""Length of a block."""
LEAST_S = 3 * 3600.0
"""A block that reaches the end of the past may be as short as this: so the last hours can be part of a future."""
FINE_STEPS, MOST_DOUBLED = 24, 4
"""After so many steps of a grid its step doubles, and again whenever the time from now has doubled, up to so often."""
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
    first: Draw | None = None,
) -> Trace:
    """Draw a future of `seconds` seconds. `present` has the nodes that are there now and when each one joined.

    With `grid_s`, nodes join and leave at multiples of this time after now, and later at multiples of a longer time:
    there are fewer events to replay. `first` says which moment of the past the future begins like; None: a random one.
    """
    now, end = past.now, past.now + seconds
    block_s = min(BLOCK_S, past.trace.window.seconds / BLOCKS_IN_PAST)
    least_s = min(LEAST_S, block_s)
    ends = past.ends(rng)
    nodes = tuple(dict.fromkeys((*present, *past.trace.nodes)))
    index = {node: place for place, node in enumerate(nodes)}
    here = np.fromiter((now - since for since in present.values()), np.float64, len(present))
    moment = PoolMoment(now, len(present), int((here >= OLD_S).sum()))
    begun = past.like(moment, least_s, first or Draw(rng.random(), block_s))
    leave = now + np.maximum(_stays(past, here, ends, begun, rng), SHORTEST_S)
    busy = _FutureMachine(len(nodes), now - here, leave)
    home = np.array([index[node] for node in past.trace.nodes], dtype=np.int64)
    at = now
    while begun is not None and at < end:
        length_s = min(block_s, past.now - begun)
        block = block_of(past, begun, min(length_s, end - at))
        lives = ends[block.rows] - past.trace.start[block.rows]
        start, until = _on_grid(at + block.after_s, now, grid_s), _on_grid(at + block.after_s + lives, now, grid_s)
        kept = until > start
        busy.join(start[kept], until[kept], home[past.trace.node[block.rows[kept]]])
        at += length_s
        begun = past.like(busy.moment(at), least_s, Draw(rng.random(), block_s))
    node, start, until = busy.fragments(len(present), now)
    until[: len(present)] = _on_grid(until[: len(present)], now, grid_s)
    kept = (until > start) & (start < end)
    node, start, until = node[kept], start[kept], until[kept]
    return Trace.build(nodes, node, start, np.minimum(until, end), until > end, Window(now, end))


def _on_grid(times: Floats, now: float, grid_s: float) -> Floats:
    """The nearest multiples of a step after now: the pool has the same size on average. Short fragments may vanish."""
    if grid_s <= 0:
        return times
    after = times - now
    fine_s = FINE_STEPS * grid_s
    doubled = np.ceil(np.log2(np.maximum(after, fine_s) / fine_s))
    step_s = grid_s * 2.0 ** np.minimum(doubled, MOST_DOUBLED)
    return np.asarray(now + np.rint(after / step_s) * step_s, dtype=np.float64)


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

    def __init__(self, nodes: int, since: Floats, present: Floats) -> None:
        """The first nodes are `present`, until these times."""
        self._until = np.full(nodes, -np.inf)
        self._until[: len(present)] = present
        self._rows: list[tuple[int, float, float]] = list(
            zip(range(len(present)), since.tolist(), present.tolist(), strict=True)
        )

    def join(self, starts: Floats, ends: Floats, homes: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Let nodes join, each on its own node or another one that is free; where none is free, it does not join."""
        until = self._until
        for start, end, home in zip(starts.tolist(), ends.tolist(), homes.tolist(), strict=True):
            place = home
            if until[place] >= start:
                place = int(until.argmin())
                if until[place] >= start:
                    continue
            until[place] = end
            self._rows.append((place, start, end))

    def moment(self, time: float) -> PoolMoment:
        """The pool at a time."""
        _, start, end = np.array(self._rows, dtype=np.float64).reshape(-1, 3).T
        here = (start <= time) & (time < end)
        return PoolMoment(time, int(here.sum()), int((here & (start <= time - OLD_S)).sum()))

    def fragments(self, present: int, now: float) -> tuple[Floats, Floats, Floats]:
        """The columns of a trace: node, start and end. The first rows are the present nodes."""
        node, start, end = np.array(self._rows, dtype=np.float64).reshape(-1, 3).T
        start[:present] = now
        return node, start, end
