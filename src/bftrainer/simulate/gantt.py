"""Gantt chart data: which trainer ran on which node when, in a window of a replay.

`replay` calls `GanttRecorder.watch` after every decision; `finish` then returns the `Gantt`, and `gantt_data` the data
that the report's page draws with the live page's code. Only data in the window is kept, so memory does not grow with
the trace.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bftrainer.core.pool import Node
from bftrainer.core.trace import Trace, Window
from bftrainer.dashboard.timeline import Cells, Interval, events_per_cell, preemption_marks
from bftrainer.dashboard.timeline import gantt as gantt_of
from bftrainer.scheduler import Plan, State
from bftrainer.simulate.replay import Replay
from bftrainer.simulate.svg import shortened
from bftrainer.simulate.timeline import Timeline

_CELLS = 1000
_MOST_RUNS = 60_000
"""Most runs on a page, at some ten bytes each."""


@dataclass(frozen=True, slots=True)
class Span:
    """A period in which a node served a trainer without a break, cut to the window."""

    node: Node
    trainer: str
    start: float
    end: float
    preempted: bool = False
    """Whether the span ended because the node left the pool."""

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Gantt:
    """The spans of a window, by node in the machine's order, then by time."""

    window: Window
    spans: tuple[Span, ...]
    places: Mapping[str, int]
    """Index in the workload of each trainer that appears. It determines the colour, so that windows agree."""


class GanttRecorder:
    """Collects the spans of `nodes` in `window` while a replay runs."""

    def __init__(self, window: Window, nodes: Sequence[str]) -> None:
        self._window = window
        self._row = {node: i for i, node in enumerate(nodes)}
        self._held: Mapping[str, tuple[Node, ...]] = {}
        """The nodes of each trainer since the last decision before the end of the window."""
        self._open: dict[Node, tuple[str, float]] | None = None
        """The trainer of each node in use, and since when. None: the window has not begun."""
        self._spans: list[Span] = []

    def watch(self, time: float, plan: Plan, state_before: State) -> None:
        """Record a decision. Nodes change hands at decisions only, except for those of the last trainer to finish."""
        if time >= self._window.end:
            return
        if time >= self._window.start:
            if self._open is None:
                self._open = self._at_start()
            self._lost(self._open, time, state_before)
            for nodes in plan.placed.given_up.values():
                self._close(self._open, nodes, time)
            for trainer, nodes in plan.placed.gained.items():
                self._open.update((node, (trainer, time)) for node in nodes if node in self._row)
        self._held = plan.placed.nodes

    def finish(self, replay: Replay) -> Gantt:
        """The recorded spans, given the finished replay. The window ends with the replay at the latest."""
        window = self._window
        start, end = max(window.start, replay.start), min(window.end, replay.end)
        if start < end:
            window = Window(start, end)
        rows = {row.name: (i, row.end) for i, row in enumerate(replay.trainers)}
        still_open = self._at_start() if self._open is None else self._open
        found = [*self._spans, *(Span(n, trainer, since, window.end) for n, (trainer, since) in still_open.items())]
        spans = []
        for span in found:
            # No decision is taken, and so none recorded, when the last trainer finishes and no other waits.
            over = rows[span.trainer][1]
            until = min(span.end, window.end, math.inf if over is None else over)
            if until > span.start:
                spans.append(Span(span.node, span.trainer, span.start, until, span.preempted))
        spans.sort(key=lambda span: (self._row[span.node], span.start))
        return Gantt(window, tuple(spans), {span.trainer: rows[span.trainer][0] for span in spans})

    def _at_start(self) -> dict[Node, tuple[str, float]]:
        begin = self._window.start
        return {n: (trainer, begin) for trainer, nodes in self._held.items() for n in nodes if n in self._row}

    def _lost(self, still_open: dict[Node, tuple[str, float]], time: float, state: State) -> None:
        """End the spans of nodes that trainers lost before anything is decided."""
        for trainer, held in self._held.items():
            now = state.assigned.get(trainer, ())
            if now == held:
                continue
            lost = set(held).difference(now)
            running = any(other.name == trainer for other in state.admitted)
            # A node that left and came back in the same instant is in the pool since that instant.
            gone = {n for n in lost if running and state.pool.since.get(n, time) == time}
            self._close(still_open, lost - gone, time)
            self._close(still_open, gone, time, preempted=True)

    def _close(
        self, still_open: dict[Node, tuple[str, float]], nodes: Iterable[Node], time: float, *, preempted: bool = False
    ) -> None:
        for node in nodes:
            if node in self._row:
                trainer, since = still_open.pop(node)
                if time > since:
                    self._spans.append(Span(node, trainer, since, time, preempted))


def gantt_data(gantt: Gantt, line: Timeline, idle: Trace | None = None) -> dict[str, Any]:
    """Chart data for the page: one row per node with the trainers on it, in the form of `dashboard.timeline`.

    With the trace, rows also show when nodes were free. Rescales are marked where the timeline lost samples to them.
    """
    index = {trainer: i for i, trainer in enumerate(gantt.places, 1)}
    used = [Interval(span.node, span.start, span.end, index[span.trainer]) for span in gantt.spans]
    rows = {span.node for span in gantt.spans}
    free = [Interval(f.node, f.start, f.end) for f in (idle.fragments() if idle is not None else ()) if f.node in rows]
    nodes = tuple(dict.fromkeys(span.node for span in gantt.spans))
    found = gantt_of(Cells(gantt.window.start, gantt.window.end, _CELLS), free, used, nodes, _MOST_RUNS)
    cells = Cells(gantt.window.start, gantt.window.end, found["cells"])
    row = {node: i for i, node in enumerate(found["nodes"])}
    taken = sorted((span.end, span.node) for span in gantt.spans if span.preempted)
    rescaled = line.time[1:][np.diff(line.rescale) > 0]
    return {
        **found,
        "nodes": [shortened(node, 40) for node in found["nodes"]],
        "who": [{"id": None, "name": shortened(name, 60), "place": place} for name, place in gantt.places.items()],
        **preemption_marks([[row[node], cells.at(time)] for time, node in taken if node in row]),
        "preemptions": events_per_cell(cells, (time for time, _ in taken)),
        "rescales": events_per_cell(cells, rescaled.tolist()),
    }


def what_is_shown(gantt: Gantt, rows: int) -> str:
    """The chart in words."""
    if not gantt.spans:
        return f"No trainer ran on any node from {gantt.window} UTC."
    used: defaultdict[Node, float] = defaultdict(float)
    for span in gantt.spans:
        used[span.node] += span.seconds
    preempted = sum(span.preempted for span in gantt.spans)
    text = (
        f"{gantt.window} UTC: {sum(used.values()) / 3600:,.1f} node-hours by {len(gantt.places):,} trainers on "
        f"{len(used):,} nodes. {preempted:,} times a node was taken away from a trainer. "
        "A pixel shows what held in its middle."
    )
    return f"{text} Shown: {rows:,} of {len(used):,} nodes, evenly spread." if rows < len(used) else text
