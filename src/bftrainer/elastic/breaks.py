"""Break counter: detects groups that keep breaking, although no member was lost.

A peer that dies breaks a group once, and the next generation no longer contains that peer. A group that breaks several
times in a row, with all members alive and no step in between, will never work: the network does not connect its nodes,
or a backend cannot start. `manager/workers.py` reports events to `Breaks`; the manager fails the job when `verdict`
returns a reason.
"""

from __future__ import annotations

LEAST_S = 3.0
"""Seconds that a row of broken generations must last: the report of a step made in between may be that late."""


class Breaks:
    """Consecutive broken generations of one job. The job may not continue after `most` of them in a row."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._count = self._generation = 0
        self._reason = ""
        self._since = 0.0
        self._far = self._far_before = 0

    def broke(self, generation: int, reason: str, now: float) -> None:
        """Record a member's report that the group of a generation broke. A generation counts once."""
        if generation <= self._generation and self._count:
            return
        if not self._count:
            self._since, self._far_before = now, self._far
        self._count += 1
        self._generation, self._reason = generation, reason

    def reported(self, step: int, samples: int = 0) -> None:
        """Record a member's progress. New progress since the row began ends the row: the group does work."""
        self._far = max(self._far, step + samples)
        if self._count and self._far > self._far_before:
            self._count = 0

    def lost(self) -> None:
        """Forget the row after a member was lost: that may be why the group broke.

        The next members may begin at an earlier step.
        """
        self._count = self._far = 0

    def shift(self, seconds: float) -> None:
        """Correct the start of the row by `seconds` after the clock was set."""
        self._since += seconds

    def verdict(self, now: float) -> str:
        """Return why the job cannot go on, in one sentence; empty as long as it can."""
        if self._count < self.most or now - self._since < LEAST_S:
            return ""
        reason = self._reason or "no reason was given"
        return (
            f"the group broke {self._count} times in a row (last in generation {self._generation}), though no member "
            f"was lost and no step was made in between: {reason}. Check that the nodes can reach each other, and the "
            "workers' logs"
        )
