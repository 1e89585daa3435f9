"""A formation tracks which workers of a job train together, and how long each change took.

`elastic.py` passes in the workers' `Formed` messages and losses. When the last member of a generation has formed, a
`Rescale` comes out.
"""

from __future__ import annotations

from collections.abc import Mapping

from bftrainer.cluster.jobs.progress import Rescale
from bftrainer.cluster.jobs.worker import Worker
from bftrainer.elastic.protocol import Formed, Generation


class Formation:
    """The workers that train together now, and those that are joining them."""

    def __init__(self) -> None:
        self.members: frozenset[str] = frozenset()
        """The workers that train."""
        self._size = 0
        self._preempted = False
        self._told: dict[str, Formed] = {}

    def keep(self, present: frozenset[str]) -> None:
        """Keep only the members that are back after a restart of the controller."""
        self.members &= present
        self._size = len(self.members)

    def lost(self, worker: str) -> None:
        """Record that a worker was taken away. A call of `gone` follows."""
        if worker in self.members:
            self._preempted = True

    def gone(self, worker: str) -> None:
        """Remove a worker that has ended or is lost."""
        self._told.pop(worker, None)
        self.members -= {worker}

    def formed(
        self, worker: str, formed: Formed, going: Generation, workers: Mapping[str, Worker], now: float
    ) -> Rescale | None:
        """Record that a worker has formed a generation.

        Returns the `Rescale` if it was the last member of `going`, the generation that is being formed.
        """
        if formed.generation != going.id:
            return None
        self._told[worker] = formed
        if not all(member in self._told for member in going.members):
            return None
        told = {member: self._told[member] for member in going.members}
        survivors = [told[member] for member in going.members if member in self.members] or list(told.values())
        slowest = max(survivors, key=lambda f: f.pause_s)
        before = self._size if any(member in self.members for member in going.members) else 0
        newcomers = [workers[member] for member in going.members if member not in self.members]
        starts = tuple(
            now - newcomer.started for newcomer in newcomers if newcomer.formed == going.id and newcomer.is_new
        )
        for newcomer in newcomers:
            newcomer.is_new = False
        times = (slowest.pause_s, slowest.form_s, slowest.sync_s)
        rescale = Rescale(going.id, before, len(told), *times, self._preempted, starts, slowest.parts)
        self.members = frozenset(going.members)
        self._size = len(going.members)
        self._preempted = False
        self._told = {}
        return rescale
