"""The output budget limits how much a trainer's workers may print to the controller.

An agent sends the next piece of a worker's output when the last one was acknowledged. The `OutputWriter` asks the
budget how long to wait with that. So a worker that prints without pause is slowed down by its agent, which leaves out
what it cannot send.
"""

from __future__ import annotations

from collections.abc import Collection

BURST_S = 10.0
"""A trainer that printed little may print as much at once as its budget allows in this time."""
ALL_TRAINERS = 16
"""All trainers together may print as much as this many trainers."""
_ALL = ""


class OutputBudget:
    """Bytes and lines per second that each trainer may print, and all of them together."""

    def __init__(self, bytes_per_s: float, lines_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lines_per_s = lines_per_s
        self._paid_at: dict[str, float] = {}
        """When everything that a trainer has printed is within its budget."""

    def spend(self, trainer: str, size: int, lines: int, now: float) -> float:
        """Count output of a trainer. Returns how many seconds to wait before its next piece may come."""
        cost_s = max(size / self._bytes_per_s, lines / self._lines_per_s)
        paid = max(self._add(trainer, cost_s, now), self._add(_ALL, cost_s / ALL_TRAINERS, now))
        return max(paid - now, 0.0)

    def keep_only(self, trainers: Collection[str]) -> None:
        """Forget all other trainers."""
        for trainer in self._paid_at.keys() - set(trainers) - {_ALL}:
            del self._paid_at[trainer]

    def _add(self, name: str, cost_s: float, now: float) -> float:
        paid = self._paid_at[name] = max(self._paid_at.get(name, 0.0), now - BURST_S) + cost_s
        return paid
