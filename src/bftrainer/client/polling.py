"""Polling of a controller as generators: the requests and their order, without a network and without sleeping.

A polling generator yields a request, a sleep or an item for the caller, and is sent the answers. `bftrainer.client`
carries generators out, blocking or awaiting, so that the rules are written once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bftrainer.client.api import ApiClient, RefusedError, UnreachableError
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.wire.api import TrainerView
from bftrainer.elastic.metrics import Position
from bftrainer.errors import InputError
from bftrainer.util.backoff import Backoff

Row = TrainerView
"""A trainer as the HTTP API describes it."""
T = TypeVar("T")

_BACKOFF = Backoff(0.5, 15.0)
_PAGE_BYTES = 1 << 18
_MOST_EVENTS = 1000
"""Events that the controller returns at most in one answer."""


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


Steps = Generator[Request | Sleep | Emit, Any, T]


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
class LogEnd:
    """Where the reading of a log ended."""

    offset: int
    """Byte of the log to continue from."""
    finished: bool
    """Whether the trainer is finished, so that no more lines will come."""


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


def patiently(question: Callable[[ApiClient], T], patience: RetryPolicy, until: float = math.inf) -> Steps[T]:
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
                raise TimeoutError(f"the controller does not answer: {problem}") from None
            failures += 1
            yield Sleep(min(_BACKOFF.wait_s(failures), left, max(0.0, until - patience.clock())))
        else:
            if lost_at is not None:
                patience.tell("the controller is back")
            return found


def members(group: str, patience: RetryPolicy, until: float = math.inf) -> Steps[list[Row]]:
    """All trainers of a group, including those that finished long ago."""
    rows = yield from patiently(lambda c: c.trainers(all=True), patience, until)
    found = [row for row in rows if row.get("group") and row["group"] == group]
    if not found:
        raise unknown_group(group)
    return found


def unknown_group(group: str) -> InputError:
    """The error that a group has no trainers."""
    return InputError(f"there is no group {group!r:.80}: `bftrainer status` lists all groups")


def cancelling(group: str, patience: RetryPolicy) -> Steps[list[Row]]:
    """End all trainers of a group; returns the rows of those that were unfinished."""
    going = [row["id"] for row in (yield from members(group, patience)) if row["state"] not in FINISHED]
    rows = []
    for ref in going:
        rows.append((yield from patiently(lambda c: c.cancel(ref), patience)))  # noqa: B023 - asked before the next
    return rows


def remembering(ref: str, patience: RetryPolicy) -> Steps[list[Moment]]:
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
    refs: Sequence[str] | None,
    patience: RetryPolicy,
    poll_s: float,
    timeout_s: float | None,
    group: str | None = None,
    on_change: Callable[[Row], None] | None = None,
) -> Steps[list[Row]]:
    """Wait until trainers, or all of a group, are finished; returns their last rows. Raises TimeoutError.

    `on_change` is called with the first row of each trainer, and with each later row whose state differs.
    """
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
    if on_change is not None:
        for row in rows.values():
            on_change(row)
    while pending := [ref for ref in rows if rows[ref]["state"] not in FINISHED]:
        left = math.inf if timeout_s is None else timeout_s - (patience.clock() - begun)
        if left <= 0:
            names = ", ".join(rows[ref]["name"] for ref in pending[:5]) + (", …" if len(pending) > 5 else "")
            raise TimeoutError(f"not finished after {timeout_s:g} s: {names}")
        yield Sleep(min(poll_s, left))
        newer = yield from _look_again(pending, patience, until)
        changed = [row for ref, row in newer.items() if row["state"] != rows[ref]["state"]]
        rows |= newer
        if on_change is not None:
            for row in changed:
                on_change(row)
    return [rows[ref] for ref in ids]


def _look_again(ids: Sequence[str], patience: RetryPolicy, until: float = math.inf) -> Steps[dict[str, Row]]:
    """Rows of trainers, with one request for several trainers where possible."""
    listed: dict[str, Row] = {}
    if len(ids) > 1:
        listed = {row["id"]: row for row in (yield from patiently(lambda c: c.trainers(), patience, until))}
    found: dict[str, Row] = {}
    for ref in ids:
        # Trainers that finished long ago are not listed; and the last row of a trainer should be the detailed one.
        if ref not in listed or listed[ref]["state"] in FINISHED:
            found[ref] = yield from patiently(lambda c: c.trainer(ref), patience, until)  # noqa: B023
        else:
            found[ref] = listed[ref]
    return found


def reporting(ref: str, patience: RetryPolicy, poll_s: float) -> Steps[None]:
    """Emit a `Point` whenever a trainer has reported something new, until it is finished."""
    row: Row = yield from patiently(lambda c: c.trainer(ref), patience)
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


def as_point(row: Row) -> Point:
    """The reports in a trainer's row."""
    metrics = _numbers(row["metrics"] or {})
    at = {name: Position(**place) for name, place in (row.get("metrics_at") or {}).items()}
    return Point(row["epoch"], row["step"], row["samples"], metrics, row["state"], at)


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as numbers. JSON has no NaN, so the API sends null for it."""
    return {name: math.nan if value is None else float(value) for name, value in found.items()}


def reading(
    ref: str, patience: RetryPolicy, poll_s: float, tail: int | None, follow: bool, worker: str | None
) -> Steps[LogEnd]:
    """Emit a `LogLine` for each line of a trainer's log: the last ones or all, and with `follow` the lines to come.

    With `worker`, only lines of that worker are emitted and counted.
    """
    ref = (yield from patiently(lambda c: c.trainer(ref), patience))["id"]
    offset = 0
    if tail is not None and worker is None:
        page = yield from patiently(lambda c: c.logs(ref, tail=tail), patience)
        offset = page["offset"]
        for line in page["lines"]:
            yield Emit(_log_line(line))
        if not follow:
            return LogEnd(offset, bool(page["finished"]))
    # The controller counts lines of all workers, so the last lines of one worker are found by reading the whole log.
    newest = deque[LogLine](maxlen=tail) if tail is not None and worker is not None else None
    while True:
        start = offset
        page = yield from patiently(lambda c: c.logs(ref, offset=start, limit=_PAGE_BYTES), patience)  # noqa: B023
        offset = page["offset"]
        lines = [_log_line(line) for line in page["lines"] if worker in (None, line["worker"])]
        at_end = offset == start  # only an empty page says that the end was reached
        if newest is not None:
            newest.extend(lines)
            lines, newest = (list(newest), None) if at_end else ([], newest)
        for shown in lines:
            yield Emit(shown)
        if at_end:
            if not follow or page["finished"]:
                return LogEnd(offset, bool(page["finished"]))
            yield Sleep(poll_s)


def _log_line(line: Mapping[str, Any]) -> LogLine:
    return LogLine(line["time"], line["worker"], line["node"], line["text"])


def happening(
    page: Callable[[int | None, int], Steps[dict[str, Any]]],
    poll_s: float,
    after: int | None,
    limit: int,
    follow: bool,
) -> Steps[int]:
    """Emit events: the newest `limit`, or the first `limit` after a sequence number; with `follow`, all later ones.

    `page` asks for one page of events. Returns the last sequence number of the controller.
    """
    seen, left = after, limit
    while True:
        answer = yield from page(seen, min(left, _MOST_EVENTS))
        events, last = answer["events"], int(answer["last"])
        for event in events:
            yield Emit(event)
        left -= len(events)
        newest_only = seen is None
        seen = events[-1]["seq"] if events else last if seen is None else seen
        if newest_only or not events or left <= 0:
            break
    while follow:
        yield Sleep(poll_s)
        for event in (yield from page(seen, _MOST_EVENTS))["events"]:
            yield Emit(event)
            seen = event["seq"]
    return last
