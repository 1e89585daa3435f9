"""Statistics of a trace: how much of a machine is idle, and in what pieces. Includes the paper's Table 1 and §2.1.

`bftrainer trace stats` prints them, `plot.py` draws them. Window rule: `events` counts change times in [from, to];
joins and leaves count in (from, to]; fragments with end > from are cut to the window before their lengths are measured.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bftrainer.core.trace import Flags, Floats, Trace, Window
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


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Idle times of groups: `nodes` nodes that became idle together and ceased to be together.

    No figure depends on which nodes these are, and large machines have a hundred times fewer groups than fragments.
    """

    start: Floats
    end: Floats
    open: Flags
    nodes: npt.NDArray[np.int64]

    @classmethod
    def of(cls, trace: Trace) -> _Groups:
        """The groups of neighbouring rows of a trace."""
        start, end, is_open = trace.start, trace.end, trace.open
        new = np.ones(len(trace), dtype=np.bool_)
        new[1:] = (start[1:] != start[:-1]) | (end[1:] != end[:-1]) | (is_open[1:] != is_open[:-1])
        at = np.flatnonzero(new)
        return cls(start[at], end[at], is_open[at], np.diff(at, append=len(trace)))

    def where(self, keep: Flags) -> _Groups:
        """Some of the groups."""
        return _Groups(self.start[keep], self.end[keep], self.open[keep], self.nodes[keep])

    def cut(self, window: Window) -> _Groups:
        """The groups that are idle in `window`, their times cut to it."""
        inside = self.where((self.end > window.start) & (self.start < window.end))
        return replace(inside, start=np.maximum(inside.start, window.start), end=np.minimum(inside.end, window.end))


def idle_stats(trace: Trace, window: Window | None = None) -> IdleStats:
    """The figures of `trace` in `window`, by default the whole trace."""
    window = window or trace.window
    if window.start < trace.window.start or window.end > trace.window.end:
        raise InputError(f"the trace covers {trace.window}, not all of {window}")
    groups = _Groups.of(trace)
    leaving = groups.where(~groups.open)
    times = np.union1d(groups.start, leaving.end)
    joins_in = (groups.start > window.start) & (groups.start <= window.end)
    leaves_in = (leaving.end > window.start) & (leaving.end <= window.end)
    join_times, leave_times = np.unique(groups.start[joins_in]), np.unique(leaving.end[leaves_in])
    inside = groups.cut(window)
    length = inside.end - inside.start
    fragments = int(inside.nodes.sum())
    total = _node_seconds(length, inside.nodes)
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
        fragments=fragments,
        short_fragment_share=int(inside.nodes[short].sum()) / fragments if fragments else None,
        short_fragment_node_time_share=_node_seconds(length[short], inside.nodes[short]) / total if total else None,
        hours=hours,
        nodes=len(trace.nodes),
        nodes_known=trace.nodes_known,
        window=(window.start, window.end),
        fragment_quantiles_s=_quantiles(length, inside.nodes),
        mean_fragment_s=total / fragments if fragments else None,
        nodes_per_join=int(groups.nodes[joins_in].sum()) / len(join_times) if len(join_times) else None,
        nodes_per_leave=int(leaving.nodes[leaves_in].sum()) / len(leave_times) if len(leave_times) else None,
        pool=_pool_size(*pool_steps(trace, window), window),
        hazard=hazard(trace, window),
        horizon=_horizon(inside, window, event_times, leave_times),
    )


def pool_steps(trace: Trace, window: Window) -> tuple[Floats, npt.NDArray[np.int64]]:
    """The size of the pool over time: times from the window's start on, and the number of idle nodes from each on."""
    inside = _Groups.of(trace).cut(window)
    leaving = inside.where(inside.end < window.end)
    times, where = np.unique(np.concatenate(([window.start], inside.start, leaving.end)), return_inverse=True)
    change = np.zeros(len(times), dtype=np.int64)
    np.add.at(change, where[1:], np.concatenate((inside.nodes, -leaving.nodes)))
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
    groups = _Groups.of(trace)
    known = groups.where(
        (groups.start > trace.window.start) & (groups.end > window.start) & (groups.start < window.end)
    )
    closed, still_open = known.where(~known.open), known.where(known.open)
    rows = []
    for low, high in itertools.pairwise(HAZARD_AGES_S):
        # The other fragments end before that age, and before any later one.
        closed = closed.where(closed.end - closed.start > low)
        first, last = _at_age(closed, low, high, window)
        open_first, open_last = _at_age(still_open, low, high, window)
        closed_s = _node_seconds(last - first, closed.nodes)
        within: dict[str, float | None] = {}
        for ahead in HAZARD_AHEAD_S:
            # In a fragment still open at the end, only instants whose time ahead is known count.
            judged = np.minimum(open_last, still_open.end - ahead) - open_first
            exposure = closed_s + _node_seconds(judged, still_open.nodes)
            about_to_leave = _node_seconds(last - np.maximum(first, closed.end - ahead), closed.nodes)
            within[f"{ahead:.0f}"] = about_to_leave / exposure if exposure >= LEAST_EXPOSURE else None
        node_hours = (closed_s + _node_seconds(open_last - open_first, still_open.nodes)) / 3600
        rows.append(HazardRow(low, None if np.isinf(high) else high, node_hours, within))
    return rows


def _at_age(groups: _Groups, low: float, high: float, window: Window) -> tuple[Floats, Floats]:
    """Starts and ends of the spans in which fragments are in pool and window, at an age from `low` to `high`."""
    ageing_until = np.minimum(groups.start + high, groups.end)
    return np.maximum(groups.start + low, window.start), np.minimum(ageing_until, window.end)


def _node_seconds(spans: Floats, nodes: npt.NDArray[np.int64]) -> float:
    """The sum of the spans of positive length, each times its number of nodes."""
    return float((np.maximum(spans, 0) * nodes).sum())


def _horizon(inside: _Groups, window: Window, events: Floats, leaves: Floats) -> Horizon:
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
    leaving = inside.where(~inside.open)
    leaving_s = _node_seconds(np.minimum(leaving.end - leaving.start, seconds), leaving.nodes)
    gone = leaving_s / _node_seconds(inside.end - inside.start, inside.nodes)
    reasoning = (
        f"a node or a group of nodes leaves the pool every {between:.0f} s on average, and a decision assumes that no "
        f"node leaves within its horizon: with {seconds:.0f} s, "
        + (f"{disturbed:.0%} of decisions see a leave in that time, but " if disturbed is not None else "")
        + f"only {gone:.0%} of idle nodes are gone by then. Shorter forgoes rescales that would pay; longer pays for "
        "rescales that a leave undoes"
    )
    return Horizon(seconds, between, disturbed, gone, reasoning)


def _quantiles(length: Floats, nodes: npt.NDArray[np.int64]) -> dict[str, float]:
    """Quantiles of fragment lengths, interpolated as `numpy.quantile` does, with `nodes` fragments of each length."""
    if not len(length):
        return {}
    order = np.argsort(length)
    length, through = length[order], np.cumsum(nodes[order])
    place = np.array(QUANTILES) * (through[-1] - 1)
    below = length[np.searchsorted(through, np.floor(place), "right")]
    above = length[np.searchsorted(through, np.ceil(place), "right")]
    share = place - np.floor(place)
    values = np.where(share < 0.5, below + (above - below) * share, above - (above - below) * (1 - share))
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
