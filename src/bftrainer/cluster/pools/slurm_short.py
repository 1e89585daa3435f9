"""When a Slurm pilot had better be a short one: a rule of its own, without a clock.

A pilot that waits for an idle node does not fit before something that Slurm plans there. For a while the pilots of that
node are then submitted as ones whose time may be cut down (`time_min`).
"""

from __future__ import annotations

from collections.abc import Collection

from bftrainer.cluster.pools.slurm_watch import Pilot

AFTER_S = 15.0
"""A pilot that waits so long does not fit."""
FOR_S = 900.0


class Shortening:
    """Which pilots wait since when, and the nodes whose pilots are to be short."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        """By job."""
        self._until: dict[str, float] = {}
        """By node."""

    def waits(self, pilot: Pilot, now: float) -> bool:
        """A pilot waits for a node that is idle. Whether it shall give way to a short one."""
        since = self._since.setdefault(pilot.job, now)
        if now - since < AFTER_S or pilot.node in self._until:
            return False  # a short one is given up by `join_s`
        self._until[pilot.node] = now + FOR_S
        return True

    def keep(self, jobs: Collection[int]) -> None:
        """There are no other pilots than these."""
        self._since = {job: since for job, since in self._since.items() if job in jobs}

    def is_short(self, node: str, now: float) -> bool:
        """Whether the next pilot of a node is to be short."""
        until = self._until.get(node)
        if until is not None and until <= now:
            del self._until[node]
        return node in self._until
