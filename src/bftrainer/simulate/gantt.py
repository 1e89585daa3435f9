"""Which trainer ran on which node when, in a window of a replay.

`GanttRecorder.watch` is handed to `replay`, which calls it after every decision; `finish` then gives the `Gantt`, and
`draw_gantt` its picture for the report. Only what lies in the window is kept, so memory does not grow with the trace.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bftrainer.core.pool import Node
from bftrainer.core.trace import Window
from bftrainer.scheduler import Plan, State
from bftrainer.simulate.replay import Replay
from bftrainer.simulate.svg import WIDTH, Frame, escape, legend, picture, px, shortened

MOST_ROWS = 150
MOST_SPANS = 15_000
"""At some 25 bytes each, what a page can carry."""
_MOST_NAMED = 14
_GOLDEN_ANGLE = 137.508
_LABEL_PX = 10
_LEAST_TICKED_PX = 3
"""In a shorter span the tick would hide the colour."""


@dataclass(frozen=True, slots=True)
class Span:
    """A node serving a trainer without a break, cut to the window."""

    node: Node
    trainer: str
    start: float
    end: float
    preempted: bool = False
    """It ended because the node left the pool."""

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Gantt:
    """The spans of a window, by node in the machine's order, then by time."""

    window: Window
    spans: tuple[Span, ...]
    places: Mapping[str, int]
    """The place in the workload of each trainer that appears: what its colour hangs on, in every window the same."""


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
        """See a decision. Nodes change hands at decisions only, but for those of the last trainer to finish."""
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
        """What was recorded, given how the replay went. The window ends with the replay at the latest."""
        window = self._window
        start, end = max(window.start, replay.start), min(window.end, replay.end)
        if start < end:
            window = Window(start, end)
        rows = {row.name: (i, row.end) for i, row in enumerate(replay.trainers)}
        still_open = self._at_start() if self._open is None else self._open
        found = [*self._spans, *(Span(n, trainer, since, window.end) for n, (trainer, since) in still_open.items())]
        spans = []
        for span in found:
            # Nothing is decided, hence nothing seen, when the last trainer finishes and no other waits.
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
        """End the spans of nodes that trainers held and hold no more before anything is decided."""
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


def colour(place: int) -> str:
    """The colour of the trainer at some place in the workload: neighbours, which run together, differ most."""
    return f"hsl({place * _GOLDEN_ANGLE % 360:.0f} {(62, 48, 75)[place % 3]}% {(52, 62, 44)[place // 3 % 3]}%)"


def draw_gantt(gantt: Gantt) -> str:
    """Nodes as rows, trainers as colours, with a legend and a word on what is not shown."""
    if not gantt.spans:
        return f"<p>No trainer ran on any node from {escape(gantt.window)} UTC.</p>\n"
    used: defaultdict[Node, float] = defaultdict(float)
    by_trainer: defaultdict[str, float] = defaultdict(float)
    for span in gantt.spans:
        used[span.node] += span.seconds
        by_trainer[span.trainer] += span.seconds
    busiest = set(sorted(used, key=lambda node: -used[node])[:MOST_ROWS])
    rows = {node: i for i, node in enumerate(node for node in used if node in busiest)}
    spans = [span for span in gantt.spans if span.node in rows]
    notes = [_what_is_shown(gantt, used, rows)]
    if len(spans) > MOST_SPANS:
        left_out = sorted(spans, key=lambda span: span.seconds)[:-MOST_SPANS]
        notes.append(f"{len(left_out):,} spans of {left_out[-1].seconds:,.0f} s or less are not drawn.")
        spans = list(set(spans).difference(left_out))
    largest = sorted(by_trainer, key=lambda name: -by_trainer[name])[:_MOST_NAMED]
    named = [
        (colour(gantt.places[name]), shortened(name, 40)) for name in sorted(largest, key=gantt.places.__getitem__)
    ]
    if len(by_trainer) > len(largest):
        notes.append(f"The legend names the {_MOST_NAMED} largest of {len(by_trainer):,} trainers; hover for others.")
    body = _draw_rows(gantt, rows, spans, by_trainer)
    return f"<p>{escape(' '.join(notes))}</p>\n{legend(named)}{body}"


def _what_is_shown(gantt: Gantt, used: Mapping[Node, float], rows: Mapping[Node, int]) -> str:
    total = sum(used.values())
    preempted = sum(span.preempted for span in gantt.spans)
    text = (
        f"{gantt.window} UTC: {total / 3600:,.1f} node-hours on {len(used):,} nodes. {preempted:,} spans ended "
        "because the node was taken away; a tick ends those that have room for one."
    )
    if len(rows) < len(used):
        share = sum(used[node] for node in rows) / total
        text += f" Shown: the busiest {len(rows)} of {len(used):,} nodes, with {share:.0%} of these node-hours."
    return text


def _draw_rows(gantt: Gantt, rows: Mapping[Node, int], spans: Iterable[Span], seconds_of: Mapping[str, float]) -> str:
    pitch = min(max(720 / len(rows), 6.0), 18.0)
    bar = px(pitch - (1 if pitch < 10 else 2))
    frame = Frame(gantt.window, 0, len(rows), pitch * len(rows) + 48, left=118.0, top=8.0)
    parts = [frame.time_axis()]
    every = math.ceil(_LABEL_PX / pitch)
    for node, i in rows.items():
        if i % every == 0:
            y = frame.top + pitch * i + pitch / 2 + 3
            parts.append(f'<text class="end small" x="110" y="{px(y)}">{escape(shortened(node, 20))}</text>')
    paths: defaultdict[str, list[str]] = defaultdict(list)
    ticks = []
    for span in spans:
        row = px(frame.top + pitch * rows[span.node])
        x, end = px(frame.x(span.start)), frame.x(span.end)
        # A hair's breadth at least, or a short span would not be seen at all.
        wide = px(max(end - float(x), 0.3))
        paths[span.trainer].append(f"M{x} {row}h{wide}v{bar}h-{wide}z")
        if span.preempted and end - float(x) >= _LEAST_TICKED_PX:
            ticks.append(f"M{px(min(end, WIDTH - frame.right))} {row}v{bar}")
    for trainer, path in paths.items():
        words = f"{shortened(trainer)}: {seconds_of[trainer] / 3600:,.1f} node-hours in this window"
        fill = colour(gantt.places[trainer])
        parts.append(f'<path fill="{fill}" d="{"".join(path)}"><title>{escape(words)}</title></path>')
    parts.append(f'<path class="tick" d="{"".join(ticks)}"/>')
    return picture(frame.height, f"Which trainer ran on which node, {gantt.window} UTC", parts)
