"""Times in scheduler logs and on the command line, converted to seconds since 1970 UTC.

Logs write local time without naming the zone, so every reader gets a `Clock` made from `--tz`.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo

from bftrainer.errors import InputError

LATEST = 7_258_118_400.0
"""2200-01-01: a later time in a log is a misread number, not a date."""

_COMPACT = re.compile(r"(19|20|21)\d{6}")
_ELAPSED = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?")


def time_zone(name: str) -> tzinfo:
    """The zone called `name` in the tz database."""
    if name.upper() in ("UTC", "Z"):
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise InputError(f"time zone must be a name such as UTC or Europe/Berlin, but got {name!r}") from None


class Clock:
    """Parses the times of one log. Calling it raises ValueError for text that is no time between 1970 and 2200."""

    def __init__(self, zone: tzinfo = UTC) -> None:
        self.zone = zone
        self._minutes: dict[str, float] = {}

    def __call__(self, text: str, *, fold: int = 0) -> float:
        """Seconds since 1970 of `2021-02-10T20:21:15`, any other ISO form, or a number of such seconds.

        `fold` chooses between the two meanings of a time in the hour that repeats when summer time ends.
        """
        # Logs hold millions of times, most of them in a minute seen before: parse the minute once, add the seconds.
        if len(text) == 19 and text[16] == ":" and text[17:].isdigit() and not fold:
            minute = self._minutes.get(text[:16])
            if minute is None:
                minute = self._minutes[text[:16]] = self._slow(text[:16], 0)
            seconds = int(text[17:])
            if seconds > 60:
                raise ValueError(f"not a time: {text!r}")
            return minute + seconds
        return self._slow(text, fold)

    def span(self, start: str, end: str) -> tuple[float, float]:
        """Start and end of a job in seconds.

        A job whose end is before its start by the clock may have run through the end of summer time, when an hour
        repeats; only then is the end moved.
        """
        begin, finish = self(start), self(end)
        if finish < begin:
            finish = max(finish, self(end, fold=1))
        return begin, finish

    def _slow(self, text: str, fold: int) -> float:
        try:
            seconds = float(text)
        except ValueError:
            try:
                parsed = datetime.fromisoformat(text.strip())
                if parsed.tzinfo is None:
                    parsed = parsed.replace(tzinfo=self.zone, fold=fold)
                seconds = parsed.timestamp()
            except (ValueError, OverflowError):
                raise ValueError(f"not a time: {text!r}") from None
        if not 0 <= seconds <= LATEST:
            raise ValueError(f"not between 1970 and 2200: {text!r}")
        return seconds


def parse_time(text: str, zone: tzinfo, what: str) -> float:
    """Parse a time typed by a user, for the option called `what`."""
    # Eight digits are meant as a date; as seconds they would be some day of 1970.
    typed = f"{text[:4]}-{text[4:6]}-{text[6:]}" if _COMPACT.fullmatch(text) else text
    try:
        return Clock(zone)(typed)
    except ValueError:
        raise InputError(f"{what} must be a time such as 2021-02-10T20:21:15, but got {text!r}") from None


def parse_elapsed(text: str) -> float:
    """Seconds of Slurm's `[days-][hours:]minutes:seconds`, or of a plain number. Raises ValueError otherwise."""
    if text.isdigit():
        return float(text)
    match = _ELAPSED.fullmatch(text)
    if match is None:
        raise ValueError(f"not a duration: {text!r}")
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return ((days * 24.0 + hours) * 60 + minutes) * 60 + seconds
