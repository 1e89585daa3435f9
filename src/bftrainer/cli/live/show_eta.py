"""Texts about finishing times for a terminal: `about 3 h; 80 %: 2 to 5 h`."""

from __future__ import annotations

from datetime import UTC, datetime

from bftrainer.cli.common.connection import printable
from bftrainer.cluster.wire.api import EtaView

_UNITS = ((90.0, 1.0, "s"), (90 * 60.0, 60.0, "min"), (36 * 3600.0, 3600.0, "h"), (float("inf"), 86400.0, "d"))


def eta_text(eta: EtaView, now: float) -> str:
    """When it is done: the point and the interval, in time from now; or why that is not known."""
    if eta["low"] is None:
        return f"not known: {printable(eta['why'])}" if eta["why"] else "not known yet"
    low = max(eta["low"] - now, 0.0)
    if eta["point"] is None:
        return f"later than {_rounded(low)}"
    point = f"about {_rounded(max(eta['point'] - now, 0.0))}"
    if eta["high"] is None:
        return f"{point}; 90 %: later than {_rounded(low)}"
    return f"{point}; 80 %: {short_eta(eta, now)}"


def short_eta(eta: EtaView | None, now: float) -> str:
    """The interval for a column of a table; empty if it is not known."""
    if eta is None or eta["low"] is None or eta["high"] is None:
        return ""
    low = max(eta["low"] - now, 0.0)
    first, last = _rounded(low), _rounded(max(eta["high"] - now, low))
    number, _, unit = first.rpartition(" ")
    return f"{number if last.endswith(f' {unit}') else first} to {last}"


def deadline_text(eta: EtaView) -> str:
    """How likely the deadline is met; empty without one."""
    if eta["deadline"] is None:
        return ""
    try:
        when = datetime.fromtimestamp(eta["deadline"], UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        when = f"{eta['deadline']:g}"
    if eta["likely"] is None:
        return f"deadline {when}"
    word = "likely" if eta["likely"] >= 0.8 else "unlikely" if eta["likely"] < 0.5 else "uncertain"
    return f"deadline {when}: {word}, {eta['likely']:.0%}"


def _rounded(seconds: float) -> str:
    for most, size, unit in _UNITS:
        if seconds < most:
            value = seconds / size
            text = f"{value:.1f}" if value < 9.95 and unit != "s" else f"{value:.0f}"
            return f"{text.removesuffix('.0')} {unit}"
    raise AssertionError
