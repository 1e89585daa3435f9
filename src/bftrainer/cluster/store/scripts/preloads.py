"""The preload table keeps what scripts import, by script and interpreter.

The controller reads it once and writes what it learns (`controller.start_up.preloads`). It is bounded: the scripts that
were learned about longest ago go first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.json_columns import decoded, encoded
from bftrainer.util.text import text

MOST_SCRIPTS = 500
"""Maximum number of scripts."""
MOST_BYTES = 20_000
"""Maximum size of the modules of one script, as JSON. Those that take longest to import stay."""

Script = tuple[str, str]
"""The path of a script, or `-m MODULE` and its folder; and its interpreter."""


@dataclass(frozen=True, slots=True)
class ScriptImports:
    """What a script imports."""

    modules: Mapping[str, float] = field(default_factory=dict)
    """Installed modules in the order of their imports, and the seconds that each took."""
    left_out: Sequence[str] = ()
    """Modules that the script must import itself, because it sets variables that they read before it imports them."""


class PreloadTable:
    """Reads and writes the table."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def all(self) -> dict[Script, ScriptImports]:
        """Return what is known of each script."""
        rows = self._db.rows("SELECT script, python, modules, left_out FROM preloads")
        return {(row[0], row[1]): ScriptImports(decoded(row[2]), decoded(row[3])) for row in rows}

    def put(self, script: Script, imports: ScriptImports, time: float) -> None:
        """Store what is known of a script, in place of what was."""
        self._db.run(
            "INSERT OR REPLACE INTO preloads (script, python, modules, left_out, changed) VALUES (?, ?, ?, ?, ?)",
            (text(script[0]), text(script[1]), encoded(imports.modules), encoded(list(imports.left_out)), time),
        )
        self._db.run(
            "DELETE FROM preloads WHERE changed < "
            "(SELECT changed FROM preloads ORDER BY changed DESC LIMIT 1 OFFSET ?)",
            (MOST_SCRIPTS - 1,),
        )


def bounded(modules: Mapping[str, float]) -> dict[str, float]:
    """Return the modules that may be stored: if they are too many, without those that take least."""
    kept = dict(modules)
    for name in sorted(kept, key=lambda name: kept[name]):
        if len(encoded(kept)) <= MOST_BYTES:
            break
        del kept[name]
    return kept
