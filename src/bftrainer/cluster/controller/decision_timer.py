"""The decision timer tells the controller when the next decision is due.

Events that arrive close together lead to one decision. Learned rates alone lead to a decision less often than changes
of nodes and trainers.
"""

from __future__ import annotations

import asyncio
import time
from typing import Literal

COALESCE_S = 0.02
"""Events within this time lead to one decision."""
LEARN_S = 1.0
"""The least time between decisions that follow only from learned rates. Node changes do not wait for it."""


class DecisionTimer:
    """Collects the requests for a decision until it is due."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._first_request_at = 0.0
        self._learned = False
        self._learned_decision_at = 0.0

    @property
    def pending(self) -> bool:
        """Whether a decision is requested and not yet made."""
        return self._requested.is_set()

    def request(self, decide: Literal["now", "soon"] | None) -> None:
        """Request a decision. See `Effects.decide`."""
        if decide == "now" and not self.pending:
            self._first_request_at = time.monotonic()
            self._requested.set()
        elif decide == "soon" and not self.pending:
            self._learned = True

    def tick(self) -> None:
        """Request the decision that follows from learned rates, if the last such decision is long enough ago."""
        now = time.monotonic()
        if self._learned and now - self._learned_decision_at >= LEARN_S:
            self._learned, self._learned_decision_at = False, now
            self.request("now")

    async def due(self) -> float:
        """Wait until a decision is due. Returns the time of the first request that led to it."""
        await self._requested.wait()
        await asyncio.sleep(COALESCE_S)
        self._requested.clear()
        return self._first_request_at
