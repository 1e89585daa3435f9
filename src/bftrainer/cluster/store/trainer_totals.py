"""`TrainerTotals` sums over all trainers that ever were, and removes rows of finished ones without changing a sum.

The API, `/metrics` and the owners' figures read the sums; `Trimmer` removes the rows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace

from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.rows import Sums
from bftrainer.util import ids
from bftrainer.util.text import text

_SUMMED = tuple(field.name for field in fields(Sums))[2:]
# total(), not sum(): workers may report absurd counts, and an overflow would be an error for every owner.
_TOTALS = (
    "total(samples), total(node_seconds), sum(rescales), sum(preemptions), sum(failures), total(samples_redone), "
    "total(gpu_seconds)"
)
_EVER = f"""
SELECT number, owner, state, 1 AS trainers, {", ".join(_SUMMED[1:])} FROM trainers
UNION ALL SELECT 0, owner, state, {", ".join(_SUMMED)} FROM removed_sums
"""  # noqa: S608 - names from this program
_BY_STATE = f"SELECT owner, state, sum(trainers), {_TOTALS} FROM ({_EVER}) GROUP BY owner, state ORDER BY min(number)"  # noqa: S608
_PAST = (
    "SELECT owner, sum(trainers), total(node_seconds), CAST(total(samples) AS INTEGER), total(gpu_seconds) "  # noqa: S608
    f"FROM ({_EVER}) WHERE state IN {FINISHED}"
)
_OF_ENDED = "owner, samples, node_seconds, rescales, gpu_seconds"
_ENDED = f"SELECT {_OF_ENDED} FROM trainers WHERE ended > ? AND ended <= ?"  # noqa: S608
_ENDED_AND_REMOVED = f"{_ENDED} UNION ALL SELECT {_OF_ENDED} FROM removed_sums"  # noqa: S608
_BY_END = (
    "SELECT owner, CAST(total(samples) AS INTEGER), total(node_seconds), sum(rescales), total(gpu_seconds) FROM ({}) "
    "GROUP BY owner"
)
_REMOVE = f"""
INSERT INTO removed_sums (owner, state, {", ".join(_SUMMED)})
SELECT owner, state, count(*), {_TOTALS} FROM trainers WHERE number = ? GROUP BY owner, state
ON CONFLICT (owner, state) DO UPDATE SET {", ".join(f"{name} = {name} + excluded.{name}" for name in _SUMMED)}
"""  # noqa: S608


class TrainerTotals:
    """Sums over the trainers of a database, and what is read of many of them at once; `Store.totals`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def by_state(self) -> list[Sums]:
        """Return sums over all trainers by owner and state, in order of the owners' first trainers."""
        sums = (Sums(*row) for row in self._db.rows(_BY_STATE))
        return [replace(row, samples=int(row.samples), samples_redone=int(row.samples_redone)) for row in sums]

    def ended(self, after: float, upto: float) -> list[tuple[str, int, float, int, float]]:
        """Return samples, node-seconds, rescales and GPU-seconds by owner, of trainers that ended in a span of time.

        It is the time after `after`, up to `upto`. Trainers whose rows were removed count as ended before all others.
        """
        among = _ENDED_AND_REMOVED if after == float("-inf") else _ENDED
        return self._db.rows(_BY_END.format(among), (after, upto))

    def of_finished(self, owner: str | None = None) -> dict[str, tuple[int, float, int, float]]:
        """Return number, node-seconds, samples and GPU-seconds of finished trainers by owner, or of one owner."""
        only = "" if owner is None else "AND owner = ?"
        rows = self._db.rows(f"{_PAST} {only} GROUP BY owner", () if owner is None else (text(owner),))
        return {owner: (count, seconds, samples, gpu_seconds) for owner, count, seconds, samples, gpu_seconds in rows}

    def removed(self) -> int:
        """Return how many trainers were removed."""
        return int(self._db.rows("SELECT ifnull(sum(trainers), 0) FROM removed_sums")[0][0])

    def remove(self, numbers: Collection[int]) -> None:
        """Remove the rows of trainers that are finished; others stay. No sum changes."""
        with self._db.transaction():
            for number in numbers:
                row = self._db.row("SELECT state FROM trainers WHERE number = ?", (number,))
                if row is not None and row[0] in FINISHED:
                    self._db.run(_REMOVE, (number,))
                    self._db.run("DELETE FROM workers WHERE trainer = ?", (number,))
                    self._db.run("DELETE FROM points WHERE trainer = ?", (number,))
                    self._db.run("DELETE FROM trainers WHERE number = ?", (number,))

    def ended_before(self, time: float) -> list[int]:
        """Return the numbers of trainers that ended before a time."""
        return [number for (number,) in self._db.rows("SELECT number FROM trainers WHERE ended < ?", (time,))]

    def ends(self, trainers: Collection[str]) -> list[tuple[str, str, str, float | None]]:
        """Return id, name, owner and end of trainers by id. The end of an unfinished trainer is None."""
        numbers = [number for id_ in trainers if (number := ids.trainer_number(id_)) is not None]
        sql = f"SELECT number, name, owner, CASE WHEN state IN {FINISHED} THEN ended END FROM trainers WHERE number = ?"  # noqa: S608
        found = (self._db.row(sql, (number,)) for number in sorted(numbers))
        return [(ids.trainer_id(row[0]), *row[1:]) for row in found if row is not None]

    def newest_names(self, owner: str | None = None, most: int = 100) -> list[str]:
        """Return the names of the newest trainers, at most so many; with an `owner`, of that owner's."""
        mine, whose = ("", ()) if owner is None else ("WHERE owner = ?", (text(owner),))
        sql = f"SELECT name FROM trainers {mine} ORDER BY number DESC LIMIT ?"  # noqa: S608
        return [name for (name,) in self._db.rows(sql, (*whose, most))]
