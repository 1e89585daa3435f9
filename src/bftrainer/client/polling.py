"""Polling of a controller as generators: the requests and their order, without a network and without sleeping.

A polling generator yields a request, a sleep or an item for the caller, and is sent the answers. `bftrainer.client`
carries generators out, blocking or awaiting, so that the rules are written once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bftrainer.client.api import ApiClient, RefusedError, UnreachableError
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.elastic.metrics import Position
from bftrainer.errors import InputError
from bftrainer.util.backoff import Backoff

Row = dict[str, Any]
"""A trainer as the HTTP API describes it."""
T = TypeVar("T")

"""Final states of a trainer."""
_BACKOFF = Backoff(0.5, 15.0)
_PAGE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the controller; its answer is sent into the generator, or its error thrown."""

    question: Callable[[ApiClient], Any]


@dataclass(frozen=True, slots=True)
class Sleep:
    """A time to wait."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Emit:
    """An item for the caller."""

    value: Any


Polling = Generator[Request | Sleep | Emit, Any, T]


@dataclass(frozen=True, slots=True)
class Point:
    """A trainer's reports at one moment."""

    epoch: int
    step: int
    samples: int
    metrics: Mapping[str, float]
    state: str
    at: Mapping[str, Position] = field(default_factory=dict)
    """Position (epoch, step, samples) of each metric. An evaluation takes time: training may be further by now."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A trainer's progress and reports at one of the recorded times."""

    time: float
    """Seconds since 1970."""
    samples: int
    metrics: Mapping[str, float]
    at: Mapping[str, Position]
    """Position (epoch, step, samples) of each metric."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that a worker printed."""

    time: str
    """Time of the line in UTC, as `bftrainer logs` shows it."""
    worker: str
    node: str
    text: str


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Rules for a controller that is away: how long to wait, by which clock, and where to report it."""

    seconds: Callable[[], float]
    """How long to wait; 0 until a controller has answered for the first time: before that there is none to wait for."""
    clock: Callable[[], float]
    tell: Callable[[str], None]


def is_away(problem: BaseException) -> bool:
    """Whether the same request may succeed later: no answer, or the controller is in trouble."""
    return isinstance(problem, UnreachableError) or (isinstance(problem, RefusedError) and problem.status >= 500)


def patiently(question: Callable[[ApiClient], T], patience: RetryPolicy, until: float = math.inf) -> Polling[T]:
    """An answer, even if the controller is away for a while. For requests that may be sent twice.

    `until` is the caller's deadline by the clock of `patience`: after it this raises TimeoutError.
    """
    lost_at: float | None = None
    failures = 0
    while True:
        try:
            found: T = yield Request(question)
        except (UnreachableError, RefusedError) as problem:
            if not is_away(problem):
                raise
            if lost_at is None:
                lost_at = patience.clock()
                if patience.seconds() > 0:
                    patience.tell(f"{problem} (waiting for it)")
            left = patience.seconds() - (patience.clock() - lost_at)
            if left <= 0:
                raise
            if patience.clock() >= until:
                raise TimeoutError(f"the controller is away: {problem}") from None
            failures += 1
            yield Sleep(min(_BACKOFF.wait_s(failures), left, max(0.0, until - patience.clock())))
        else:
            if lost_at is not None:
                patience.tell("the controller is back")
            return found


def members(group: str, patience: RetryPolicy, until: float = math.inf) -> Polling[list[Row]]:
    """All trainers of a group, including those that finished long ago."""
    rows = yield from patiently(lambda c: c.trainers(all=True), patience, until)
    found = [row for row in rows if row.get("group") and row["group"] == group]
    if not found:
        raise InputError(f"there is no trainer of a group {group!r:.80}")
    return found


def cancelling(group: str, patience: RetryPolicy) -> Polling[list[Row]]:
    """End all trainers of a group; returns the rows of those that were unfinished."""
    going = [row["id"] for row in (yield from members(group, patience)) if row["state"] not in FINISHED]
    rows = []
    for ref in going:
        rows.append((yield from patiently(lambda c: c.cancel(ref), patience)))  # noqa: B023 - asked before the next
    return rows


def remembering(ref: str, patience: RetryPolicy) -> Polling[list[Moment]]:
    """The recorded history of a trainer's reports."""
    found = yield from patiently(lambda c: c.history(ref), patience)
    return [
        Moment(
            point["time"],
            point["samples"],
            _numbers(point["metrics"]),
            {name: Position(*at) for name, at in (point.get("metrics_at") or {}).items()},
        )
        for point in found["points"]
    ]


