"""Parts of a pause: what the time of a rescale was spent on, from the last step to the first batch after it.

`TrainingState` measures the copying and the sending of state; `TrainingMember` tells its manager all parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bftrainer.elastic.protocol import PAUSE_PARTS


class PauseClock:
    """Measures the parts of the exchange of state in one new group."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds = {"copy": 0.0, "send": 0.0}

    def begin(self) -> None:
        """Forget what was measured in another group."""
        self._seconds = dict.fromkeys(self._seconds, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of this block as a part: `copy` or `send`."""
        began = self._now()
        try:
            yield
        finally:
            self._seconds[name] += self._now() - began

    def parts(self, pause_s: float, form_s: float, sync_s: float) -> dict[str, float]:
        """Return all parts of a pause, whose group took `form_s` to form and `sync_s` to exchange states."""
        copy_s, send_s = self._seconds["copy"], self._seconds["send"]
        found = {
            "wait": pause_s - form_s - sync_s,
            "form": form_s,
            "catch_up": sync_s - copy_s - send_s,
            "copy": copy_s,
            "send": send_s,
        }
        return {name: round(max(0.0, found[name]), 6) for name in PAUSE_PARTS}
