"""Statistics of a trace: how much of a machine is idle, and in what pieces. Includes the paper's Table 1 and §2.1.

`bftrainer trace stats` prints them, `plot.py` draws them. Window rule: `events` counts change times in [from, to];
joins and leaves count in (from, to]; fragments with end > from are cut to the window before their lengths are measured.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bftrainer.core.trace import Floats, Trace, Window
from bftrainer.errors import InputError

SHORT_S = 600.0
"""Fragments under ten minutes are short, as in the paper."""
QUANTILES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
HAZARD_AHEAD_S = (60.0, 120.0, 300.0)
HAZARD_AGES_S = (0.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0, 7200.0, 14400.0, np.inf)
LEAST_EXPOSURE = 3600.0
"""Node-seconds below which a hazard is left out rather than guessed."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Number of idle nodes, weighted by time."""

    min: int
    p05: int
    p50: int
    p95: int
    max: int
    mean: float


@dataclass(frozen=True, slots=True)
class HazardRow:
    """For nodes idle for between `age_from_s` and `age_to_s`: the probability of leaving within each time ahead.

    None: the trace has too little data to say.
    """

    age_from_s: float
    age_to_s: float | None
    node_hours: float
    leave_within: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Horizon:
    """A forward-looking time that suits the trace, with the figures it is based on."""

    seconds: float | None
    mean_between_leaves_s: float | None
    leave_within: float | None
    """Probability that some node leaves the pool within `seconds` of an event."""
    node_leaves_within: float | None
    """Probability that a given idle node leaves within `seconds`."""
    reasoning: str


@dataclass(frozen=True, slots=True)
class IdleStats:
    """All figures of `trace stats`. Field names are the JSON keys."""

    events: int
    inc_events: int
    dec_events: int
    inc_per_hour: float
    dec_per_hour: float
    node_hours: float
    eq_nodes: float
    ratio: float
    fragments: int
    short_fragment_share: float | None
    short_fragment_node_time_share: float | None
    hours: float
    nodes: int
    nodes_known: bool
    window: tuple[float, float]
    fragment_quantiles_s: dict[str, float]
    mean_fragment_s: float | None
    nodes_per_join: float | None
    nodes_per_leave: float | None
    pool: PoolSize
    hazard: list[HazardRow]
    horizon: Horizon

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain values for JSON."""
        return asdict(self)


def idle_stats(trace: Trace, window: Window | None = None) -> IdleStats:
    """The figures of `trace` in `window`, by default the whole trace."""
    window = window or trace.window
    if window.start < trace.window.start or window.end > trace.window.end:
        raise InputError(f"the trace covers {trace.window}, not all of {window}")
    leaves = trace.end[~trace.open]
    times = np.unique(np.concatenate((trace.start, leaves)))
    joins_in = trace.start[(trace.start > window.start) & (trace.start <= window.end)]
    leaves_in = leaves[(leaves > window.start) & (leaves <= window.end)]
    join_times, leave_times = np.unique(joins_in), np.unique(leaves_in)
    inside = (trace.end > window.start) & (trace.start < window.end)
    start = np.maximum(trace.start[inside], window.start)
    end = np.minimum(trace.end[inside], window.end)
    length = end - start
    total = float(length.sum())
    short = length < SHORT_S
    hours = window.hours
    event_times = times[(times >= window.start) & (times <= window.end)]
    return IdleStats(
        events=len(event_times),
        inc_events=len(join_times),
        dec_events=len(leave_times),
        inc_per_hour=len(join_times) / hours,
        dec_per_hour=len(leave_times) / hours,
        node_hours=total / 3600,
        eq_nodes=total / window.seconds,
        ratio=total / window.seconds / len(trace.nodes) if trace.nodes else 0.0,
        fragments=len(length),
        short_fragment_share=float(short.mean()) if len(length) else None,
        short_fragment_node_time_share=float(length[short].sum() / total) if total else None,
        hours=hours,
        nodes=len(trace.nodes),
        nodes_known=trace.nodes_known,
        window=(window.start, window.end),
        fragment_quantiles_s=_quantiles(length),
        mean_fragment_s=total / len(length) if len(length) else None,
        nodes_per_join=len(joins_in) / len(join_times) if len(join_times) else None,
        nodes_per_leave=len(leaves_in) / len(leave_times) if len(leave_times) else None,
        pool=_pool_size(*pool_steps(trace, window), window),
        hazard=hazard(trace, window),
        horizon=_horizon(trace, window, event_times, leave_times),
    )


def pool_steps(trace: Trace, window: Window) -> tuple[Floats, npt.NDArray[np.int64]]:
    """The size of the pool over time: times from the window's start on, and the number of idle nodes from each on."""
    inside = (trace.end > window.start) & (trace.start < window.end)
    start = np.maximum(trace.start[inside], window.start)
    end = trace.end[inside]
    end = end[end < window.end]
    times, where = np.unique(np.concatenate(([window.start], start, end)), return_inverse=True)
    change = np.zeros(len(times), dtype=np.int64)
    np.add.at(change, where[1 : 1 + len(start)], 1)
    np.add.at(change, where[1 + len(start) :], -1)
    return times, np.cumsum(change)


