"""Estimates: a point, an 80 % interval and the probability of a deadline, from samples of finishing times."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bftrainer.core.trace import Floats

LOW, HIGH = 0.1, 0.9
"""The interval holds 80 % of the finishing times."""
SPREAD = 1.0
"""Samples are spread by this factor around their median, on a logarithmic scale. `benchmarks/eta.py` fits it on the
first week of the Summit trace, where 80 % of the intervals hold without a correction."""


@dataclass(frozen=True, slots=True)
class FinishEstimate:
    """When something will be done, in seconds from now. Infinite: later than the futures reach."""

    point_s: float
    low_s: float
    high_s: float
    samples: tuple[float, ...]
    """All samples, in order, with the spread."""

    @classmethod
    def of(cls, times: Floats, now: float, spread: float = SPREAD) -> FinishEstimate | None:
        """The estimate from samples of finishing times; None without samples."""
        if not len(times):
            return None
        left = np.sort(np.maximum(times - now, 0.0))
        middle = _quantile(left, 0.5)
        if 0 < middle < math.inf:
            left = middle * (left / middle) ** spread
        return cls(middle, _quantile(left, LOW), _quantile(left, HIGH), tuple(left.tolist()))

    def within(self, seconds: float) -> float:
        """Probability of being done in this time."""
        return sum(sample <= seconds for sample in self.samples) / len(self.samples)


def _quantile(ordered: Floats, share: float) -> float:
    """The value below which a share of the distribution lies that the samples were drawn from."""
    place = min(max(share * (len(ordered) + 1) - 1, 0.0), len(ordered) - 1.0)
    low, high = float(ordered[math.floor(place)]), float(ordered[math.ceil(place)])
    rest = place - math.floor(place)
    return low if rest == 0 or low == high else low + rest * (high - low)
