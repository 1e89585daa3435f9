"""Who of a job's workers train together, by what they say of the groups they form; and what each change took.

`job.py` tells it what happened. When the last member of a generation has formed, a `Rescale` comes out.
"""

from __future__ import annotations

from collections.abc import Mapping

from bftrainer.cluster.progress import Rescale
from bftrainer.cluster.workers import Worker
from bftrainer.elastic.protocol import Formed, Generation


class Formation:
    """The workers that train together right now, and those on their way to it."""

    def __init__(self) -> None:
        self.members: frozenset[str] = frozenset()
        """Those who train."""
        self._size = 0
        self._preempted = False
        self._told: dict[str, Formed] = {}

    def keep(self, present: frozenset[str]) -> None:
        """After a restart of the controller: these are back, the others are not."""
        self.members &= present
        self._size = len(self.members)

    def lost(self, worker: str) -> None:
        """A worker was taken away; `gone` follows."""
        if worker in self.members:
            self._preempted = True

    def gone(self, worker: str) -> None:
        """A worker is no more."""
        self._told.pop(worker, None)
        self.members -= {worker}

    def formed(
        self, worker: str, formed: Formed, going: Generation, workers: Mapping[str, Worker], now: float
    ) -> Rescale | None:
        """A worker trains in a generation. When it is the last of those `going` to, the rescale is over."""
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
        starts = tuple(now - one.started for one in newcomers if one.formed == going.id and one.is_new)
        for one in newcomers:
            one.is_new = False
        times = (slowest.pause_s, slowest.form_s, slowest.sync_s)
        rescale = Rescale(going.id, before, len(told), *times, self._preempted, starts)
        self.members = frozenset(going.members)
        self._size = len(going.members)
        self._preempted = False
        self._told = {}
        return rescale
