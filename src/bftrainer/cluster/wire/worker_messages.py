"""Worker messages are validated here before they are applied, because worker programs are untrusted.

The `Reconciler` passes every message and report of a worker to `understood`. The result has the types that
`elastic.protocol` promises, with numbers in bounds that can be summed, stored and shown. Anything else raises
`ProtocolError`, which fails that trainer only.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bftrainer.elastic import protocol
from bftrainer.elastic.metrics import MOST as MOST_METRICS
from bftrainer.elastic.protocol import Arrived, Broken, Done, Failed, Formed, Leaving, Left, Ready, Report
from bftrainer.util.text import text

LEAST, MOST = 1e-9, 1e15
"""Bounds of rates and weights. Sums of values beyond them are not meaningful."""
MOST_WHOLE = 1 << 62
MOST_S = 1e9
"""The longest time in a message, in seconds: no change of members takes longer."""
MOST_NODES = 1 << 20
MOST_SIZES = 1000
"""The most world sizes with a rate in one report."""
MOST_NAME, MOST_ADDRESS, MOST_ERROR, MOST_TRACEBACK = 100, 300, 4000, 20_000
"""The most characters of each kind of text."""


def understood(message: Mapping[str, Any]) -> protocol.Message | None:
    """Return a worker's message, validated; None if workers do not send it, or if it is of a newer version.

    Raises `ProtocolError` if the message is invalid.
    """
    try:
        return _checked(protocol.from_json(message))
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as problem:
        said = text(reprlib.repr(message))[:200]
        raise protocol.ProtocolError(f"a worker said {said}: {text(str(problem))[:200]}") from None


def _checked(said: protocol.Message | None) -> protocol.Message | None:
    match said:
        case Report():
            return _report(said)
        case Failed(error, traceback, fresh):
            return Failed(_words(error, MOST_ERROR), _words(traceback)[-MOST_TRACEBACK:], fresh is True)
        case Formed(generation, world, pause_s, form_s, sync_s):
            return Formed(_whole(generation), _whole(world), _seconds(pause_s), _seconds(form_s), _seconds(sync_s))
        case Arrived(generation, address):
            return Arrived(_whole(generation), _words(address, MOST_ADDRESS))
        case Broken(generation, reason):
            return Broken(_whole(generation), _words(reason, MOST_ERROR))
        case Ready() | Leaving() | Left() | Done():
            return said
        case _:
            return None


def _report(report: Report) -> Report:
    for name in ("generation", "step", "epoch", "samples", "world", "redone"):
        _count(getattr(report, name))
    for optional in (report.total, report.epochs):
        if optional is not None:
            _count(optional)
    for seconds in (report.snapshot_every_s, report.snapshot_stall_s):
        if seconds is not None and not _seconds(seconds) >= 0:
            raise ValueError("seconds must be 0 or more")
    places = {
        _words(name, MOST_NAME): [_count(value) for value in at]
        for name, at in list(report.metrics_at.items())[:MOST_METRICS]
    }
    if any(len(at) != 3 for at in places.values()):
        raise ValueError("metrics_at must have epochs, steps and samples of each")
    rates = {_count(int(size)): float(rate) for size, rate in list(report.rates.items())[:MOST_SIZES]}
    return replace(
        report,
        metrics_at=places,
        rates={str(size): rate for size, rate in rates.items() if size <= MOST_NODES and LEAST <= rate <= MOST},
        metrics={_words(name, MOST_NAME): float(value) for name, value in list(report.metrics.items())[:MOST_METRICS]},
    )


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= MOST_WHOLE:
        raise ValueError(f"must be a whole number, but got {reprlib.repr(value)}")
    return value


def _count(value: Any) -> int:
    if _whole(value) < 0:
        raise ValueError(f"must be 0 or more, but got {value}")
    return int(value)


def _seconds(value: Any) -> float:
    """Check a time in seconds. A negative time means that none was measured, and becomes NaN."""
    seconds = float(value)
    if seconds > MOST_S:
        raise ValueError(f"must be a number of seconds, but got {seconds:g}")
    return seconds if seconds >= 0 else math.nan


def _words(value: Any, most: int | None = None) -> str:
    if not isinstance(value, str):
        raise TypeError(f"must be a text, but got {reprlib.repr(value)}")
    return text(value[:most])
