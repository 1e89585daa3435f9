"""A trace records which nodes of a machine were idle, and when.

It holds fragments, the machine's nodes and the observed window, as columns so that half a million fragments stay cheap.
Readers (`bftrainer.traces`) make traces; statistics and the simulator consume them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt

from bftrainer.core.pool import Event, Fragment, Node
from bftrainer.errors import InputError

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

_ROWS_AT_ONCE = 1 << 20
"""Fragments that are checked together."""


def utc(time: float) -> str:
    """A time in UTC as text, for messages and tables."""
    try:
        return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"{time} s"


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time, in seconds since 1970 UTC."""

    start: float
    end: float

    def __post_init__(self) -> None:
        if not self.end > self.start:
            raise InputError(f"a window must end after it starts, but got {utc(self.start)} to {utc(self.end)}")

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.end - self.start

    @property
    def hours(self) -> float:
        """Length of the window in hours."""
        return self.seconds / 3600

    def __str__(self) -> str:
        return f"{utc(self.start)} to {utc(self.end)}"


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Idle fragments of a machine's nodes over a window.

    The columns `node` (an index into `nodes`), `start`, `end` and `open` have one row per fragment, sorted by start,
    then node. Build one with `Trace.build`, which checks what must hold.
    """

    nodes: tuple[Node, ...]
    window: Window
    node: Indices
    start: Floats
    end: Floats
    open: Flags
    nodes_known: bool = True
    """False: no list of the machine's nodes was given, `nodes` are just those that were seen idle."""

    @classmethod
    def build(
        cls,
        nodes: Sequence[Node],
        node: npt.ArrayLike,
        start: npt.ArrayLike,
        end: npt.ArrayLike,
        open: npt.ArrayLike | None = None,  # noqa: A002 - the column's name
        window: Window | None = None,
        nodes_known: bool = True,
    ) -> Trace:
        """Sort the columns and check them: ends after starts, one fragment per node at a time, all in the window.

        Arrays that are sorted already are not copied; they become read-only.
        """
        node_col = np.asarray(node, dtype=np.int32)
        start_col = np.asarray(start, dtype=np.float64)
        end_col = np.asarray(end, dtype=np.float64)
        open_col = np.zeros(len(node_col), dtype=np.bool_) if open is None else np.asarray(open, dtype=np.bool_)
        if not _in_order(node_col, start_col):
            order = np.lexsort((node_col, start_col))
            node_col, start_col, end_col, open_col = node_col[order], start_col[order], end_col[order], open_col[order]
        names = tuple(nodes)
        if len(set(names)) != len(names):
            twice, _ = Counter(names).most_common(1)[0]
            raise InputError(f"node {twice!r} is named twice in the list of nodes")
        _check_fragments(names, node_col, start_col, end_col)
        if window is None:
            if len(node_col) == 0:
                raise InputError("a trace without fragments needs a time window")
            window = Window(float(start_col[0]), float(end_col.max()))
        elif len(node_col) and (start_col[0] < window.start or end_col.max() > window.end):
            raise InputError(
                f"fragments reach from {utc(start_col[0])} to {utc(end_col.max())}, outside the window {window}"
            )
        for column in (node_col, start_col, end_col, open_col):
            column.flags.writeable = False
        return cls(names, window, node_col, start_col, end_col, open_col, nodes_known)

    @classmethod
    def from_fragments(
        cls, fragments: Iterable[Fragment], nodes: Sequence[Node] | None = None, window: Window | None = None
    ) -> Trace:
        """A trace of a few fragments; `nodes` default to those that appear, in order."""
        rows = list(fragments)
        names = list(dict.fromkeys(f.node for f in rows)) if nodes is None else list(nodes)
        index = {name: i for i, name in enumerate(names)}
        unknown = next((f.node for f in rows if f.node not in index), None)
        if unknown is not None:
            raise InputError(f"node {unknown!r} has a fragment but is not in the list of nodes")
        return cls.build(
            names,
            [index[f.node] for f in rows],
            [f.start for f in rows],
            [f.end for f in rows],
            [f.open for f in rows],
            window,
            nodes_known=nodes is not None,
        )

    def __len__(self) -> int:
        return len(self.node)

    @property
    def lengths(self) -> Floats:
        """Seconds of each fragment."""
        return self.end - self.start

    def fragments(self) -> Iterator[Fragment]:
        """The fragments one by one, in order of their start."""
        rows = zip(self.node.tolist(), self.start.tolist(), self.end.tolist(), self.open.tolist(), strict=True)
        for node, start, end, is_open in rows:
            yield Fragment(self.nodes[node], start, end, is_open)

    def events(self) -> Iterator[Event]:
        """Every change of the pool in order of time, starting with the nodes idle when the window opens."""
        closed = np.flatnonzero(~self.open)
        leave_order = closed[np.argsort(self.end[closed], kind="stable")]
        leave_times = self.end[leave_order]
        times = np.union1d(np.unique(self.start), np.unique(leave_times))
        join_at = np.searchsorted(self.start, times, "left"), np.searchsorted(self.start, times, "right")
        leave_at = np.searchsorted(leave_times, times, "left"), np.searchsorted(leave_times, times, "right")
        joiners, leavers, name = self.node, self.node[leave_order], self.nodes
        bounds = zip(times.tolist(), *(b.tolist() for b in (*join_at, *leave_at)), strict=True)
        for time, j0, j1, l0, l1 in bounds:
            joining, leaving = joiners[j0:j1].tolist(), leavers[l0:l1].tolist()
            yield Event(time, tuple(name[i] for i in joining), tuple(name[i] for i in leaving))

    def clip(self, window: Window) -> Trace:
        """The part of this trace in `window`; a fragment cut at its end stays open there."""
        if window == self.window:
            return self
        keep = (self.end > window.start) & (self.start < window.end)
        end = self.end[keep]
        cut = end > window.end
        return Trace.build(
            self.nodes,
            self.node[keep],
            np.maximum(self.start[keep], window.start),
            np.minimum(end, window.end),
            self.open[keep] | cut,
            window,
            self.nodes_known,
        )

    def select(self, nodes: Sequence[Node]) -> Trace:
        """The machine reduced to `nodes`, in that order; they must be nodes of the machine."""
        known = set(self.nodes)
        missing = next((n for n in nodes if n not in known), None)
        if missing is not None:
            raise InputError(f"node {missing!r} is not a node of this trace")
        return replace(self.on_machine(nodes), nodes_known=self.nodes_known)

    def on_machine(self, nodes: Sequence[Node]) -> Trace:
        """The same fragments on a machine with exactly `nodes`; fragments of other nodes are left out."""
        place = {name: i for i, name in enumerate(nodes)}
        new_index = np.array([place.get(name, -1) for name in self.nodes], dtype=np.int32)[self.node]
        keep = new_index >= 0
        return Trace.build(
            nodes, new_index[keep], self.start[keep], self.end[keep], self.open[keep], self.window, nodes_known=True
        )

    def without_transients(self, min_idle_s: float) -> Trace:
        """The trace without fragments known to be shorter than `min_idle_s`.

        Only fragments that end, and did not begin before the window, are dropped. A fragment cut by either end of the
        window may have lasted longer, so it stays.
        """
        if min_idle_s <= 0:
            return self
        keep = (self.lengths >= min_idle_s) | self.open | (self.start == self.window.start)
        columns = {c: getattr(self, c)[keep] for c in ("node", "start", "end", "open")}
        return replace(self, **columns)


