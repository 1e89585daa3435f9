"""Windows: cuts replays and traces into windows of six hours, and into the spans between events."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bftrainer.core.trace import Floats, Window
from bftrainer.core.trainer import Trainer
from bftrainer.paper.runs import RunResult
from bftrainer.simulate.metrics import static_time
from bftrainer.simulate.timeline import Timeline

WINDOW_S = 6 * 3600.0
MOST_WINDOWS = 28
"""Most windows: a week of them, as in the paper's figures."""


def six_hours(window: Window, end: float | None = None) -> Floats:
    """The edges of the whole six-hour windows of the first week, or of a shorter replay; at least one window."""
    last = window.end if end is None else min(end, window.end)
    count = min(int((last - window.start) // WINDOW_S), MOST_WINDOWS)
    if count < 1:
        return np.array([window.start, last])
    edges: Floats = window.start + WINDOW_S * np.arange(count + 1, dtype=np.float64)
    return edges


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Output and costs in each window of a replay."""

    outcome: Floats
    """Samples, less costs."""
    preemption: Floats
    rescale: Floats
    eq_nodes: Floats
    seconds: Floats


def spans(timeline: Timeline, edges: Floats) -> Spans:
    """Cut a replay at `edges`: output is steady between steps, costs occur at steps."""
    time = timeline.time
    gross = timeline.outcome + timeline.preemption + timeline.rescale
    at = np.clip(np.searchsorted(time, edges, "right") - 1, 0, len(time) - 1)
    preemption, rescale = (np.diff(column[at]) for column in (timeline.preemption, timeline.rescale))
    node_seconds = np.concatenate(([0.0], np.cumsum(timeline.pool[:-1] * np.diff(time))))
    seconds = np.diff(edges)
    return Spans(
        outcome=np.diff(np.interp(edges, time, gross)) - preemption - rescale,
        preemption=preemption,
        rescale=rescale,
        eq_nodes=np.diff(np.interp(edges, time, node_seconds)) / seconds,
        seconds=seconds,
    )


def efficiencies(result: RunResult, trials: tuple[Trainer, ...], edges: Floats) -> Floats:
    """U of each window, for a workload of one kind of trial that does not end: outcome over that of static nodes."""
    cut = spans(result.timeline, edges)
    policy = result.run.policy()
    endless = [replace(t, work=math.inf, submit=0.0) for t in trials[: result.run.max_parallel]]
    return np.array(
        [
            static_time(endless, policy, eq, 0.0, made) / seconds if eq > 0 else 0.0
            for eq, made, seconds in zip(cut.eq_nodes.tolist(), cut.outcome.tolist(), cut.seconds.tolist(), strict=True)
        ]
    )


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """The spans between contiguous events of the pool."""

    time: Floats
    seconds: Floats
    gross: Floats
    """Samples made from an event to the next."""
    rescale: Floats
    """Samples lost to rescaling at the event that begins the span."""
    preempted: npt.NDArray[np.bool_]
    """Whether a trainer was preempted at that event."""


def steps(timeline: Timeline) -> Steps:
    """Cut a replay at every event."""
    gross = timeline.outcome + timeline.preemption + timeline.rescale
    return Steps(
        time=timeline.time[:-1],
        seconds=np.diff(timeline.time),
        gross=np.diff(gross),
        rescale=np.diff(timeline.rescale, prepend=0.0)[:-1],
        preempted=np.diff(timeline.preemption, prepend=0.0)[:-1] > 0,
    )


def share_followed(times: Floats, by: Floats, within_s: float, end: float) -> float | None:
    """The share of `times` followed by one of `by` within `within_s` seconds; times too near the end do not count."""
    judged = times[times + within_s <= end]
    if not len(judged):
        return None
    following = np.append(by, np.inf)[np.searchsorted(by, judged, "right")]
    return float((following - judged <= within_s).mean())
