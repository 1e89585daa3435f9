"""Runs of counts on which a claim's gain is linear, and faster operations on them.

The `exact` allocator uses them on large problems. A claim has few runs: stop, stay, and the pieces of its curve below
and above its current size. `promising` drops the counts that can be in no optimal plan; `slide` processes a whole run
at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bftrainer.allocate.problem import Claim, Floats

_PRICE_STEPS = 30
_ROUNDING = 1e-9
_NARROW = 4
"""Counts up to which a run is tried count by count."""
_TIE = 1e-13
"""Bonus for staying at the current count, relative to all values and costs added up, to break ties. More than rounding
errors, less than 1e-9 of the objective even with a thousand trainers."""

Counts = npt.NDArray[np.int64]


class CountRange(NamedTuple):
    """Counts `first` to `last`; the gain is `gain` at the first and changes by `slope` per node."""

    first: int
    last: int
    gain: float
    slope: float


def runs_of(claim: Claim, pool: int, horizon_s: float, bonus: float = 0.0) -> list[CountRange]:
    """The runs of one claim, by rising count. Staying at the current count adds `bonus`."""
    curve, running, least, top = claim.value, claim.running, claim.min_nodes, min(claim.max_nodes, pool)
    down, grown_s = claim.down_s * curve.rate(running), claim.with_new_nodes_s(horizon_s)
    runs = [CountRange(0, 0, -down if running else bonus, 0.0)]
    # Below, at and above the current size the cost of rescaling and the time that counts differ.
    parts = (
        (least, running - 1, horizon_s, down),
        (running, running, horizon_s, -bonus),
        (running + 1, top, grown_s, claim.growth_cost(horizon_s)),
    )
    for first, high, seconds, cost in parts:
        first, last = max(first, least), min(high, top)
        if first > last:
            continue
        gain = seconds * curve.rate(first) - cost
        if first == last:
            runs.append(CountRange(first, last, gain, 0.0))
            continue
        for corner, rate in zip(curve.nodes, curve.rates, strict=True):
            if first < corner < last:
                there = seconds * rate - cost
                runs.append(CountRange(first, corner, gain, (there - gain) / (corner - first)))
                first, gain = corner, there
        there = seconds * curve.rate(last) - cost
        runs.append(CountRange(first, last, gain, (there - gain) / (last - first)))
    return runs


def slide(run: CountRange, following: Floats) -> Floats:
    """The maximum over n in the run of gain(n) + following[b−n], for every budget b from the run's first count on."""
    reach = following[: len(following) - run.first]
    width = min(run.last - run.first + 1, len(reach))
    if width == 1:
        return reach + run.gain
    # With m = b−n: gain(n) + following[m] = gain(first) + slope·(b−first) + (following[m] − slope·m).
    ramp = run.slope * np.arange(len(reach))
    window = np.full(width - 1 + len(reach), -np.inf)
    np.subtract(reach, ramp, out=window[width - 1 :])
    covered = 1
    while covered < width:  # each pass doubles the span whose maximum a cell holds
        shift = min(covered, width - covered)
        window = np.maximum(window[shift:], window[:-shift])
        covered += shift
    window += ramp
    window += run.gain
    return window


def step(choice: list[CountRange], following: Floats) -> Floats:
    """best_j computed from best_{j+1} for one claim's runs."""
    best = np.full(len(following), -np.inf)
    for run in choice:
        if run.last - run.first < _NARROW:
            for step, count in enumerate(range(run.first, min(run.last, len(best) - 1) + 1)):
                found = following[: len(best) - count] + (run.gain + run.slope * step)
                np.maximum(best[count:], found, out=best[count:])
        elif run.first < len(best):
            np.maximum(best[run.first :], slide(run, following), out=best[run.first :])
    return best


def most_of_the_best(choice: list[CountRange], following: Floats, left: int, tie: float) -> int:
    """The largest of the counts whose gain, with what follows, is the best."""
    tried: list[tuple[int, Floats]] = []
    for run in choice:
        last = min(run.last, left)
        if last >= run.first:
            gains = run.gain + run.slope * np.arange(last - run.first + 1)
            tried.append((run.first, following[left - last : left - run.first + 1][::-1] + gains))
    enough = max(float(value.max()) for _, value in tried) - tie
    best = [first + int(good[-1]) for first, value in tried if len(good := np.flatnonzero(value >= enough))]
    return max(best)


def tie_of(claims: Sequence[Claim], horizon_s: float) -> float:
    """The bonus for staying at the current count, given the magnitude of the numbers that are added up."""
    at_stake = sum(
        max(claim.value.rates) * horizon_s
        + claim.value.rate(claim.running) * max(claim.up_s, claim.down_s, min(claim.start_s, horizon_s))
        for claim in claims
    )
    return _TIE * at_stake or 1.0