def _check_fragments(names: tuple[Node, ...], node: Indices, start: Floats, end: Floats) -> None:
    """Raise one clear error for the first impossible fragment."""
    if not len(node):
        return
    if node.min() < 0 or node.max() >= len(names):
        raise InputError(f"a fragment names node number {int(node.max())}, but there are {len(names)} nodes")
    if not (np.isfinite(start).all() and np.isfinite(end).all()):
        bad = int(np.flatnonzero(~(np.isfinite(start) & np.isfinite(end)))[0])
        raise InputError(f"a fragment of node {names[node[bad]]} has no start or no end")
    backwards = np.flatnonzero(end <= start)
    if len(backwards):
        i = int(backwards[0])
        raise InputError(
            f"a fragment must end after it starts, but node {names[node[i]]} has one from {utc(start[i])} to "
            f"{utc(end[i])} ({len(backwards)} such in all)"
        )
    overlaps = 0
    example = ""
    latest_end = np.full(len(names), -np.inf)  # by node, in the parts before
    for at in range(0, len(node), _ROWS_AT_ONCE):
        rows = at + np.argsort(node[at : at + _ROWS_AT_ONCE], kind="stable")
        number, begin, finish = node[rows], start[rows], end[rows]
        heads = np.flatnonzero(np.append(True, number[1:] != number[:-1]))
        before = np.append(-np.inf, finish[:-1])
        before[heads] = latest_end[number[heads]]
        tails = np.append(heads[1:], len(number)) - 1
        latest_end[number[tails]] = finish[tails]
        overlap = np.flatnonzero(begin < before)
        if len(overlap) and not overlaps:
            i = overlap[0]
            example = f"node {names[number[i]]} is idle until {utc(before[i])} and again from {utc(begin[i])}"
        overlaps += len(overlap)
    if overlaps:
        raise InputError(f"fragments of one node must not overlap, but {example} ({overlaps} such in all)")


def _in_order(node: Indices, start: Floats) -> bool:
    """Whether fragments are sorted by start, then node."""
    later = start[1:] > start[:-1]
    return bool((later | ((start[1:] == start[:-1]) & (node[1:] >= node[:-1]))).all())
