"""The past of a pool, prepared for drawing futures from it.

A trace that ends now comes in. `PoolPast` answers which moments of it resemble a given one, which nodes joined in a
block of it and for how long, and how long nodes that have been there for some time stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bftrainer.core.trace import Floats, Trace, Window
from bftrainer.traces.synthetic.synth import synthesise

DAY_S = 86400.0
LONG_S = DAY_S
"""A past of this length tells more than a profile."""
STEP_S = 300.0
"""Distance of the moments at which blocks of the past may begin."""
MOST_MOMENTS = 20_000
HOUR_SIGMA, SIZE_SIGMA, OLD_SIGMA = 3.0, 0.8, 1.0
"""A moment of the past resembles another one if the time of day is the same within 3 hours, the logarithm of the size
of the pool within 0.8, and that of the number of its old nodes within 1 (standard deviations of bell curves)."""
OLD_S = 3 * 3600.0
"""A node that has been there for so long is old."""
OTHER_HOURS = 1.0
"""Weight of moments at any other time of day. Those at the same time have this weight and 1."""
RECENT_S = 4 * DAY_S
"""The weight of moments falls by a factor of e with every so many seconds that they lie back."""


@dataclass(frozen=True, slots=True)
class PoolMoment:
    """A moment, as far as it depends on it which others resemble it."""

    time: float
    size: int
    """Number of nodes in the pool."""
    old: int
    """How many of them are old."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Says which one to draw of the moments that resemble one. They are sorted by the pool in the time after them."""

    share: float
    """Share of them that are left out: 0 is the moment with the smallest pool after it."""
    ahead_s: float
    """How much of the time after them counts."""


class PoolPast:
    """A pool's past up to its `now`."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.now = trace.window.end
        self.joined = trace.start > trace.window.start
        """Fragments whose beginning was seen: those that are there from the start are no joins."""
        seen = self.joined & ~trace.open
        self.lives: Floats = np.sort(trace.lengths[seen])
        """Lengths of the fragments that were seen from beginning to end, in order."""
        step_s = max(STEP_S, trace.window.seconds / MOST_MOMENTS)
        self.moments: Floats = np.arange(trace.window.start, self.now, step_s)
        ends = np.sort(trace.end[~trace.open])
        self.sizes = _count(trace.start, ends, self.moments)
        long = trace.open | (trace.lengths > OLD_S)
        self._old = _count(trace.start[long] + OLD_S, np.sort(trace.end[long & ~trace.open]), self.moments)
        self._step_s = step_s
        self._node_steps = np.concatenate(([0.0], np.cumsum(self.sizes)))

    @property
    def is_long(self) -> bool:
        """Whether it tells more than a profile."""
        return self.trace.window.seconds >= LONG_S

    @property
    def departures(self) -> int:
        """How many nodes have left."""
        return int((~self.trace.open).sum())

    def like(self, moment: PoolMoment, least_s: float, draw: Draw) -> float | None:
        """Draw a moment of the past that resembles another one; None if the past is too short.

        At least `least_s` seconds of the past follow it.
        """
        count = int(np.searchsorted(self.moments, self.now - least_s, side="right"))
        if not count:
            return None
        moments, sizes, old = self.moments[:count], self.sizes[:count], self._old[:count]
        hours = np.abs((moments - moment.time) / 3600 % 24)
        hours = np.minimum(hours, 24 - hours)
        other_size = np.log((sizes + 1) / (moment.size + 1)) / SIZE_SIGMA
        other_ages = np.log((old + 1) / (moment.old + 1)) / OLD_SIGMA
        weight = OTHER_HOURS + np.exp(-0.5 * (hours / HOUR_SIGMA) ** 2)
        weight *= np.exp(-0.5 * (other_size**2 + other_ages**2)) + 1e-6
        weight *= np.exp((moments - self.now) / RECENT_S)
        steps = max(round(draw.ahead_s / self._step_s), 1)
        last = np.minimum(np.arange(steps, count + steps), len(self.sizes))
        mean = (self._node_steps[last] - self._node_steps[:count]) / (last - np.arange(count))
        order = np.argsort(mean, kind="stable")
        below = np.cumsum(weight[order])
        place = int(np.searchsorted(below, draw.share * below[-1], side="right"))
        return float(moments[order[min(place, count - 1)]])

    def ends(self, rng: np.random.Generator) -> Floats:
        """The end of each fragment. For those that are still there it is drawn: see `lives_after`."""
        ends = self.trace.end.copy()
        still = np.flatnonzero(self.trace.open)
        if len(still):
            ages = self.now - self.trace.start[still]
            ends[still] = self.trace.start[still] + self.lives_after(ages, rng)
        return ends

    def lives_after(self, ages: Floats, rng: np.random.Generator) -> Floats:
        """Draw how long fragments last in all that have lasted for `ages`: as one of the past that lasted longer.

        Fragments that began together end together. Where none of the past lasted longer, the rest is exponential with
        the age as its mean.
        """
        shared, group = np.unique(ages, return_inverse=True)
        first = np.searchsorted(self.lives, shared, side="right")
        longer = len(self.lives) - first
        place = first + np.floor(rng.random(len(shared)) * longer).astype(np.int64)
        lives = shared + rng.exponential(np.maximum(shared, 60.0))
        lives[longer > 0] = self.lives[place[longer > 0]]
        return np.asarray(lives[group], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Block:
    """Nodes that joined in a part of the past: rows of its trace, and seconds since the beginning of the part."""

    rows: npt.NDArray[np.int64]
    after_s: Floats


def block_of(past: PoolPast, begin: float, seconds: float) -> Block:
    """The joins in a part of the past."""
    first, last = np.searchsorted(past.trace.start, (begin, begin + seconds), side="left")
    rows = np.arange(first, last)
    rows = rows[past.joined[rows]]
    return Block(rows, past.trace.start[rows] - begin)


def steady(nodes: tuple[str, ...], now: float) -> Trace:
    """The past of a pool from which no node ever goes and which no node ever joins."""
    here = np.full(len(nodes), now - DAY_S)
    window = Window(now - DAY_S, now)
    return Trace.build(nodes, np.arange(len(nodes)), here, here + DAY_S, np.ones(len(nodes), dtype=bool), window)


def from_profile(profile: str, size: int, now: float, seed: int, days: float = 7.0) -> Trace:
    """A past of a machine like that of a profile, with a pool of about `size` nodes on average."""
    share = 0.09  # of the machine's nodes are idle on average
    nodes = min(max(round(size / share), 16), 100_000)
    return synthesise(profile, nodes=nodes, hours=days * 24, seed=seed, start=now - days * DAY_S)


def _count(starts: Floats, ends: Floats, moments: Floats) -> Floats:
    """How many of some spans of time hold each moment. Both columns are in order."""
    begun = np.searchsorted(starts, moments, side="right")
    ended = np.searchsorted(ends, moments, side="right")
    return np.asarray(begun - ended, dtype=np.float64)
