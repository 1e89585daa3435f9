"""What the `slurm` pool sees of its nodes in a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bftrainer.cluster.pools.slurm import decide
from bftrainer.cluster.pools.slurm.read import SlurmNode
from bftrainer.cluster.pools.slurm.settings import SlurmSettings


@dataclass(frozen=True, slots=True)
class PoolView:
    """The nodes as of the last round. `free` and `may_stay` have only nodes that the settings allow."""

    nodes: Mapping[str, SlurmNode]
    """All nodes of the partition."""
    usable: int
    """Number of nodes that the settings allow."""
    free: tuple[str, ...]
    """Nodes that a pilot could start on now."""
    may_stay: tuple[str, ...]
    """Nodes that were not asked to become empty."""

    @staticmethod
    def of(nodes: Mapping[str, SlurmNode], settings: SlurmSettings) -> PoolView:
        """Return the view of these nodes."""
        usable = decide.usable(nodes, settings)
        free = tuple(name for name, node in usable.items() if node.free(settings.planned))
        return PoolView(nodes, len(usable), free, tuple(name for name, node in usable.items() if node.may_stay))
