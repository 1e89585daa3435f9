"""A scaling curve from few measured sizes: what `learning` takes a trainer's rate at the others to be.

Measured sizes are believed. The others are taken for somewhat better than likely, so that they are tried and then
known; what a try costs is weighed by the scheduler, as any rescale is. The rules, for a trainer without a prior:

- Nothing measured: on its fewest nodes twice what others do on theirs, and from there with the square root of the size.
  So a newcomer gets its fewest nodes soon, takes all that is free, shares evenly with other newcomers, and takes little
  from those who are known.
- Between two measured sizes: Amdahl's law through both, a straight line where the rate falls.
- Above the largest: Amdahl's law fitted to what was measured up to the best size (through one size: linear), and 5 %
  more from half as many again on; beyond the double no more than the square root. After a fall: flat.
- Below the smallest: the same law; where that is the best so far, with the square root of the size.
- The rate rises to a peak and falls after it. So where it is not known on which side of the best measured size the peak
  lies, one size in the gap beside it, or the half of the smallest, is taken for 5 % better than the best. It is never
  taken for better than linear in a smaller size, so that a trainer that scales well is left in peace.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from bftrainer.core.curve import Curve

MOST_POINTS = 32
BONUS = 1.05
"""How much better than the best an untried size is taken to be."""
NEWCOMER = 2.0
"""How much better than the others a trainer of which nothing is known is taken to be. Seconds later it is known."""
_WIDE = 1.5
"""Sizes further apart than by this factor have something untried between them."""
_REACH = 2
"""So many times the largest measured size is believed to scale as what was measured."""


def sizes_between(least: int, most: int, measured: Mapping[int, float]) -> list[int]:
    """The sizes at which a curve has points: all, or if they are many a few that tell the rest."""
    if most - least < MOST_POINTS:
        return list(range(least, most + 1))
    sizes = {least, most, *(2**k for k in range(least.bit_length(), most.bit_length()))}
    best = max(measured, key=lambda size: measured[size], default=least)
    tries = _untried(sorted(measured), measured, least) if measured else []
    kept = {least, most, best, *tries}
    points = sorted(n for n in sizes | set(measured) | kept if least <= n <= most)
    while len(points) > MOST_POINTS:  # leave out what lies closest between its neighbours
        inner = [i for i in range(1, len(points) - 1) if points[i] not in kept]
        del points[min(inner, key=lambda i: points[i + 1] / points[i - 1])]
    return points


def guessed(sizes: Sequence[int], rate_per_node: float) -> list[float]:
    """The rates of a trainer of which nothing is known; `rate_per_node` is what others do."""
    return [NEWCOMER * rate_per_node * math.sqrt(sizes[0] * n) for n in sizes]


def rescaled_prior(prior: Curve, measured: Mapping[int, float], sizes: Sequence[int]) -> list[float] | None:
    """The prior, times what was measured over what it says there; None if it says nothing of use.

    The factor is that of the nearest measured size, between two of them on a line.
    """
    if prior.rate(sizes[0]) <= 0:
        return None
    ratios = {n: rate / prior.rate(n) for n, rate in measured.items() if prior.rate(n) > 0}
    factors = np.interp(sizes, list(ratios), list(ratios.values())) if ratios else np.ones(len(sizes))
    rates = prior.at(sizes) * factors
    return [measured.get(n, float(rate)) for n, rate in zip(sizes, rates, strict=True)]


def fitted(measured: Mapping[int, float], sizes: Sequence[int], *, curious: bool = True) -> list[float]:
    """The rates at `sizes`, where some were measured. `curious`: sizes that may be better than the best are tried."""
    known = sorted(measured)
    best = max(known, key=lambda size: measured[size])
    serial, parallel = _amdahl([(n, measured[n]) for n in known if n <= best])

    def law(n: int, through: int) -> float:
        return measured[through] * (serial + parallel / through) / (serial + parallel / n)

    def above(n: int) -> float:
        last = known[-1]
        if last != best:
            return measured[last]
        top = last * _REACH
        rate = law(n, last) if n <= top else min(law(n, last), law(top, last) * math.sqrt(n / top))
        return rate * BONUS if len(known) > 1 and n >= _WIDE * last else rate

    def rate(n: int) -> float:
        if n in measured:
            return measured[n]
        place = bisect_left(known, n)
        if place == len(known):
            return above(n)
        if place == 0:
            return law(n, known[0]) if known[0] != best else measured[best] * math.sqrt(n / best)
        return _between(n, known[place - 1], known[place], measured)

    tries = set(_untried(known, measured, sizes[0])) if curious else set()
    return [_at_best(n, known, measured, rate(n)) if n in tries else rate(n) for n in sizes]


def _amdahl(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Amdahl's law, 1/rate = serial + parallel/n with neither below 0, of the least squares of relative errors."""
    rates = np.array([rate for _, rate in points])
    shares = np.array([rate / n for n, rate in points])
    if len(points) > 1:
        (serial, parallel), *_ = np.linalg.lstsq(np.column_stack([rates, shares]), np.ones(len(points)), rcond=None)
        if serial >= 0 and parallel >= 0:
            return float(serial), float(parallel)
        if parallel < 0:
            return float(rates.sum() / (rates @ rates)), 0.0
    return 0.0, float(shares.sum() / (shares @ shares))


def _between(n: int, low: int, high: int, measured: Mapping[int, float]) -> float:
    """The rate at a size between two neighbouring measured ones."""
    a, b = measured[low], measured[high]
    line = a + (b - a) * (n - low) / (high - low)
    if b <= a:
        return line
    parallel = (1 / a - 1 / b) / (1 / low - 1 / high)
    return max(line, 1 / (1 / a + parallel * (1 / n - 1 / low)))


def _untried(known: Sequence[int], measured: Mapping[int, float], least: int) -> Iterator[int]:
    """The sizes that may be better than the best measured one, one in each gap beside it."""
    place = max(range(len(known)), key=lambda i: measured[known[i]])
    best = known[place]
    if place == 0 and best > _WIDE * least:
        yield max(least, (best + 1) // 2)
    gaps = [known[i : i + 2] for i in (place - 1, place) if 0 <= i < len(known) - 1]
    for low, high in gaps:
        middle = round(math.sqrt(low * high))
        if high > _WIDE * low and low < middle < high:
            yield middle


def _at_best(n: int, known: Sequence[int], measured: Mapping[int, float], likely: float) -> float:
    """What an untried size may be worth: more than the best, but not more than linear in the next smaller one."""
    place = bisect_left(known, n)
    hoped = BONUS * max(measured.values())
    if place > 0:
        hoped = min(hoped, measured[known[place - 1]] * n / known[place - 1])
    return max(likely, hoped)
