"""Counts groups that break again and again although no member was lost.

A peer that dies breaks a group once, and the next generation has no such peer. A group that breaks several times in a
row, with all its members alive and no step in between, will never work: a network that does not connect its nodes, a
backend that cannot start. `Job` and `local.Coordinator` tell this class what happens and fail when it says why.
"""

from __future__ import annotations

LEAST_S = 3.0
"""A row must last so long: the report of a step that was made in between may be that late."""


class Breaks:
    """The row of broken generations of one job. `most` of them in a row are one too many."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._count = self._generation = 0
        self._reason = ""
        self._since = 0.0
        self._far = self._far_before = 0

    def broke(self, generation: int, reason: str, now: float) -> None:
        """A member says that the group of a generation broke. Others of the same generation may say so too."""
        if generation <= self._generation and self._count:
            return
        if not self._count:
            self._since, self._far_before = now, self._far
        self._count += 1
        self._generation, self._reason = generation, reason

    def reported(self, step: int, samples: int = 0) -> None:
        """A member is so far. If it is farther than any before the row, the row ends: the group does work."""
        self._far = max(self._far, step + samples)
        if self._count and self._far > self._far_before:
            self._count = 0

    def lost(self) -> None:
        """A member was lost: that may be why the group broke. The next members may begin at an earlier step."""
        self._count = self._far = 0

    def shift(self, seconds: float) -> None:
        """The clock was set: the row began so much later."""
        self._since += seconds

    def verdict(self, now: float) -> str:
        """Why the job cannot go on, in one sentence; empty as long as it may."""
        if self._count < self.most or now - self._since < LEAST_S:
            return ""
        reason = self._reason or "no reason was given"
        return (
            f"the group broke {self._count} times in a row (last in generation {self._generation}), though no member "
            f"was lost and no step was made in between: {reason}. Check that the nodes can reach each other, and the "
            "workers' logs"
        )
