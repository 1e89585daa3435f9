"""Curve points: the sizes at which a learned curve is computed, and the rates of a script of which nothing is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

MOST_POINTS = 32
"""Largest number of points of a learned curve. Between two points, which are close, a curve is nearly straight."""
NEWCOMER = 2.0
"""The factor by which a script without measurements is estimated above the others. Seconds later it is measured."""


@lru_cache(maxsize=1024)
def curve_sizes(least: int, most: int) -> tuple[int, ...]:
    """Return the sizes at which a curve has points: all from `least` to `most`, or a selection with even ratios."""
    if most - least < MOST_POINTS:
        return tuple(range(least, most + 1))
    # Small sizes are taken one by one; where the ratio to the next one is small enough, even ratios take over.
    sizes = [least]
    while sizes[-1] < most:
        last, left = sizes[-1], MOST_POINTS - len(sizes)
        ratio = (most / last) ** (1 / left)
        sizes.append(min(most, max(last + 1, round(last * ratio))))
    return tuple(sizes)


def newcomer_rates(sizes: Sequence[int], rate_per_node: float) -> list[float]:
    """Return the assumed rates of a script without measurements; `rate_per_node` is that of other trainers.

    At its smallest size it is assumed to be twice as fast as the others; from there, the rate is proportional to the
    square root of the size. So a newcomer gets its minimum soon, takes all free nodes, shares evenly with other
    newcomers, and takes little from trainers with measured rates.
    """
    return [NEWCOMER * rate_per_node * math.sqrt(sizes[0] * size) for size in sizes]
