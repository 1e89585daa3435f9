"""Node time and GPU time add up while nodes come, go and change."""

from __future__ import annotations

from bftrainer.core.node_time import GpuCounts, NodeTime


def test_nodes_without_gpus_have_node_time_only() -> None:
    time = NodeTime()
    assert (time.node_seconds(100.0), time.gpu_seconds(100.0)) == (0.0, 0.0)
    time.count(100.0, 3, 8)
    time.count(110.0, 1, 0)
    assert (time.node_seconds(130.0), time.gpu_seconds(130.0)) == (3 * 10 + 20, 8 * 10)
    assert (time.node_s, time.gpu_s) == (30.0, 80.0)  # up to the last count


def test_the_gpus_of_some_nodes_and_of_all_are_known() -> None:
    counts = GpuCounts()
    assert counts.of(("n1", "n2")) == counts.total == 0
    counts.set("n1", 4)
    counts.set("n2", 8)
    assert (counts.of(("n1", "none")), counts.total) == (4, 12)
    counts.set("n2", 2)
    counts.set("n1", 0)
    counts.set("n1", 0)
    assert (counts.of(("n1", "n2")), counts.total) == (2, 2)
