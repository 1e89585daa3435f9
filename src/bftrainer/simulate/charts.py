"""Charts of the simulation report: efficiency over time, pool size, and the parts of the distance from the bound.

A replay and its metrics come in; HTML with inline SVG goes out. For the pool, the data goes out that the page draws
with the live page's code. `report.py` puts the charts on the page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from bftrainer.core.trace import Floats, Window, utc
from bftrainer.dashboard.html import escape
from bftrainer.dashboard.timeline import rounded_lines
from bftrainer.simulate.accounting import Loss
from bftrainer.simulate.metrics import Metrics
from bftrainer.simulate.replay import Replay
from bftrainer.simulate.svg import WIDTH, Frame, legend, picture, px
from bftrainer.simulate.timeline import Timeline

_BINS = 800
_MOST_SPANS = 240
_SPAN_HOURS = (1, 6, 24, 168)
_DIGITS = 4
"""Printed digits of U and its parts."""


@dataclass(frozen=True, slots=True)
class BoundPart:
    """One part of the bound, as printed."""

    name: str
    amount: float
    printed: str
    colour: str
    meaning: str
    samples: float | None = None
    """The part in samples, if known."""


def draw_efficiency(replay: Replay, metrics: Metrics) -> str:
    """U in spans of six hours (of one in a short replay, of a day or a week in a long one), with the bound."""
    if replay.best_value <= 0:
        return "<p>No node was there for any trainer: there is nothing to draw.</p>\n"
    hours = span_hours(metrics.hours)
    edges = np.append(np.arange(replay.start, replay.end, hours * 3600.0), replay.end)
    made, best = made_and_best(replay, edges)
    some = best > 1e-9 * best.max()
    level = np.where(some, made / np.where(some, best, 1.0), 0.0) * metrics.bound
    frame = Frame(
        Window(replay.start, replay.end), min(0.0, level.min()), 1.08 * max(metrics.bound, level.max()), height=260
    )
    parts = [frame.axes("unit of U")]
    floor = frame.y(0)
    for i in np.flatnonzero(some).tolist():
        x, end, y = frame.x(edges[i]), frame.x(edges[i + 1]), frame.y(level[i])
        words = f"{_minute(edges[i])} to {_minute(edges[i + 1])}: {level[i]:.3f}, {made[i] / best[i]:.1%} of the best"
        parts.append(
            f'<rect class="u" x="{px(x)}" y="{px(min(y, floor))}" width="{px(max(end - x - 1, 0.5))}" '
            f'height="{px(abs(floor - y))}"><title>{words}</title></rect>'
        )
    parts += [frame.across(metrics.bound, "bound"), frame.across(metrics.efficiency, "mean")]
    span = {1: "hour", 6: "six hours", 24: "day", 168: "week"}[hours]
    lines = [
        f"Every {span}: what was made, divided by the most that the pool of that time allowed at no cost, times the "
        "bound. This is in the unit of U; weighted by what was possible, the bars average to U."
    ]
    if not _value_is_samples(replay):
        lines.append("Losses are known by time in samples only, so under this objective single bars are estimates.")
    if not some.all():
        lines.append("There is no bar where nothing could have been made.")
    shown = [("var(--u)", f"each {span}"), ("var(--ink)", f"U of the whole replay, {metrics.efficiency:.{_DIGITS}f}")]
    shown.append(("var(--orange)", f"bound, {metrics.bound:.{_DIGITS}f}"))
    label = f"U by {span}, {metrics.efficiency:.3f} over all, bound {metrics.bound:.3f}"
    return f"<p>{escape(' '.join(lines))}</p>\n{legend(shown)}{picture(frame.height, label, parts)}"


def span_hours(hours: float) -> int:
    """Length of the spans: six hours, unless that gives hardly any bars or too many."""
    if hours < 24:
        return _SPAN_HOURS[0]
    return next((span for span in _SPAN_HOURS[1:] if hours / span <= _MOST_SPANS), _SPAN_HOURS[-1])


def made_and_best(replay: Replay, edges: Floats) -> tuple[Floats, Floats]:
    """The output between each two edges, and the most that was possible, in the objective's unit.

    The timeline has the outcome in samples. Under an objective with another unit, losses are subtracted from the value
    of the sizes: rescaling and preemption when they happened, waiting in proportion. The totals are right.
    """
    line = replay.timeline
    best = _between(line, line.best_value, edges)
    if _value_is_samples(replay):
        return np.diff(np.interp(edges, line.time, line.outcome)), best
    worth = _between(line, line.value, edges)
    made = worth * (1 - replay.lost_value["waiting"] / (worth.sum() or 1.0))
    losses: tuple[tuple[Loss, Floats], ...] = (("preemption", line.preemption), ("rescale", line.rescale))
    for why, lost in losses:
        if replay.lost[why] > 0:
            made -= np.diff(np.interp(edges, line.time, lost)) * (replay.lost_value[why] / replay.lost[why])
    return made, best


def _value_is_samples(replay: Replay) -> bool:
    return math.isclose(replay.value, replay.outcome, rel_tol=1e-6) and all(
        math.isclose(replay.lost_value[why], replay.lost[why], rel_tol=1e-6, abs_tol=1e-6) for why in replay.lost
    )


def _between(line: Timeline, rate: Floats, edges: Floats) -> Floats:
    """The integral between each two edges of a rate that holds from its time to the next."""
    upto = np.concatenate(([0.0], np.cumsum(rate[:-1] * np.diff(line.time))))
    return np.diff(np.interp(edges, line.time, upto))


def pool_data(replay: Replay) -> dict[str, Any] | None:
    """Chart data of the pool's size and the nodes in use; None if there is nothing to draw."""
    if replay.end <= replay.start:
        return None
    edges = np.linspace(replay.start, replay.end, _BINS + 1)
    line = replay.timeline
    pool, used = (rounded_lines(*binned(line.time, column, edges)) for column in (line.pool, line.used))
    return {"start": replay.start, "end": replay.end, "cells": _BINS, "pool": pool, "used": used}


