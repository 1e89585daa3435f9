"""Trial watch: writes to the study every few seconds that a driver is alive, and what the pool offered meanwhile.

The heartbeat keeps a second driver away, as two drivers would take over each other's trials. The pool record tells a
search what share of the idle nodes it held. Nodes idle while no trial is under way do not count for the search.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import optuna

from bftrainer.errors import BFTrainerError

DRIVER, POOL, POOL_AT = "bftrainer:driver", "bftrainer:pool_given", "bftrainer:pool_at"
"""Attributes of a study: its driver and the time of the last heartbeat; the node-seconds that the pool offered while
trials were under way; and the pool's total when that was written."""
BEAT_S = 10.0
STALE_S = 60.0


class TrialWatch:
    """Heartbeat and pool record of one driver."""

    def __init__(self, study: optuna.Study, clock: Callable[[], float]) -> None:
        self._study, self._clock = study, clock
        self._me = {"host": socket.gethostname(), "pid": os.getpid()}
        self._beat_at = 0.0
        self._pool_at: float | None = study.user_attrs.get(POOL_AT)
        self.pool_given = float(study.user_attrs.get(POOL, 0.0))
        other = study.user_attrs.get(DRIVER)
        if other and self._is_another(other):
            raise BFTrainerError(
                f"another driver already works on study {study.study_name!r} (process {other.get('pid')} on "
                f"{other.get('host')}): two would take over each other's trials. If it is gone, try again in a minute"
            )

    def look(self, pool_node_seconds: float, *, under_way: bool) -> None:
        """Record the total node-seconds that the pool has given by now.

        `under_way`: trials ran since the last record, even if an earlier driver made that record: its trials continue
        without it.
        """
        if self._pool_at is not None and under_way:
            # The total falls if another controller, or one with restored state, took over.
            self.pool_given += max(0.0, pool_node_seconds - self._pool_at)
        self._pool_at = pool_node_seconds
        if self._clock() - self._beat_at >= BEAT_S:
            self._beat_at = self._clock()
            self._study.set_user_attr(DRIVER, {**self._me, "at": self._beat_at})
            self._write()

    def close(self) -> None:
        """Record that the driver ends."""
        self._study.set_user_attr(DRIVER, None)
        self._write()

    def _write(self) -> None:
        self._study.set_user_attr(POOL, self.pool_given)
        self._study.set_user_attr(POOL_AT, self._pool_at)

    def _is_another(self, other: Mapping[str, Any]) -> bool:
        if abs(self._clock() - float(other.get("at", 0.0))) > STALE_S or other.get("pid") == os.getpid():
            return False
        return other.get("host") != self._me["host"] or _runs(int(other.get("pid", 0)))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