def waiting(
    refs: Sequence[str] | None, patience: RetryPolicy, poll_s: float, timeout_s: float | None, group: str | None = None
) -> Polling[list[Row]]:
    """Wait until trainers, or all of a group, are finished; returns their last rows. Raises TimeoutError."""
    begun = patience.clock()
    until = math.inf if timeout_s is None else begun + timeout_s
    rows: dict[str, Row] = {}
    ids = []
    if refs is None:
        refs = [row["id"] for row in (yield from members(group or "", patience, until))]
    for ref in refs:
        found = yield from patiently(lambda c: c.trainer(ref), patience, until)  # noqa: B023 - asked before the next
        # By id from now on: another trainer may get the name of one that is finished.
        ids.append(found["id"])
        rows[found["id"]] = found
    while pending := [ref for ref in rows if rows[ref]["state"] not in FINISHED]:
        left = math.inf if timeout_s is None else timeout_s - (patience.clock() - begun)
        if left <= 0:
            names = ", ".join(rows[ref]["name"] for ref in pending[:5]) + (", …" if len(pending) > 5 else "")
            raise TimeoutError(f"not finished after {timeout_s:g} s: {names}")
        yield Sleep(min(poll_s, left))
        rows |= yield from _look_again(pending, patience, until)
    return [rows[ref] for ref in ids]


def _look_again(ids: Sequence[str], patience: RetryPolicy, until: float = math.inf) -> Polling[dict[str, Row]]:
    """Rows of trainers, with one request for several trainers where possible."""
    listed: dict[str, Row] = {}
    if len(ids) > 1:
        listed = {row["id"]: row for row in (yield from patiently(lambda c: c.trainers(), patience, until))}
    found = {}
    for ref in ids:
        # Trainers that finished long ago are not listed; and the last row of a trainer should be the detailed one.
        if ref not in listed or listed[ref]["state"] in FINISHED:
            found[ref] = yield from patiently(lambda c: c.trainer(ref), patience, until)  # noqa: B023
        else:
            found[ref] = listed[ref]
    return found


def reporting(ref: str, patience: RetryPolicy, poll_s: float) -> Polling[None]:
    """Emit a `Point` whenever a trainer has reported something new, until it is finished."""
    row = yield from patiently(lambda c: c.trainer(ref), patience)
    ref, before = row["id"], None
    while True:
        point = as_point(row)
        known = (point.epoch, point.step, point.metrics, point.at)
        if point.metrics and known != before:
            yield Emit(point)
            before = known
        if row["state"] in FINISHED:
            return
        yield Sleep(poll_s)
        row = (yield from _look_again([ref], patience))[ref]


def as_point(row: Mapping[str, Any]) -> Point:
    """The reports in a trainer's row."""
    metrics = _numbers(row["metrics"] or {})
    at = {name: Position(**place) for name, place in (row.get("metrics_at") or {}).items()}
    return Point(row["epoch"], row["step"], row["samples"], metrics, row["state"], at)


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as numbers. JSON has no NaN, so the API sends null for it."""
    return {name: math.nan if value is None else float(value) for name, value in found.items()}


def reading(ref: str, patience: RetryPolicy, poll_s: float, tail: int | None, follow: bool) -> Polling[None]:
    """Emit a `LogLine` for each line of a trainer's log: the last ones or all, and with `follow` the lines to come."""
    ref = (yield from patiently(lambda c: c.trainer(ref), patience))["id"]
    offset = 0
    if tail is not None:
        page = yield from patiently(lambda c: c.logs(ref, tail=tail), patience)
        offset = page["offset"]
        yield from _lines(page)
        if not follow:
            return
    while True:
        start = offset
        page = yield from patiently(lambda c: c.logs(ref, offset=start, limit=_PAGE_BYTES), patience)  # noqa: B023
        offset = page["offset"]
        yield from _lines(page)
        if offset == start:  # only an empty page says that the end was reached
            if not follow or page["finished"]:
                return
            yield Sleep(poll_s)


def _lines(page: Mapping[str, Any]) -> Polling[None]:
    for line in page["lines"]:
        yield Emit(LogLine(line["time"], line["worker"], line["node"], line["text"]))
