"""Traces by ranges of nodes: one row for all neighbouring nodes that are idle at exactly the same time.

A large machine frees and fills its nodes by the hundred, so a log of tens of millions of fragments needs far fewer rows
here. Log readers make a `RangeTrace`, `files.py` writes it piece by piece, and `RangeTrace.trace` gives the trace with
one row per fragment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bftrainer.core.trace import Flags, Floats, Indices, Trace, Window

PIECE_ROWS = 1 << 18
"""Fragments in one piece of a trace, roughly."""


@dataclass(frozen=True, slots=True, eq=False)
class NodeSpans:
    """NodeSpans of time, each of the `count` nodes from number `first` on."""

    first: Indices
    count: Indices
    start: Floats
    end: Floats

    @classmethod
    def grouped(cls, node: Indices, start: Floats, end: Floats) -> NodeSpans:
        """Spans of single nodes, with rows that follow each other joined where nodes are neighbours and times equal."""
        new = np.ones(len(node), dtype=np.bool_)
        new[1:] = (node[1:] != node[:-1] + 1) | (start[1:] != start[:-1]) | (end[1:] != end[:-1])
        at = np.flatnonzero(new)
        count = np.diff(at, append=len(node)).astype(np.int32)
        return cls(node[at].astype(np.int32), count, start[at], end[at])

    @classmethod
    def joined(cls, parts: Sequence[NodeSpans]) -> NodeSpans:
        """All rows of `parts`, one part after the other."""
        nothing = cls(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0), np.empty(0))
        columns = zip(*((s.first, s.count, s.start, s.end) for s in (nothing, *parts)), strict=True)
        return cls(*map(np.concatenate, columns))

    def __len__(self) -> int:
        return len(self.first)

    def rows(self, which: Indices | Flags | slice) -> NodeSpans:
        """Some of the rows."""
        return NodeSpans(self.first[which], self.count[which], self.start[which], self.end[which])

    def seconds(self, window: Window) -> float:
        """Node-seconds inside `window`."""
        inside = np.minimum(self.end, window.end) - np.maximum(self.start, window.start)
        return float((self.count * np.maximum(inside, 0)).sum())

    def expanded(self) -> tuple[Indices, Floats, Floats]:
        """Node, start and end, with one row per node."""
        before = np.cumsum(self.count, dtype=np.int64) - self.count
        total = int(self.count.sum(dtype=np.int64))
        node = np.repeat(self.first - before, self.count) + np.arange(total)
        return node.astype(np.int32), np.repeat(self.start, self.count), np.repeat(self.end, self.count)

    def renumbered(self, place: Indices) -> NodeSpans:
        """The same spans with node i numbered `place[i]`; nodes with a negative place are left out."""
        node, start, end = self.expanded()
        node = place[node]
        keep = node >= 0
        return NodeSpans.grouped(node[keep], start[keep], end[keep])


@dataclass(frozen=True, slots=True, eq=False)
class RangeTrace:
    """A trace whose rows are ranges of nodes, sorted by start, then first node."""

    nodes: tuple[str, ...]
    window: Window
    idle: NodeSpans
    open: Flags
    nodes_known: bool = True

    @classmethod
    def cut(cls, nodes: Sequence[str], idle: NodeSpans, window: Window, *, nodes_known: bool) -> RangeTrace:
        """The part of `idle` in `window`. A span that reaches beyond the window's end is open there."""
        start, end = np.maximum(idle.start, window.start), np.minimum(idle.end, window.end)
        kept = np.flatnonzero(end > start)
        kept = kept[np.lexsort((idle.first[kept], start[kept]))]
        spans = NodeSpans(idle.first[kept], idle.count[kept], start[kept], end[kept])
        return cls(tuple(nodes), window, spans, idle.end[kept] > window.end, nodes_known)

    @classmethod
    def of(cls, trace: Trace) -> RangeTrace:
        """The ranges of a trace: one per fragment."""
        ones = np.ones(len(trace), dtype=np.int32)
        idle = NodeSpans(trace.node, ones, trace.start, trace.end)
        return cls(trace.nodes, trace.window, idle, trace.open, trace.nodes_known)

    @property
    def fragments(self) -> int:
        """How many fragments there are, one per node and idle period."""
        return int(self.idle.count.sum(dtype=np.int64))

    @property
    def node_seconds(self) -> float:
        """Idle node-seconds."""
        return self.idle.seconds(self.window)

    def without_transients(self, min_idle_s: float) -> RangeTrace:
        """The trace without fragments known to be shorter than `min_idle_s`, by the rule of `Trace`."""
        if min_idle_s <= 0:
            return self
        idle = self.idle
        keep = (idle.end - idle.start >= min_idle_s) | self.open | (idle.start == self.window.start)
        return replace(self, idle=idle.rows(keep), open=self.open[keep])

    def pieces(self) -> Iterator[tuple[Indices, Floats, Floats, Flags]]:
        """The columns node, start, end and open of all fragments in order, some hundred thousand rows at a time."""
        through = np.cumsum(self.idle.count, dtype=np.int64)
        at = 0
        while at < len(through):
            done = int(through[at - 1]) if at else 0
            until = max(at + 1, int(np.searchsorted(through, done + PIECE_ROWS, "right")))
            part = self.idle.rows(slice(at, until))
            yield (*part.expanded(), np.repeat(self.open[at:until], part.count))
            at = until

    def trace(self) -> Trace:
        """The trace with one row per fragment."""
        rows = self.fragments
        node, is_open = np.empty(rows, dtype=np.int32), np.empty(rows, dtype=np.bool_)
        start, end = np.empty(rows), np.empty(rows)
        at = 0
        for piece in self.pieces():
            until = at + len(piece[0])
            node[at:until], start[at:until], end[at:until], is_open[at:until] = piece
            at = until
        for column in (node, start, end, is_open):
            column.flags.writeable = False
        return Trace(self.nodes, self.window, node, start, end, is_open, self.nodes_known)
