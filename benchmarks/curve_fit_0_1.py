"""The curve fit of version 0.1.0, for comparison (`learning_0_1.py`): a curve from a few measured sizes.

Measured rates are used as they are. Other sizes are estimated somewhat better than likely, so that they are tried and
then measured. The rules:

- Between two measured sizes: Amdahl's law through both, or a straight line where the rate falls.
- Above the largest measured size: Amdahl's law fitted to the rates measured up to the best size (with one size:
  linear), plus 5 % from 1.5 times the largest size on. Beyond twice the largest size, growth is at most the square
  root. If the largest size is not the best one: flat.
- Below the smallest measured size: the same law. If the smallest size is the best so far: the square root of the size.
- The rate rises to a peak and then falls. Where it is unknown on which side of the best measured size the peak lies,
  one size in the gap beside it, or half the smallest size, is estimated 5 % above the best rate. This estimate never
  exceeds linear scaling from a smaller size, so a trainer that scales well is not disturbed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

MOST_POINTS = 32
BONUS = 1.05
"""The factor by which an untried size is estimated above the best rate."""
_WIDE = 1.5
"""Two measured sizes further apart than this factor have an untried size between them."""
_REACH = 2
"""The measured law is believed up to this many times the largest measured size."""


def sizes_between(least: int, most: int, measured: Mapping[int, float]) -> list[int]:
    """Return the sizes at which a curve has points: all sizes, or a selection if there are many."""
    if most - least < MOST_POINTS:
        return list(range(least, most + 1))
    sizes = {least, most, *(2**k for k in range(least.bit_length(), most.bit_length()))}
    best = max(measured, key=lambda size: measured[size], default=least)
    tries = _untried(sorted(measured), measured, least) if measured else []
    kept = {least, most, best, *tries}
    points = sorted(n for n in sizes | set(measured) | kept if least <= n <= most)
    while len(points) > MOST_POINTS:  # leave out the point with the closest neighbours
        inner = [i for i in range(1, len(points) - 1) if points[i] not in kept]
        del points[min(inner, key=lambda i: points[i + 1] / points[i - 1])]
    return points


def fitted(measured: Mapping[int, float], sizes: Sequence[int], *, curious: bool = True) -> list[float]:
    """Return the rates at `sizes` from the measured ones.

    `curious`: sizes that may be better than the best measured one are estimated high enough to be tried.
    """
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
    """Fit Amdahl's law, 1/rate = serial + parallel/n with neither below 0, by least squares of relative errors."""
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
    """Return the rate at a size between two neighbouring measured sizes."""
    a, b = measured[low], measured[high]
    line = a + (b - a) * (n - low) / (high - low)
    if b <= a:
        return line
    parallel = (1 / a - 1 / b) / (1 / low - 1 / high)
    return max(line, 1 / (1 / a + parallel * (1 / n - 1 / low)))


def _untried(known: Sequence[int], measured: Mapping[int, float], least: int) -> Iterator[int]:
    """Yield the sizes that may be better than the best measured one: one size in each gap beside it."""
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
    """Return the hoped-for rate of an untried size: above the best, but at most linear from the next smaller size."""
    place = bisect_left(known, n)
    hoped = BONUS * max(measured.values())
    if place > 0:
        hoped = min(hoped, measured[known[place - 1]] * n / known[place - 1])
    return max(likely, hoped)
