"""`StatusFeed` streams the status to open pages as server-sent events.

The status is built at most once a second for each owner and role, however many pages are open.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable

from bftrainer.cluster.store.json_columns import encoded
from bftrainer.cluster.store.rows import TokenRow
from bftrainer.cluster.wire.api import StatusView

MOST_STREAMS, MOST_STREAMS_EACH = 200, 50
"""Limits of open streams: of all owners, and of one owner."""
STREAM_EVERY_S = 1.0
_BYTES_A_SECOND = 200_000
"""Limits the data rate: a long status is streamed less often."""
_QUIET_S = 15.0
_CHECK_S = 5.0
"""Seconds between two checks of a stream's token."""
_LOOK_S = 0.2
"""Seconds between two checks whether the controller is ending, because it does not wait long for a stream."""


class StatusFeed:
    """Status streams of all viewers. `read_status` returns the status as a caller may see it."""

    def __init__(self, read_status: Callable[[TokenRow], StatusView]) -> None:
        self.open: Counter[str] = Counter()
        """Number of open streams by owner."""
        self._read_status = read_status
        self._built: dict[tuple[str, str], tuple[float, str, str]] = {}

    def refusal(self, owner: str) -> str:
        """Return why an owner may open no more streams now; an empty text if one more is allowed."""
        if self.open[owner] >= MOST_STREAMS_EACH:
            return f"{MOST_STREAMS_EACH} of your pages are open already; close some"
        if self.open.total() >= MOST_STREAMS:
            return f"{MOST_STREAMS} pages are open already; try again when others have closed theirs"
        return ""

    async def events(
        self, caller: TokenRow, is_valid: Callable[[], bool], is_ending: Callable[[], bool]
    ) -> AsyncGenerator[str, None]:
        """Yield the lines of a stream until the token is revoked, the reader disconnects or the controller ends."""
        self.open[caller.owner] += 1
        try:
            sent, quiet_since = "", time.monotonic()
            checked = time.monotonic()
            while not is_ending():
                text, timeless = self._text(caller)
                if timeless != sent:
                    sent, quiet_since = timeless, time.monotonic()
                    yield f"event: status\ndata: {text}\n\n"
                elif time.monotonic() - quiet_since > _QUIET_S:
                    quiet_since = time.monotonic()
                    yield ": nothing new\n\n"
                following = time.monotonic() + max(STREAM_EVERY_S, len(text) / _BYTES_A_SECOND)
                while not is_ending() and (left := following - time.monotonic()) > 0:
                    await asyncio.sleep(min(left, _LOOK_S))
                if time.monotonic() - checked > _CHECK_S:
                    checked = time.monotonic()
                    if not is_valid():
                        return
        finally:
            self.open -= Counter([caller.owner])  # this also drops entries that reach 0

    def _text(self, caller: TokenRow) -> tuple[str, str]:
        """Return the status as JSON, and the same without the time, to detect changes."""
        key = (caller.owner, caller.role)
        now = time.monotonic()
        built = self._built.get(key)
        if built is None or now - built[0] >= 0.9 * STREAM_EVERY_S:
            status = self._read_status(caller)
            built = now, encoded(status), encoded({**status, "now": None})
            self._built = {known: kept for known, kept in self._built.items() if now - kept[0] < 10}
            self._built[key] = built
        return built[1], built[2]
