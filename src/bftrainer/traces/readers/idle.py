"""Idle times of nodes: the complement of the union of the times that jobs held them.

`joblog.py` feeds jobs in; `first_fit.py` does so for logs that name no nodes. Shared nodes are handled correctly
because a node is idle only when no job at all is on it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bftrainer.core.trace import Floats, Indices
from bftrainer.traces.ranges import NodeSpans

_ROWS_AT_ONCE = 1 << 20
"""Rows of single nodes that are handled together."""


class IdleSpans:
    """Collects idle times of nodes and keeps them by ranges of nodes, so memory grows with ranges, not nodes."""

    def __init__(self) -> None:
        self._nodes: list[Indices] = []
        self._since: list[Floats] = []
        self._until: list[float] = []
        self._rows = 0
        self._spans: list[NodeSpans] = []

    def add(self, nodes: Indices, since: Floats, until: float) -> None:
        """Record that `nodes` were idle, each since its own time, until all were used together."""
        self._nodes.append(nodes)
        self._since.append(since)
        self._until.append(until)
        self._rows += len(nodes)
        if self._rows > _ROWS_AT_ONCE:
            self._group()

    def spans(self) -> NodeSpans:
        """All idle times that are not empty."""
        self._group()
        return NodeSpans.joined(self._spans)

    def _group(self) -> None:
        if not self._rows:
            return
        counts = [len(nodes) for nodes in self._nodes]
        node, since = np.concatenate(self._nodes), np.concatenate(self._since)
        until = np.repeat(np.array(self._until), counts)
        keep = since < until
        self._spans.append(NodeSpans.grouped(node[keep], since[keep], until[keep]))
        self._nodes, self._since, self._until, self._rows = [], [], [], 0


class Numbering:
    """Maps node names to numbers, in order of appearance. Jobs repeat their node lists, so whole lists are cached."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}
        self._known: dict[tuple[str, ...], bytes] = {}

    def __call__(self, names: tuple[str, ...]) -> bytes:
        """The numbers of `names`, as the bytes of an array of type "i"."""
        numbers = self._known.get(names)
        if numbers is None:
            index = self.index
            try:
                known = array("i", list(map(index.__getitem__, names)))
            except KeyError:
                known = array("i", [index.setdefault(name, len(index)) for name in names])
            numbers = known.tobytes()
            if len(self._known) >= 4096:
                self._known.clear()
            self._known[names] = numbers
        return numbers


@dataclass(frozen=True, slots=True, eq=False)
class IdleTimes:
    """When nodes were idle between jobs, and at which time each node's jobs began and ended."""

    between: NodeSpans
    first: Floats
    """Start of each node's first job; infinite for a node without jobs."""
    last: Floats
    """End of each node's last job; infinite for a node without jobs."""

    def edges(self) -> NodeSpans:
        """The time before each node's first and after its last job; for a node without jobs, the whole time."""
        node = np.arange(len(self.first), dtype=np.int32)
        ever = np.full(len(node), np.inf)
        return NodeSpans.joined([NodeSpans.grouped(node, -ever, self.first), NodeSpans.grouped(node, self.last, ever)])


class BusyTimes:
    """Collects which numbered nodes jobs held, and when: four bytes per node of a job."""

    def __init__(self) -> None:
        self._nodes = array("i")
        self._counts = array("q")
        self._starts, self._ends = array("d"), array("d")

    def add(self, nodes: bytes, start: float, end: float) -> None:
        """Record that `nodes`, an array of type "i" as bytes, were in use from `start` to `end`."""
        self._nodes.frombytes(nodes)
        self._counts.append(len(nodes) // self._nodes.itemsize)
        self._starts.append(start)
        self._ends.append(end)

    def idle_times(self, place: Indices, nodes: int) -> IdleTimes:
        """When the nodes of a machine of `nodes` nodes were idle.

        Node i has the number `place[i]` there; a node with a negative place is left out.
        """
        first, last = np.full(nodes, np.inf), np.full(nodes, -np.inf)
        parts = []
        for node, start, end in self._in_order_of_start(place):
            order = np.argsort(node, kind="stable")
            node, start, end = node[order], start[order], end[order]
            new = np.append(True, node[1:] != node[:-1])
            heads = np.flatnonzero(new)
            mine = node[heads]
            busy_until = last[mine]
            end[heads] = np.maximum(end[heads], busy_until)
            latest = _latest(np.cumsum(new), end)
            before = np.append(-np.inf, latest[:-1])
            before[heads] = busy_until
            gap = np.flatnonzero((before < start) & (before > -np.inf))
            gap = gap[np.lexsort((node[gap], start[gap], before[gap]))]
            parts.append(NodeSpans.grouped(node[gap], before[gap], start[gap]))
            first[mine] = np.minimum(first[mine], start[heads])
            last[mine] = latest[np.append(heads[1:], len(node)) - 1]
        last[np.isinf(first)] = np.inf
        return IdleTimes(NodeSpans.joined(parts), first, last)

    def _in_order_of_start(self, place: Indices) -> Iterator[tuple[Indices, Floats, Floats]]:
        """Rows of node, start and end, about a million at a time."""
        nodes = np.frombuffer(self._nodes, dtype=np.int32)
        counts = np.frombuffer(self._counts, dtype=np.int64)
        starts, ends = np.frombuffer(self._starts), np.frombuffer(self._ends)
        offsets = np.cumsum(counts) - counts
        jobs = np.argsort(starts, kind="stable")
        through = np.cumsum(counts[jobs])
        at = 0
        while at < len(jobs):
            done = int(through[at - 1]) if at else 0
            until = max(at + 1, int(np.searchsorted(through, done + _ROWS_AT_ONCE, "right")))
            some = jobs[at:until]
            count = counts[some]
            rows = np.repeat(offsets[some] - (np.cumsum(count) - count), count) + np.arange(count.sum())
            node = place[nodes[rows]]
            keep = node >= 0
            if keep.any():
                yield node[keep], np.repeat(starts[some], count)[keep], np.repeat(ends[some], count)[keep]
            at = until


def _latest(group: npt.NDArray[np.int64], end: Floats) -> Floats:
    """The latest end so far within each group of rows."""
    # In one pass: compare ranks of ends, offset so that groups never mix.
    order = np.argsort(end, kind="stable")
    rank = np.empty(len(end), dtype=np.int64)
    rank[order] = np.arange(len(end))
    offset = group * len(end)
    return end[order[np.maximum.accumulate(offset + rank) - offset]]
