"""`Trimmer` keeps the database within limits, in pieces of a few milliseconds.

The controller calls `step` at each of its ticks. One call does one piece of work: it drops some of the oldest events,
rows that are of no use without those events, or free space at the end of the file. The size of the pieces follows the
time that the last ones took.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.event_log import EventLog
from bftrainer.cluster.store.trainer_totals import TrainerTotals

LEAST_EVENTS = 1000
"""However old the events and however large the database, so many events stay."""
CHECK_EVERY_S = 60.0
"""How often the limits are checked while nothing exceeds them."""
WANTED_S = 0.010
"""How long a piece should take."""
FREE_BYTES = 4 << 20
"""Free space that stays in the file, because the next events need it."""

_FEWEST, _MOST = 20, 5000
_FILE_BYTES = 4096
"""Bytes of the file that are cut off for each row that a piece may have."""
_NOTHING_ENDED = (float("-inf"), 0)


@dataclass(frozen=True, slots=True)
class DatabaseLimits:
    """What a database may hold. None: no limit."""

    events: int
    """Number of events."""
    events_s: float | None
    """Age of the oldest event."""
    most_bytes: int | None
    """Bytes of the file that hold data."""


class Trimmer:
    """Trims one database."""

    def __init__(
        self,
        database: Database,
        log: EventLog,
        totals: TrainerTotals,
        limits: DatabaseLimits,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.limits = limits
        self._db = database
        self._log = log
        self._totals = totals
        self._clock = clock
        self._rows = 200
        self._checked: float | None = None
        self._thinned = _NOTHING_ENDED
        """End and number of the last trainer whose points were dropped."""
        self._removable: deque[int] = deque()

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove the rows of these finished trainers in the next pieces."""
        self._removable, self._checked = deque(numbers), None

    def log_start(self) -> float | None:
        """Return the time of the first event, if older ones were dropped."""
        return self._log.time_of(self._log.ends()[0]) if self._log.trimmed() else None

    def step(self, now: float) -> bool:
        """Do a piece of the work, if there is any. Returns whether there may be more."""
        if self._checked is not None and 0 <= now - self._checked < CHECK_EVERY_S:
            return False
        began = self._clock()
        worked = self._drop_events(now) or self._drop_rows() or self._cut_file()
        took = self._clock() - began
        if worked:
            wanted = self._rows * min(max(WANTED_S / max(took, 1e-6), 0.25), 1.5)
            self._rows = round(min(max(wanted, _FEWEST), _MOST))
        self._checked = None if worked else now
        return worked

    def finish(self, now: float) -> None:
        """Do all of the work at once."""
        self._checked = None
        while self.step(now):
            pass

    def _drop_events(self, now: float) -> bool:
        first, last = self._log.ends()
        if not first:
            return False
        upto = last - self.limits.events
        if self.limits.events_s is not None:
            oldest = self._log.time_of(first)
            if oldest is not None and oldest < now - self.limits.events_s:
                upto = max(upto, min(self._log.first_since(now - self.limits.events_s) - 1, last - LEAST_EVENTS))
        if self.limits.most_bytes is not None and self._db.size()[0] > self.limits.most_bytes:
            upto = max(upto, last - LEAST_EVENTS)
        return self._log.trim(min(upto, first + self._rows - 1)) > 0

    def _drop_rows(self) -> bool:
        """Drop workers and points from before the first event, and trainers that were named for removal."""
        start = self.log_start()
        if start is None:
            return False
        chosen = "SELECT rowid FROM workers WHERE ended < ? LIMIT ?"
        if self._db.run(f"DELETE FROM workers WHERE rowid IN ({chosen})", (start, self._rows)).rowcount:  # noqa: S608
            return True
        few = max(1, self._rows // 100)  # a trainer has up to 400 points
        ended = self._db.rows(
            "SELECT ended, number FROM trainers WHERE (ended, number) > (?, ?) AND ended < ? "
            "ORDER BY ended, number LIMIT ?",
            (*self._thinned, start, few),
        )
        if ended:
            with self._db.transaction():
                for _, number in ended:
                    self._db.run("DELETE FROM points WHERE trainer = ?", (number,))
            self._thinned = ended[-1]
            return True
        if self._removable:
            self._totals.remove([self._removable.popleft() for _ in range(min(few, len(self._removable)))])
            return True
        return False

    def _cut_file(self) -> bool:
        free = self._db.size()[1]
        if free <= FREE_BYTES or not self._db.shrinkable:
            return False
        self._db.shrink(min(free - FREE_BYTES // 2, self._rows * _FILE_BYTES))
        return True
