"""Recording: reads a journal back as a trace. Polls in, idle fragments out.

`bftrainer trace record` calls this when it stops; `bftrainer trace import` calls it when the file is a journal.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from bftrainer.core.pool import Node
from bftrainer.core.trace import Trace, Window
from bftrainer.errors import InputError
from bftrainer.traces.recorder.journal import Header, View, follow, read_header

GAP_INTERVALS = 3
"""With more intervals than this between two successful polls, nothing is known about the time between."""
# Polls start a little after their slot, so three slots apart is rarely three intervals to the digit.
_SLACK = 0.5
# Formats that report busy nodes too; a list of idle names says nothing about the rest of the machine.
_WHOLE_MACHINE = frozenset({"sinfo", "slurm-json", "pbs-json"})


@dataclass(frozen=True, slots=True)
class Recording:
    """A journal as a trace, and how complete the polls were."""

    trace: Trace
    polls: int
    """Number of successful polls."""
    missed: int
    gaps: tuple[Window, ...]
    """Times about which nothing is known; no node is idle there."""
    header: Header

    @property
    def gap_seconds(self) -> float:
        """The total length of all gaps."""
        return sum(gap.seconds for gap in self.gaps)

    @property
    def notes(self) -> list[str]:
        """Notes for the user about how complete the polls were."""
        notes = []
        if self.missed:
            notes.append(f"{self.missed} of {self.polls + self.missed} polls failed")
        if self.gaps:
            notes.append(f"nothing is known about {len(self.gaps)} gaps of {self.gap_seconds:,.0f} s together")
        return notes


def read_journal(
    journal: str | Path | BinaryIO, *, nodes: Sequence[Node] | None = None, keep_transients: bool = False
) -> Recording:
    """The trace in a journal.

    A node idle in consecutive polls is idle from the first of them to the poll after the last. A node seen idle in
    exactly one poll is dropped as a transient (§2.1 of the paper) unless `keep_transients`. `nodes` are the machine's
    nodes, by default all that were reported. An unfinished last line is ignored.
    """
    if isinstance(journal, str | Path):
        try:
            with Path(journal).open("rb") as stream:
                return _read(stream, str(journal), nodes, keep_transients)
        except OSError as error:
            raise InputError(f"{journal}: cannot read it: {error.strerror}") from None
    return _read(journal, str(getattr(journal, "name", "the journal")), nodes, keep_transients)


def _read(stream: BinaryIO, name: str, nodes: Sequence[Node] | None, keep_transients: bool) -> Recording:
    header = read_header(stream, name)
    form = header.source.get("form")
    view, columns, gaps = View(), _Columns(keep_transients), list[Window]()
    first = last = math.nan
    whole_machine = form in _WHOLE_MACHINE
    for entry in follow(stream, name, view):
        if entry.missed is not None:
            continue
        polls_before = view.polls - 1
        if polls_before == 0:
            first = entry.t
        if entry.t - last > (GAP_INTERVALS + _SLACK) * header.interval_s:
            gaps.append(Window(last, entry.t))
            columns.close(list(columns.since), last, polls_before)
            columns.begin(view.idle, entry.t, polls_before)
        else:
            columns.close(entry.left, entry.t, polls_before)
            columns.begin(entry.joined, entry.t, polls_before)
        last = entry.t
        whole_machine |= form == "auto" and not set(entry.seen) <= set(entry.joined)
    if view.polls < 2:
        raise InputError(
            f"{name}: a trace needs two successful polls, but the journal has {view.polls} (and {view.missed} missed); "
            "record for longer, or see in it why polls fail"
        )
    columns.close(list(columns.since), last, view.polls, still_idle=True)
    known = nodes is not None or whole_machine
    trace = columns.trace(list(view.nodes) if nodes is None else nodes, Window(first, last), known, name)
    return Recording(trace, view.polls, view.missed, tuple(gaps), header)


@dataclass(slots=True)
class _Columns:
    """Turns polls into the columns of a trace."""

    keep_transients: bool
    since: dict[Node, tuple[float, int]] = field(default_factory=dict)
    """The idle nodes, each with the time of the first poll that showed it idle and the number of polls before."""
    node: list[Node] = field(default_factory=list)
    start: array[float] = field(default_factory=lambda: array("d"))
    end: array[float] = field(default_factory=lambda: array("d"))
    open: array[int] = field(default_factory=lambda: array("b"))

    def begin(self, nodes: Iterable[Node], t: float, polls_before: int) -> None:
        self.since.update(dict.fromkeys(nodes, (t, polls_before)))

    def close(self, nodes: Iterable[Node], t: float, polls: int, *, still_idle: bool = False) -> None:
        """End the idle periods of `nodes`, known until `t`; `polls` had been made when each was last seen."""
        for node in nodes:
            start, polls_before = self.since.pop(node)
            transient = polls - polls_before == 1 and not self.keep_transients
            # Seen once and then hidden by a gap: the length is unknown, transient or not.
            if t > start and not transient:
                self.node.append(node)
                self.start.append(start)
                self.end.append(t)
                self.open.append(still_idle)

    def trace(self, nodes: Sequence[Node], window: Window, known: bool, name: str) -> Trace:
        index = {node: i for i, node in enumerate(nodes)}
        unknown = next((node for node in self.node if node not in index), None)
        if unknown is not None:
            raise InputError(f"{name}: node {unknown!r} was idle but is not in the given list of nodes; add it there")
        numbers = [index[node] for node in self.node]
        return Trace.build(nodes, numbers, self.start, self.end, self.open, window, known)