def pool_words(replay: Replay, metrics: Metrics) -> str:
    """The pool chart in words, and how to read it."""
    if replay.end <= replay.start:
        return "The replay has no length: there is nothing to draw."
    minutes = (replay.end - replay.start) / _BINS / 60
    return (
        f"The line is the pool, {metrics.eq_nodes:,.1f} nodes on average (eq-nodes); the area is what trainers used, "
        f"{replay.used_node_seconds / (metrics.hours * 3600):,.1f} on average. Means over {minutes:,.1f} minutes; the "
        "pale band goes from the lowest to the highest in that time."
    )


def binned(time: Floats, column: Floats, edges: Floats) -> tuple[Floats, Floats, Floats]:
    """Lowest, mean and highest value between each two edges of a step function; 0 before the first step."""
    moments = np.unique(np.concatenate((time[(time > edges[0]) & (time < edges[-1])], edges)))
    # Of several rows at one instant the last is in force.
    row = np.searchsorted(time, moments[:-1], "right") - 1
    value = np.where(row >= 0, column[row], 0.0)
    first = np.searchsorted(moments, edges[:-1])
    mean = np.add.reduceat(value * np.diff(moments), first) / np.diff(edges)
    return np.minimum.reduceat(value, first), mean, np.maximum.reduceat(value, first)


def parts_of_bound(metrics: Metrics) -> tuple[BoundPart, ...]:
    """U and the four losses, rounded so that the printed parts add up to the printed bound."""
    lost = metrics.breakdown
    rows = (
        (lost.waiting, "Waiting", "starting up, or done but not noticed yet", metrics.waiting_cost_samples),
        (lost.rescale, "Rescale", "growing and shrinking by decision", metrics.rescale_cost_samples),
        (lost.preemption, "Preemption", "nodes taken away", metrics.preemption_cost_samples),
        (lost.allocation, "Allocation", "sizes below the best: a change would have cost more, or came late", None),
    )
    scale = 10**_DIGITS
    whole = [math.floor(amount * scale) for amount, *_ in rows]
    short = round(metrics.bound * scale) - round(metrics.efficiency * scale) - sum(whole)
    by_rest = sorted(range(len(rows)), key=lambda i: whole[i] - rows[i][0] * scale)
    for i in by_rest[: max(short, 0)]:
        whole[i] += 1
    parts = [BoundPart("U", metrics.efficiency, printed(metrics.efficiency), "var(--u)", "the efficiency reached")]
    for (amount, name, meaning, samples), units in zip(rows, whole, strict=True):
        parts.append(BoundPart(name, amount, printed(units / scale), f"var(--{name.lower()})", meaning, samples))
    return tuple(parts)


def printed(amount: float) -> str:
    """U, the bound or a part of it as text, in the same form everywhere on the page."""
    return f"{amount:.{_DIGITS}f}"


def draw_breakdown(metrics: Metrics) -> str:
    """The bound as one bar of its parts; below it the losses alone, enlarged."""
    parts = parts_of_bound(metrics)
    whole = sum(max(part.amount, 0.0) for part in parts)
    if whole <= 0:
        return ""
    reached = max(parts[0].amount, 0.0) / whole * WIDTH
    shapes = _bar(parts, whole, 4)
    if reached > 100:
        shapes.append(f'<text class="on" x="12" y="26">U {parts[0].printed}</text>')
    if whole - max(parts[0].amount, 0.0) > 1e-9 * whole:
        shapes.append(f'<path class="zoom" d="M{px(reached)} 38L0 62H{WIDTH}V38Z"/>')
        shapes += _bar(parts[1:], whole - max(parts[0].amount, 0.0), 62)
    return picture(100, "The bound as the sum of U and its losses", shapes, kind="narrow")


def _bar(parts: tuple[BoundPart, ...], whole: float, y: float) -> list[str]:
    shapes, x = [], 0.0
    for part in parts:
        wide = max(part.amount, 0.0) / whole * WIDTH
        if wide > 0:
            title = f"<title>{escape(part.name)} {part.printed}</title>"
            shapes.append(
                f'<rect fill="{part.colour}" x="{px(x)}" y="{px(y)}" width="{px(wide)}" height="34">{title}</rect>'
            )
        x += wide
    return shapes


def _minute(time: float) -> str:
    return utc(time)[:16].replace("T", " ")
