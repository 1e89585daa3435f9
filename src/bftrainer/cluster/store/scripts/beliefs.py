"""The belief table keeps what was learned of scripts: their rates at every size, pauses and starts.

The controller reads a belief when a trainer of its script is submitted or restored, and writes what it learns
(`jobs.beliefs`). It is bounded: the scripts that were learned about longest ago go first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.json_columns import decoded, encoded
from bftrainer.util.text import text

MOST_BELIEFS = 500


class BeliefKey(NamedTuple):
    """What trainers that share a belief have in common."""

    owner: str
    script: str
    """The path of a script, or `-m MODULE` and its folder."""
    python: str
    """Its interpreter."""
    model: str
    """The model that the trainer names; empty: none."""


class BeliefRow(NamedTuple):
    """A stored belief. Its id stays the same until it is forgotten."""

    id: int
    key: BeliefKey
    found: Mapping[str, Any]
    changed: float


_SELECT = "SELECT id, owner, script, python, model, data, changed FROM beliefs"


class BeliefTable:
    """Reads and writes the table."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def all(self, owner: str | None = None) -> list[BeliefRow]:
        """Return all beliefs, or those of an owner's scripts, the newest first."""
        where, values = ("", ()) if owner is None else ("WHERE owner = ?", (text(owner),))
        rows = self._db.rows(f"{_SELECT} {where} ORDER BY changed DESC, id DESC", values)
        return [_row(row) for row in rows]

    def row(self, number: int) -> BeliefRow | None:
        """Return the belief with an id; None if there is none."""
        return next((_row(row) for row in self._db.rows(f"{_SELECT} WHERE id = ?", (number,))), None)

    def of(self, key: BeliefKey) -> Mapping[str, Any] | None:
        """Return what is stored of a script; None if nothing is."""
        where = "WHERE (owner, script, python, model) = (?, ?, ?, ?)"
        rows = self._db.rows(f"SELECT data FROM beliefs {where}", _texts(key))  # noqa: S608 - names of ours
        return next((decoded(row[0]) for row in rows), None)

    def remove(self, key: BeliefKey) -> None:
        """Forget what is stored of a script."""
        self._db.run("DELETE FROM beliefs WHERE (owner, script, python, model) = (?, ?, ?, ?)", _texts(key))

    def put(self, key: BeliefKey, found: Mapping[str, Any], time: float) -> None:
        """Store what is known of a script, in place of what was."""
        self._db.run(
            "INSERT INTO beliefs (owner, script, python, model, data, changed) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (owner, script, python, model) DO UPDATE SET data = excluded.data, changed = excluded.changed",
            (*_texts(key), encoded(found), time),
        )
        self._db.run(
            "DELETE FROM beliefs WHERE changed < (SELECT changed FROM beliefs ORDER BY changed DESC LIMIT 1 OFFSET ?)",
            (MOST_BELIEFS - 1,),
        )


def _texts(key: BeliefKey) -> tuple[str, ...]:
    """Return a key as it is stored: without what SQLite cannot hold."""
    return tuple(text(part) for part in key)


def _row(row: Sequence[Any]) -> BeliefRow:
    return BeliefRow(row[0], BeliefKey(*row[1:5]), decoded(row[5]), row[6])
