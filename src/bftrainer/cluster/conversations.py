"""What a program that follows trainers asks a controller, and in which order; without a network and without sleeping.

A conversation is a generator: it yields a question, a pause or something for the caller, and is sent the answers.
`bftrainer.client` carries conversations out, blocking or awaiting, so that their rules are written once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bftrainer.cluster.client import ApiClient, RefusedError, UnreachableError
from bftrainer.elastic.noted import At
from bftrainer.errors import InputError

Row = dict[str, Any]
"""A trainer as the HTTP API describes it."""
T = TypeVar("T")

FINISHED = ("done", "failed", "cancelled")
"""States that a trainer never leaves."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
_PAGE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to the controller; its answer is sent back, or its error thrown."""

    question: Callable[[ApiClient], Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """Time to let pass."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Item:
    """Something for whoever listens."""

    value: Any


Talk = Generator[Ask | Pause | Item, Any, T]


@dataclass(frozen=True, slots=True)
class Point:
    """What a trainer had reported at one moment."""

    epoch: int
    step: int
    samples: int
    metrics: Mapping[str, float]
    state: str
    at: Mapping[str, At] = field(default_factory=dict)
    """What each of the metrics is of. An evaluation takes its time: training may be further by now."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What a trainer had made and reported at one of the times that are kept."""

    time: float
    """Seconds since 1970."""
    samples: int
    metrics: Mapping[str, float]
    at: Mapping[str, At]
    """What each of the metrics is of."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that a worker printed."""

    time: str
    """When, in UTC, as `bftrainer logs` shows it."""
    worker: str
    node: str
    text: str


@dataclass(frozen=True, slots=True)
class Patience:
    """How to bear a controller that is away: for how long, by which clock, and whom to tell."""

    seconds: Callable[[], float]
    """0 as long as no controller was ever met: then there is none to wait for."""
    clock: Callable[[], float]
    tell: Callable[[str], None]


def is_away(problem: BaseException) -> bool:
    """Whether the same question may be answered later: nobody answers, or the controller is in trouble."""
    return isinstance(problem, UnreachableError) or (isinstance(problem, RefusedError) and problem.status >= 500)


def patiently(question: Callable[[ApiClient], T], patience: Patience, until: float = math.inf) -> Talk[T]:
    """An answer, also if the controller is away for a while. For questions that may be asked twice.

    `until` is when the caller has waited long enough, by the clock of `patience`: then this raises TimeoutError.
    """
    lost_at: float | None = None
    pause = _FIRST_PAUSE_S
    while True:
        try:
            found: T = yield Ask(question)
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
            yield Pause(min(pause, left, max(0.0, until - patience.clock())))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        else:
            if lost_at is not None:
                patience.tell("the controller is back")
            return found


def members(group: str, patience: Patience, until: float = math.inf) -> Talk[list[Row]]:
    """All trainers of a group, those that finished long ago included."""
    rows = yield from patiently(lambda c: c.trainers(all=True), patience, until)
    found = [row for row in rows if row.get("group") and row["group"] == group]
    if not found:
        raise InputError(f"there is no trainer of a group {group!r:.80}")
    return found


def cancelling(group: str, patience: Patience) -> Talk[list[Row]]:
    """End all of a group; the rows of those that were not finished."""
    going = [row["id"] for row in (yield from members(group, patience)) if row["state"] not in FINISHED]
    rows = []
    for ref in going:
        rows.append((yield from patiently(lambda c: c.cancel(ref), patience)))  # noqa: B023 - asked before the next
    return rows


def remembering(ref: str, patience: Patience) -> Talk[list[Moment]]:
    """What is kept of a trainer's reports."""
    found = yield from patiently(lambda c: c.history(ref), patience)
    return [
        Moment(
            point["time"],
            point["samples"],
            _numbers(point["metrics"]),
            {name: At(*at) for name, at in (point.get("metrics_at") or {}).items()},
        )
        for point in found["points"]
    ]


def waiting(
    refs: Sequence[str] | None, patience: Patience, poll_s: float, timeout_s: float | None, group: str | None = None
) -> Talk[list[Row]]:
    """The last rows of trainers, or of all of a group, once all of them are finished. Raises TimeoutError."""
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
        yield Pause(min(poll_s, left))
        rows |= yield from _look_again(pending, patience, until)
    return [rows[ref] for ref in ids]


def _look_again(ids: Sequence[str], patience: Patience, until: float = math.inf) -> Talk[dict[str, Row]]:
    """Rows of trainers. One question for several, where it can be."""
    listed: dict[str, Row] = {}
    if len(ids) > 1:
        listed = {row["id"]: row for row in (yield from patiently(lambda c: c.trainers(), patience, until))}
    found = {}
    for ref in ids:
        # Those that finished long ago are not listed; and the last word on a trainer is the detailed one.
        if ref not in listed or listed[ref]["state"] in FINISHED:
            found[ref] = yield from patiently(lambda c: c.trainer(ref), patience, until)  # noqa: B023
        else:
            found[ref] = listed[ref]
    return found


def reporting(ref: str, patience: Patience, poll_s: float) -> Talk[None]:
    """A `Point` whenever a trainer has reported something new, until it is finished."""
    row = yield from patiently(lambda c: c.trainer(ref), patience)
    ref, before = row["id"], None
    while True:
        point = as_point(row)
        known = (point.epoch, point.step, point.metrics, point.at)
        if point.metrics and known != before:
            yield Item(point)
            before = known
        if row["state"] in FINISHED:
            return
        yield Pause(poll_s)
        row = (yield from _look_again([ref], patience))[ref]


def as_point(row: Mapping[str, Any]) -> Point:
    """What a row says of the training."""
    metrics = _numbers(row["metrics"] or {})
    at = {name: At(**place) for name, place in (row.get("metrics_at") or {}).items()}
    return Point(row["epoch"], row["step"], row["samples"], metrics, row["state"], at)


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """JSON has no NaN."""
    return {name: math.nan if value is None else float(value) for name, value in found.items()}


def reading(ref: str, patience: Patience, poll_s: float, tail: int | None, follow: bool) -> Talk[None]:
    """A `LogLine` for each line of a trainer's log: the last ones or all, and with `follow` those to come."""
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
            yield Pause(poll_s)


def _lines(page: Mapping[str, Any]) -> Talk[None]:
    for line in page["lines"]:
        yield Item(LogLine(line["time"], line["worker"], line["node"], line["text"]))
