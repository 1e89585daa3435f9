"""The belief table keeps what was learned of scripts: their rates at every size, pauses and starts.

The controller reads a belief when a trainer of its script is submitted or restored, and writes what it learns
(`jobs.beliefs`). It is bounded: the scripts that were learned about longest ago go first.
"""

from __future__ import annotations

from collections.abc import Mapping
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


class BeliefTable:
    """Reads and writes the table."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def all(self) -> list[BeliefRow]:
        """Return all beliefs, the newest first."""
        columns = "id, owner, script, python, model, data, changed"
        rows = self._db.rows(f"SELECT {columns} FROM beliefs ORDER BY changed DESC")  # noqa: S608 - names of ours
        return [BeliefRow(row[0], BeliefKey(*row[1:5]), decoded(row[5]), row[6]) for row in rows]

    def of(self, key: BeliefKey) -> Mapping[str, Any] | None:
        """Return what is stored of a script; None if nothing is."""
        rows = self._db.rows("SELECT data FROM beliefs WHERE (owner, script, python, model) = (?, ?, ?, ?)", tuple(key))
        return next((decoded(row[0]) for row in rows), None)

    def put(self, key: BeliefKey, found: Mapping[str, Any], time: float) -> None:
        """Store what is known of a script, in place of what was."""
        self._db.run(
            "INSERT INTO beliefs (owner, script, python, model, data, changed) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (owner, script, python, model) DO UPDATE SET data = excluded.data, changed = excluded.changed",
            (*(text(part) for part in key), encoded(found), time),
        )
        self._db.run(
            "DELETE FROM beliefs WHERE changed < (SELECT changed FROM beliefs ORDER BY changed DESC LIMIT 1 OFFSET ?)",
            (MOST_BELIEFS - 1,),
        )
