"""`EventLog` writes, reads and trims the events of the database; `Store` passes its calls on.

Events are numbered without gaps and never changed. Only trimming removes them, the oldest first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from typing import Any

from bftrainer.cluster.store import event_logging
from bftrainer.cluster.store.assignments import (
    AT_THE_CUT,
    DecisionReader,
    DecisionWriter,
    assigned_before,
    is_in_changes,
)
from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.event_columns import columns_of
from bftrainer.cluster.store.events import Decided, LogEvent
from bftrainer.cluster.store.json_columns import decoded_object, encoded, plain
from bftrainer.cluster.store.migrations import TRIMMED_KEY
from bftrainer.cluster.store.rows import EventRow, EventSpan
from bftrainer.errors import InputError
from bftrainer.util.text import text

_PAGE = 1000
_SQL = f"SELECT {', '.join(field.name for field in fields(EventRow))} FROM events"  # noqa: S608 - names from this program
_KEEP = "INSERT INTO kept (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"


class EventLog:
    """The events in a database."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._decisions = DecisionWriter(database)

    def log(self, time: float, event: LogEvent) -> int:
        """Add an event and return its number."""
        row = columns_of(event)
        event_logging.log_event(row)
        stored = self._decisions.shortened(row.data) if isinstance(event, Decided) else row.data
        done = self._db.run(
            "INSERT INTO events (time, kind, trainer, node, data) VALUES (?, ?, ?, ?, ?)",
            (time, text(row.kind), text(row.trainer), text(row.node), encoded(stored)),
        )
        seq = int(done.lastrowid or 0)
        if isinstance(event, Decided):
            self._decisions.written(seq, row.data, stored)
        return seq

    def events(self, after: int | None, limit: int, trainer: str, kind: str) -> list[EventRow]:
        """Return events in order: those after number `after`, or the newest; at most `limit`."""
        wanted: list[tuple[str, Any]] = [("trainer = ?", text(trainer))] if trainer else []
        wanted += [("kind = ?", text(kind))] if kind else []
        wanted += [("seq > ?", plain(after))] if after is not None else []
        where = f"WHERE {' AND '.join(sql for sql, _ in wanted)}" if wanted else ""
        order = "DESC" if after is None else "ASC"
        rows = self._db.rows(
            f"{_SQL} {where} ORDER BY seq {order} LIMIT ?",
            (*(value for _, value in wanted), plain(max(0, limit))),
        )
        return list(_read(reversed(rows) if after is None else rows, DecisionReader(self._db)))

    def all_events(self, kinds: Collection[str]) -> Iterator[EventRow]:
        """Yield every event up to now, in order, or those of some kinds. Only one page is held in memory."""
        # The `+` keeps SQLite from using the index on kind and sorting all events for every page.
        among = f"AND +kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
        sql = f"{_SQL} WHERE seq > ? AND seq <= ? {among} ORDER BY seq LIMIT {_PAGE}"
        at, last, decisions = 0, self.span().last, DecisionReader(self._db)
        while rows := self._db.rows(sql, (at, last, *kinds)):
            at = rows[-1][0]
            yield from _read(rows, decisions)

    def ends(self) -> tuple[int, int]:
        """Return the numbers of the first and the last event; 0 if there is none."""
        ((first,),) = self._db.rows("SELECT min(seq) FROM events")  # two queries: SQLite looks up one end only
        ((last,),) = self._db.rows("SELECT max(seq) FROM events")
        return first or 0, last or 0

    def time_of(self, seq: int) -> float | None:
        """Return the time of an event."""
        row = self._db.row("SELECT time FROM events WHERE seq = ?", (seq,))
        return None if row is None else row[0]

    def first_since(self, time: float) -> int:
        """Return the number of the first event at or after a time, or that of the next event to come.

        Numbers have no gaps, and times rise with them.
        """
        low, last = self.ends()
        high = last + 1
        while low < high:
            middle = (low + high) // 2
            found = self.time_of(middle)
            if found is None or found < time:
                low = middle + 1
            else:
                high = middle
        return low

    def span(self) -> EventSpan:
        """Return the range of the events."""
        first, last = self.ends()
        ((count,),) = self._db.rows("SELECT count(*) FROM events")
        ever = self._db.row("SELECT seq FROM sqlite_sequence WHERE name = 'events'")
        return EventSpan(first, last, count, ever[0] if ever else 0, self.trimmed())

    def trimmed(self) -> int:
        """Return the number of the last event that was dropped on purpose."""
        row = self._db.row("SELECT value FROM kept WHERE key = ?", (TRIMMED_KEY,))
        return int(row[0]) if row is not None else 0

    def trim(self, upto: int) -> int:
        """Drop the events up to a number and return how many were dropped."""
        with self._db.transaction():
            first, last = self.ends()
            upto = min(upto, last)
            if not first or first > upto:
                return 0
            self._keep_assignment(upto)
            self._db.run(_KEEP, (TRIMMED_KEY, encoded(upto)))  # the guard of the table lets events up to here go
            return self._db.run("DELETE FROM events WHERE seq <= ?", (upto,)).rowcount

    def trim_to(self, keep_newest: int) -> int:
        """Drop all but the newest events and return how many were dropped."""
        if keep_newest < 0:
            raise InputError(f"`keep_newest` must be 0 or more, but got {keep_newest}")
        return self.trim(self.ends()[1] - keep_newest)

    def _keep_assignment(self, upto: int) -> None:
        """Store the nodes by trainer at the cut, if the first decision that stays has changes only."""
        sql = "SELECT data FROM events WHERE kind = ? AND seq > ? ORDER BY seq LIMIT 1"
        next_decision = self._db.row(sql, (Decided.kind, upto))
        if next_decision is not None and is_in_changes(next_decision[0]):
            self._db.run(_KEEP, (AT_THE_CUT, encoded(assigned_before(self._db, upto + 1))))


def _read(rows: Any, decisions: DecisionReader) -> Iterator[EventRow]:
    for seq, time, kind, trainer, node, data in rows:
        event = EventRow(seq, time, kind, trainer, node, decoded_object(data))
        yield replace(event, data=decisions.whole(seq, event.data)) if kind == Decided.kind else event