def binned_pool(trace: Trace, window: Window, bins: int) -> tuple[Floats, Floats]:
    """The mean pool size in `bins` equal spans of the window: their edges and the means."""
    times, size = pool_steps(trace, window)
    edges = np.linspace(window.start, window.end, bins + 1)
    node_seconds = np.concatenate(([0.0], np.cumsum(size[:-1] * np.diff(times))))
    last = np.searchsorted(times, edges, "right") - 1
    at_edges = node_seconds[last] + size[last] * (edges - times[last])
    return edges, np.diff(at_edges) / np.diff(edges)


def hazard(trace: Trace, window: Window) -> list[HazardRow]:
    """The probability that a node leaves soon, by how long it has been idle; exact, by integrating over every instant.

    Ages are true ages, so a fragment under way when the trace begins, whose age is unknown, is left out. So is every
    instant from which the time ahead reaches past the end of what is known.
    """
    known = (trace.start > trace.window.start) & (trace.end > window.start) & (trace.start < window.end)
    closed, is_open = known & ~trace.open, known & trace.open
    start, end = trace.start[closed], trace.end[closed]
    rows = []
    for low, high in itertools.pairwise(HAZARD_AGES_S):
        reaches = end - start > low  # the other fragments end before that age, and before any later one
        start, end = start[reaches], end[reaches]
        first, last = _at_age(start, end, low, high, window)
        open_first, open_last = _at_age(trace.start[is_open], trace.end[is_open], low, high, window)
        closed_s = _total(last - first)
        within: dict[str, float | None] = {}
        for ahead in HAZARD_AHEAD_S:
            # In a fragment still open at the end, only instants whose time ahead is known count.
            exposure = closed_s + _total(np.minimum(open_last, trace.end[is_open] - ahead) - open_first)
            about_to_leave = _total(last - np.maximum(first, end - ahead))
            within[f"{ahead:.0f}"] = about_to_leave / exposure if exposure >= LEAST_EXPOSURE else None
        node_hours = (closed_s + _total(open_last - open_first)) / 3600
        rows.append(HazardRow(low, None if np.isinf(high) else high, node_hours, within))
    return rows


def _at_age(start: Floats, end: Floats, low: float, high: float, window: Window) -> tuple[Floats, Floats]:
    """Starts and ends of the spans in which fragments are in pool and window, at an age from `low` to `high`."""
    return np.maximum(start + low, window.start), np.minimum(np.minimum(start + high, end), window.end)


def _total(spans: Floats) -> float:
    """The sum of the spans of positive length."""
    return float(np.maximum(spans, 0).sum())


def _horizon(trace: Trace, window: Window, events: Floats, leaves: Floats) -> Horizon:
    """The mean time between leaves, as a recommended horizon.

    A decision assumes that no node leaves within the horizon, and this is how long that holds on average.
    """
    if len(leaves) < 2:
        return Horizon(None, None, None, None, "fewer than two leaves in the window: nothing to go by")
    between = window.seconds / len(leaves)
    seconds = float(np.clip(round(between, -1) if between < 600 else round(between, -2), 10, 3600))
    following = np.searchsorted(leaves, events, "right")
    judged = events + seconds <= window.end
    next_leave = np.append(leaves, np.inf)[following]
    disturbed = float((next_leave - events <= seconds)[judged].mean()) if judged.any() else None
    # A node idle at a random instant leaves within `seconds` for the last `seconds` of its fragment.
    inside = (trace.end > window.start) & (trace.start < window.end)
    start = np.maximum(trace.start[inside], window.start)
    end = np.minimum(trace.end[inside], window.end)
    gone = np.minimum(end - start, seconds)[~trace.open[inside]].sum() / (end - start).sum()
    reasoning = (
        f"a node or a group of nodes leaves the pool every {between:.0f} s on average, and a decision assumes that no "
        f"node leaves within its horizon: with {seconds:.0f} s, "
        + (f"{disturbed:.0%} of decisions see a leave in that time, but " if disturbed is not None else "")
        + f"only {gone:.0%} of idle nodes are gone by then. Shorter forgoes rescales that would pay; longer pays for "
        "rescales that a leave undoes"
    )
    return Horizon(seconds, between, disturbed, float(gone), reasoning)


def _quantiles(length: Floats) -> dict[str, float]:
    if not len(length):
        return {}
    values = np.quantile(length, QUANTILES)
    return {f"{q:g}": float(v) for q, v in zip(QUANTILES, values, strict=True)}


def _pool_size(times: Floats, size: npt.NDArray[np.int64], window: Window) -> PoolSize:
    lasting = np.diff(np.append(times, window.end))
    order = np.argsort(size, kind="stable")
    by_then = np.cumsum(lasting[order]) / window.seconds

    def at(share: float) -> int:
        return int(size[order][min(int(np.searchsorted(by_then, share)), len(size) - 1)])

    counted = size[lasting > 0]
    return PoolSize(
        min=int(counted.min()),
        p05=at(0.05),
        p50=at(0.5),
        p95=at(0.95),
        max=int(counted.max()),
        mean=float((size * lasting).sum() / window.seconds),
    )