def promising(claims: list[list[CountRange]], pool: int) -> list[list[CountRange]]:
    """The runs cut to the counts that may be in an optimal plan.

    At a price λ per node no plan gains more than Σ_j max_n (gain_j(n) − λn) + λ·pool. A count that falls short of the
    best of its claim at that price by more than this bound exceeds a plan in hand is in no optimal plan.
    """
    if not claims:
        return []
    table = _Table(claims)
    price, bound, in_hand = table.bounds(pool)
    rounding = _ROUNDING * (abs(bound) + float(np.abs(table.gain).max()) + float(np.abs(table.end).max()))
    floor = table.best_at(price)[table.owner] - (bound - in_hand + rounding)
    # gain(n) − λn ≥ floor is a linear condition on n, so what is left of a run is a run.
    above_first = table.gain - price * table.first - floor
    above_last = table.end - price * table.last - floor
    tilt = np.abs(table.slope - price)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(tilt > 0, np.maximum(above_first, above_last) / tilt, 0.0)
    width = np.floor(np.minimum(steps, table.last - table.first)).astype(np.int64)
    first = np.where(above_first < 0, table.last - width, table.first)
    last = np.where(above_last < 0, table.first + width, table.last)
    kept: list[list[CountRange]] = [[] for _ in claims]
    for i in np.flatnonzero((above_first >= 0) | (above_last >= 0)).tolist():
        a, b, slope = int(first[i]), int(last[i]), float(table.slope[i])
        gain = float(table.gain[i]) + slope * (a - int(table.first[i]))
        kept[table.owner[i]].append(CountRange(a, b, gain, slope if b > a else 0.0))
    return kept


class _Table:
    """The runs of all claims as columns. At any price the best count of a claim is the end of a run."""

    def __init__(self, claims: list[list[CountRange]]) -> None:
        sizes = [len(runs) for runs in claims]
        columns = np.array([run for runs in claims for run in runs])
        self.first: Counts = columns[:, 0].astype(np.int64)
        self.last: Counts = columns[:, 1].astype(np.int64)
        self.gain: Floats = columns[:, 2]
        self.slope: Floats = columns[:, 3]
        self.end: Floats = self.gain + self.slope * (self.last - self.first)
        self.starts = np.cumsum([0, *sizes[:-1]])
        self.owner = np.repeat(np.arange(len(claims)), sizes)

    def best_at(self, price: float) -> Floats:
        """For each claim, the most of gain − price·n."""
        ends = np.maximum(self.gain - price * self.first, self.end - price * self.last)
        best: Floats = np.maximum.reduceat(ends, self.starts)
        return best

    def demand(self, price: float, *, most: bool) -> Counts:
        """For each claim, the least (or the most) of the counts that are best at a price."""
        at_first, at_last = self.gain - price * self.first, self.end - price * self.last
        best = np.maximum.reduceat(np.maximum(at_first, at_last), self.starts)[self.owner]
        if most:
            counts = np.where(at_last >= best, self.last, np.where(at_first >= best, self.first, -1))
            demanded: Counts = np.maximum.reduceat(counts, self.starts)
        else:
            counts = np.where(at_first >= best, self.first, np.where(at_last >= best, self.last, _NEVER))
            demanded = np.minimum.reduceat(counts, self.starts)
        return demanded

    def bounds(self, pool: int) -> tuple[float, float, float]:
        """The price at which the bound is least (demand meets the pool), that bound, and the gain of a good plan."""
        wanted = self.demand(0.0, most=False)
        if wanted.sum() <= pool:
            total = float(self.best_at(0.0).sum())
            return 0.0, total, total
        low, high = 0.0, float(((self.end - self.gain.min()) / np.maximum(self.last, 1)).max()) + 1.0
        for _ in range(_PRICE_STEPS):
            middle = (low + high) / 2
            if self.demand(middle, most=False).sum() <= pool:
                high = middle
            else:
                low = middle
        bound, price = min((float(self.best_at(p).sum()) + p * pool, p) for p in (low, high))
        plan = self._plan(low, high, pool)
        return price, bound, float(self._gain_of(plan).sum())

    def _plan(self, low: float, high: float, pool: int) -> Counts:
        """A good plan that fits the pool.

        The demand at the higher price fits. Claims in turn get their demand at the lower price while that fits, and
        then, best first, the remaining nodes.
        """
        plan = self.demand(high, most=False)
        left = pool - int(plan.sum())
        more = self.demand(low, most=True) - plan
        for j in np.flatnonzero(more > 0).tolist():
            if more[j] <= left:
                left -= int(more[j])
                plan[j] += more[j]
        while left > 0:
            now = plan[self.owner]
            reached = np.minimum(self.last, now + left)
            gains = self.gain + self.slope * (reached - self.first) - self._gain_of(plan)[self.owner]
            gains[(reached <= now) | (reached < self.first)] = 0.0
            best = int(gains.argmax())
            if gains[best] <= 0:
                break
            left -= int(reached[best] - now[best])
            plan[self.owner[best]] = reached[best]
        return plan

    def _gain_of(self, plan: Counts) -> Floats:
        """The gain of each claim at its count in a plan."""
        counts = plan[self.owner]
        inside = (self.first <= counts) & (counts <= self.last)
        gains = np.where(inside, self.gain + self.slope * (counts - self.first), -np.inf)
        gain: Floats = np.maximum.reduceat(gains, self.starts)
        return gain


_NEVER = np.iinfo(np.int64).max
