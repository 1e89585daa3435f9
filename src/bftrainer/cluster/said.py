"""What a worker said, looked at before anything is changed by it: its program may be anybody's.

`understood` takes the JSON that came through the agent and gives a message with values that can be worked with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bftrainer.cluster.facts import LEAST, MOST
from bftrainer.elastic import protocol
from bftrainer.elastic.protocol import Failed, Formed, Report

MOST_METRICS = 100
"""Kept of what a script reports."""


def understood(message: Mapping[str, Any]) -> protocol.Message | None:
    """The message, or None for one of a kind not known here; `ProtocolError` if its values make no sense."""
    try:
        said = protocol.from_json(message)
        if isinstance(said, Report):
            return _checked(said)
        if isinstance(said, Failed):
            return Failed(str(said.error), str(said.traceback))
        if isinstance(said, Formed):
            times = (float(said.pause_s), float(said.form_s), float(said.sync_s))
            return Formed(int(said.generation), int(said.world), *times)
    except (TypeError, ValueError, KeyError, AttributeError) as problem:
        raise protocol.ProtocolError(f"a worker said {str(message)[:200]}: {problem}") from None
    return said


def _checked(report: Report) -> Report:
    """A report whose values are what they should be; `ValueError` or `TypeError` if they are not."""

    def whole(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
            raise ValueError(f"must be a whole number, but got {value!r}")
        return value

    for name in ("generation", "step", "epoch", "samples", "world", "redone"):
        whole(getattr(report, name))
    for optional in (report.total, report.epochs):
        if optional is not None:
            whole(optional)
    return replace(
        report,
        rates={str(whole(int(size))): rate for size, rate in _numbers(report.rates).items() if LEAST <= rate <= MOST},
        metrics={name[:100]: value for name, value in list(_numbers(report.metrics).items())[:MOST_METRICS]},
    )


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in found.items()}
