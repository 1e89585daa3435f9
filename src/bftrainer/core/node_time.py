"""Node time and GPU time: how long nodes, and the GPUs in them, were held.

The controller adds up the time of the pool and of each trainer with `NodeTime`. `GpuCounts` says how many GPUs nodes
have; a node without GPUs has node time only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class GpuCounts:
    """How many GPUs each of some nodes has, and how many all of them have."""

    def __init__(self) -> None:
        self._by_node: dict[str, int] = {}
        self.total = 0

    def set(self, node: str, gpus: int) -> None:
        """Set how many GPUs a node has; 0 removes it."""
        self.total += gpus - self._by_node.pop(node, 0)
        if gpus:
            self._by_node[node] = gpus

    def of(self, nodes: Iterable[str]) -> int:
        """Return how many GPUs some nodes have together."""
        counts = self._by_node
        return sum(counts.get(node, 0) for node in nodes) if counts else 0


@dataclass(slots=True)
class NodeTime:
    """Seconds of nodes and of their GPUs, added up while their numbers change."""

    node_s: float = 0.0
    gpu_s: float = 0.0
    """Both up to `counted_at`."""
    nodes: int = 0
    gpus: int = 0
    """How many there are since then."""
    counted_at: float = 0.0
    """0: nothing was counted yet."""

    def count(self, now: float, nodes: int, gpus: int) -> None:
        """Add up the time until now. From now on there are so many nodes and GPUs."""
        self.node_s, self.gpu_s = self.node_seconds(now), self.gpu_seconds(now)
        self.nodes, self.gpus, self.counted_at = nodes, gpus, now

    def node_seconds(self, now: float) -> float:
        """Return the node-seconds up to now."""
        return self.node_s + (self.nodes * (now - self.counted_at) if self.counted_at else 0.0)

    def gpu_seconds(self, now: float) -> float:
        """Return the GPU-seconds up to now."""
        return self.gpu_s + (self.gpus * (now - self.counted_at) if self.counted_at else 0.0)
