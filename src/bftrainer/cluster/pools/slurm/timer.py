"""`RoundTimer` says when the `slurm` pool asks Slurm next. It has no clock: times are passed in."""

from __future__ import annotations

import math

from bftrainer.cluster.pools.slurm.settings import SlurmSettings
from bftrainer.util.backoff import Backoff

BUSY = 3.0
"""Least time between rounds, as a multiple of the time Slurm took to answer: a slow Slurm is not kept busy."""
SOONEST_S = 0.3
"""Least seconds between rounds. It is the interval while nodes are given up for a job, and after an agent is lost."""
_LONGEST_WAIT_S = 15.0
_GROWTH = 1.5
"""Factor by which the time between rounds grows while nothing changes."""
_HUNGRY = 5.0
"""Most times `interval_s` between rounds while trainers could use more nodes."""


class RoundTimer:
    """The time between rounds: short while something changes, long at rest, longer if Slurm is slow or fails."""

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings
        self._began = -math.inf
        self._asking_s = 0.0
        self._seen: object = None
        self._unchanged = 0
        self._hungry = False
        self.failures = 0
        """Rounds that failed, in a row."""

    def begin(self, now: float) -> None:
        """Record the beginning of a round."""
        self._began = now

    def answered(self, now: float, seen: object, *, hungry: bool) -> None:
        """Record that Slurm has answered in this round.

        `seen` is a value that is equal if nothing has changed. `hungry`: trainers could use more nodes.
        """
        self._hungry = hungry
        self._asking_s = now - self._began
        self._unchanged = self._unchanged + 1 if seen == self._seen else 0
        self._seen = seen

    @property
    def soonest(self) -> float:
        """The earliest time of the next round."""
        return self._began + max(SOONEST_S, min(BUSY * self._asking_s, _LONGEST_WAIT_S))

    @property
    def next(self) -> float:
        """The time of the next round, if nothing happens before."""
        interval_s = self._settings.interval_s
        if self.failures:
            wait_s = max(interval_s, Backoff(2 * interval_s, _LONGEST_WAIT_S).wait_s(self.failures))
        else:
            longest_s = min(self._settings.rest_s, _HUNGRY * interval_s if self._hungry else math.inf)
            wait_s = max(interval_s, min(interval_s * _GROWTH ** min(self._unchanged, 30), longest_s))
        return max(self._began + wait_s, self.soonest)

    def at(self, soon: bool, again_at: float) -> float:
        """Return the time of the next round: at once if `soon`, else by `again_at`, but after `interval_s`."""
        if soon:
            return self.soonest
        return min(self.next, max(again_at, self._began + self._settings.interval_s, self.soonest))
