"""Exponential back-off as a value: how long to wait after so many failures. It neither sleeps nor reads a clock."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double with every failure in a row, from the first wait up to the longest one."""

    first_s: float
    longest_s: float = math.inf

    def wait_s(self, failures: int) -> float:
        """Return the seconds to wait after `failures` failures in a row. The first failure costs the first wait."""
        return min(self.first_s * 2.0 ** min(max(failures - 1, 0), 60), self.longest_s)
