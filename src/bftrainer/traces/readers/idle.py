"""Idle times of nodes: the complement of the union of the times that jobs held them.

`importing.py` feeds jobs in; `first_fit.py` does so for logs that name no nodes. Shared nodes are handled correctly
because a node is idle only when no job at all is on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bftrainer.core.trace import Floats, Indices, Trace, Window

_COMPACT_AT = 4_000_000


class BusyTimes:
    """Collects when numbered nodes were in use and keeps the union, so memory grows with busy periods, not jobs."""

    def __init__(self) -> None:
        self._nodes: list[Indices] = []
        self._spans: list[tuple[float, float]] = []
        self._rows = 0
        self._merged = _empty()

    def add(self, nodes: Indices, start: float, end: float) -> None:
        """Record that `nodes` were in use from `start` to `end`."""
        self._nodes.append(nodes)
        self._spans.append((start, end))
        self._rows += len(nodes)
        if self._rows > _COMPACT_AT:
            self._compact()

    def intervals(self) -> Intervals:
        """When each node was in use, without overlaps, sorted by node, then time."""
        self._compact()
        return self._merged

    def _compact(self) -> None:
        if not self._nodes:
            return
        counts = np.fromiter((len(n) for n in self._nodes), dtype=np.int64, count=len(self._nodes))
        spans = np.array(self._spans, dtype=np.float64)
        old = self._merged
        self._merged = union(
            np.concatenate([old.node, *self._nodes]),
            np.concatenate([old.start, np.repeat(spans[:, 0], counts)]),
            np.concatenate([old.end, np.repeat(spans[:, 1], counts)]),
        )
        self._nodes, self._spans, self._rows = [], [], 0


class Numbering:
    """Maps node names to numbers, in order of appearance. Jobs repeat their node lists, so whole lists are cached."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}
        self._known: dict[tuple[str, ...], Indices] = {}

    def __call__(self, names: tuple[str, ...]) -> Indices:
        """The numbers of `names`."""
        numbers = self._known.get(names)
        if numbers is None:
            index = self.index
            numbers = np.array([index.setdefault(name, len(index)) for name in names], dtype=np.int32)
            if len(self._known) >= 4096:
                self._known.clear()
            self._known[names] = numbers
        return numbers


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Spans of time by node number, sorted by node, then start, never touching within a node."""

    node: Indices
    start: Floats
    end: Floats

    def seconds(self, window: Window) -> float:
        """Node-seconds inside `window`."""
        inside = np.minimum(self.end, window.end) - np.maximum(self.start, window.start)
        return float(np.maximum(inside, 0).sum())


def union(node: Indices, start: Floats, end: Floats) -> Intervals:
    """Merge overlapping and touching spans of the same node."""
    if not len(node):
        return _empty()
    order = np.lexsort((start, node))
    node, start, end = node[order], start[order], end[order]
    # The latest end so far within each node, in one pass: compare ranks of ends, offset so that nodes never mix.
    rank = np.empty(len(end), dtype=np.int64)
    rank[np.argsort(end, kind="stable")] = np.arange(len(end))
    key = np.maximum.accumulate(node.astype(np.int64) * len(end) + rank)
    latest = np.sort(end, kind="stable")[key - node.astype(np.int64) * len(end)]
    first = np.ones(len(node), dtype=np.bool_)
    first[1:] = (node[1:] != node[:-1]) | (start[1:] > latest[:-1])
    last = np.append(first[1:], True)
    return Intervals(node[first], start[first], latest[last])


def idle_trace(
    busy: Intervals, nodes: Sequence[str], window: Window, *, keep_edges: bool, nodes_known: bool
) -> tuple[Trace, float]:
    """The time in `window` when nodes were not busy, and the node-seconds left out at the edges.

    Before its first and after its last job nothing shows that a node was up, so that time is left out unless
    `keep_edges` says that a node without jobs is idle.
    """
    node, start, end = busy.node, busy.start, busy.end
    same = node[1:] == node[:-1]
    parts = [(node[1:][same], end[:-1][same], start[1:][same])]
    edges = _edges(busy, len(nodes))
    trimmed = 0.0
    if keep_edges:
        parts += edges
    else:
        trimmed = sum(Intervals(*edge).seconds(window) for edge in edges)
    gap_node, gap_start, gap_end = (np.concatenate(column) for column in zip(*parts, strict=True))
    is_open = gap_end > window.end
    clipped_start = np.maximum(gap_start, window.start)
    clipped_end = np.minimum(gap_end, window.end)
    keep = clipped_end > clipped_start
    trace = Trace.build(
        nodes, gap_node[keep], clipped_start[keep], clipped_end[keep], is_open[keep], window, nodes_known
    )
    return trace, trimmed


def _edges(busy: Intervals, nodes: int) -> list[tuple[Indices, Floats, Floats]]:
    """For each node the time before its first use, and after its last; for a node never used, the whole time."""
    first = np.full(nodes, np.inf)
    last = np.full(nodes, np.inf)
    np.minimum.at(first, busy.node, busy.start)
    last[busy.node] = busy.end  # sorted by time within a node, so the last interval wins
    numbers = np.arange(nodes, dtype=np.int32)
    return [(numbers, np.full(nodes, -np.inf), first), (numbers, last, np.full(nodes, np.inf))]


def _empty() -> Intervals:
    nothing: npt.NDArray[np.float64] = np.empty(0)
    return Intervals(np.empty(0, dtype=np.int32), nothing, nothing)
