"""The CPU budget of predictions: together they use at most a share of one core over time.

The budget is a value. Time that passes adds to it, up to a limit; measured CPU seconds are taken from it, and may make
it negative. Regular predictions wait until it is positive. A user's question may use up to `MOST_DEBT_S` in advance.
So over any time, all of them use at most the share of it, and a constant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MOST_SAVED_S = 20.0
"""CPU seconds that can be saved for later."""
MOST_DEBT_S = 10.0
"""CPU seconds that users' questions may use in advance."""


@dataclass(frozen=True, slots=True)
class CpuBudget:
    """CPU seconds that may be used, at a time of a clock that never goes back."""

    share: float
    """CPU seconds per second."""
    saved_s: float
    at: float
    spent_s: float = 0.0
    """CPU seconds that were used in all."""

    def later(self, now: float) -> CpuBudget:
        """The budget at a later time."""
        earned = self.share * max(now - self.at, 0.0)
        return replace(self, saved_s=min(self.saved_s + earned, MOST_SAVED_S), at=max(now, self.at))

    def spend(self, cpu_s: float) -> CpuBudget:
        """The budget after a computation that used so much."""
        return replace(self, saved_s=self.saved_s - cpu_s, spent_s=self.spent_s + cpu_s)

    def wait_s(self, debt_s: float = 0.0) -> float:
        """How long to wait until a computation may begin that may use up to `debt_s` in advance; 0: it may now."""
        missing = -debt_s - self.saved_s
        return max(missing, 0.0) / self.share if self.share > 0 else float("inf")
