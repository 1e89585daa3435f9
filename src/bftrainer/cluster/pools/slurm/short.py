"""The short-pilot rule decides when a Slurm pilot should be short.

A pilot that keeps waiting for an idle node does not fit before a job that Slurm plans there. For a while the pilots of
that node are then submitted with a time that may be cut down (`time_min`). The rule has no clock.
"""

from __future__ import annotations

from collections.abc import Collection

from bftrainer.cluster.pools.slurm.decide import Pilot

AFTER_S = 15.0
"""Seconds of waiting after which a pilot is taken not to fit."""
FOR_S = 900.0


class Shortening:
    """Records since when pilots wait, and the nodes whose pilots must be short."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        """Time since when a pilot waits, by job."""
        self._until: dict[str, float] = {}
        """Time until when pilots must be short, by node."""

    def waits(self, pilot: Pilot, now: float) -> bool:
        """Record that a pilot waits for an idle node. Returns whether a short one should replace it."""
        since = self._since.setdefault(pilot.job, now)
        if now - since < AFTER_S or pilot.node in self._until:
            return False  # a waiting short pilot is given up after `join_s`
        self._until[pilot.node] = now + FOR_S
        return True

    def keep(self, jobs: Collection[int]) -> None:
        """Forget all pilots except these."""
        self._since = {job: since for job, since in self._since.items() if job in jobs}

    def is_short(self, node: str, now: float) -> bool:
        """Return whether the next pilot of a node must be short."""
        until = self._until.get(node)
        if until is not None and until <= now:
            del self._until[node]
        return node in self._until
