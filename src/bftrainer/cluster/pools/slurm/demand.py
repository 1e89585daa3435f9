"""`HarvestTarget` decides how many pilots the `slurm` pool should have: as many as trainers can use, and a few more."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bftrainer.cluster.pools.slurm.read import Pilot
from bftrainer.cluster.pools.slurm.settings import SlurmSettings
from bftrainer.util.text import natural


class HarvestTarget:
    """The number of pilots wanted, and since when there are more."""

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings
        self._since: float | None = None
        """Time since when there are more pilots than wanted."""

    def wanted(self, demand: int) -> int:
        """Return the number of pilots wanted when trainers could use `demand` nodes."""
        wanted = demand + self._settings.warm_pilots
        return min(wanted, self._settings.max_pilots) if self._settings.max_pilots else wanted

    def surplus(self, now: float, demand: int, pilots: Mapping[str, Pilot], used: Collection[str]) -> tuple[str, ...]:
        """Return the nodes to give back because no trainer can use them; `pilots` has those that are not ending.

        Waiting pilots go first. Nodes in `used` stay until their trainers leave them.
        """
        count = len(pilots) - self.wanted(demand)
        if count <= 0:
            self._since = None
            return ()
        if self._since is None:
            self._since = now
        if now - self._since < self._settings.linger_s:
            return ()
        unused = sorted((node for node in pilots if node not in used), key=natural, reverse=True)
        return tuple(sorted(unused, key=lambda node: pilots[node].state != "waiting")[:count])
