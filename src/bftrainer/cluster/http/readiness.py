"""`Readiness` checks whether a controller can do its work: it runs, the store accepts writes, the pool answers."""

from __future__ import annotations

import time

from bftrainer.cluster.controller.controller import Controller
from bftrainer.errors import BFTrainerError

CHECK_EVERY_S = 1.0
"""Shortest time between two test writes to the store, however many requests arrive."""
_PROBE = "operations.probe"


class Readiness:
    """Checks of a controller; store and pool at most once per `CHECK_EVERY_S`."""

    def __init__(self, controller: Controller) -> None:
        self.opened = False
        """True once the pool is open and the controller listens to agents."""
        self._controller = controller
        self._checked_at = -CHECK_EVERY_S
        self._problems: dict[str, str] = {}

    def problems(self) -> dict[str, str]:
        """Return the problem found by each check; an empty text means none."""
        now = time.monotonic()
        if now - self._checked_at >= CHECK_EVERY_S:
            self._checked_at = now
            self._problems = {"store": self._store(), "pool": self._pool()}
        return {"controller": self._itself(), **self._problems}

    def _itself(self) -> str:
        if self._controller.failed.done():
            return "it has failed and is ending"
        if self._controller.draining:
            return "it is ending"
        return "" if self.opened else "it is starting"

    def _store(self) -> str:
        try:
            self._controller.cluster.store.keep(_PROBE, time.time())
        except BFTrainerError as problem:
            return str(problem)
        return ""

    def _pool(self) -> str:
        if not self.opened:
            return "it is not open yet"
        try:
            return str(self._controller.pool.describe().get("problem") or "")
        except Exception as problem:  # a pool may be a user's class and raise anything
            return f"{type(problem).__name__}: {problem}"
