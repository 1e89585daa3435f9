"""Environment files keep the values of trainers' environment variables outside of the database.

Users pass passwords and tokens to their scripts by `submit --env`. The database, its back-ups and every answer of the
API have only the names; the values are in one file per unfinished trainer, readable by the controller's account alone.
The file is removed when the trainer has ended.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.json_columns import decoded_object, encoded
from bftrainer.elastic import protocol
from bftrainer.errors import BFTrainerError
from bftrainer.util.files import replace_file

FOLDER = "environments"
"""Name of the folder in the state folder."""
_MOVED = "store.environments_moved"
"""Key in the store that says that no value of an earlier version is left in the database."""
SHOWN = frozenset({protocol.OUTPUT})
"""Variables whose values are paths that the API shows. They stay in the database."""


def without_values(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment as the database holds it: every name, and the values that may be shown."""
    return {name: value if name in SHOWN else "" for name, value in env.items()}


def has_values(env: Mapping[str, str]) -> bool:
    """Whether an environment has variables whose values are in a file."""
    return any(name not in SHOWN for name in env)


def still_holds_values(env: Mapping[str, str]) -> bool:
    """Whether a row of the database itself has values, as version 0.1.0 wrote it."""
    return any(value for name, value in env.items() if name not in SHOWN)


class EnvironmentFiles:
    """The values of unfinished trainers' environments, one file per trainer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stage(self, env: Mapping[str, str]) -> Path | None:
        """Write values for a trainer that has no id yet; None if there are none. Waits for the file system."""
        if not has_values(env):
            return None
        path = self.folder / f"new-{secrets.token_hex(8)}"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, json.dumps({name: value for name, value in env.items() if name not in SHOWN}))
        except OSError as problem:
            raise BFTrainerError(
                f"{self.folder}: cannot be written: {problem.strerror}; free space, or mend it"
            ) from None
        return path

    def split(self, spec: Mapping[str, Any], staged: Path | None) -> tuple[Mapping[str, Any], Path | None]:
        """Return a spec without values, and the file that has them: `staged`, or a new one."""
        env = spec.get("env")
        if not env:
            return spec, staged
        return {**spec, "env": without_values(env)}, staged or self.stage(env)

    def adopt(self, staged: Path | None, trainer: str) -> None:
        """Make the staged values those of a trainer."""
        if staged is None:
            return
        try:
            staged.replace(self._path(trainer))
        except OSError as problem:
            raise BFTrainerError(f"{self._path(trainer)}: cannot be written: {problem.strerror}") from None

    def read(self, trainer: str) -> dict[str, str] | None:
        """Return the values of a trainer; None if they are not here, or cannot be read."""
        try:
            found = json.loads(self._path(trainer).read_text())
        except (OSError, ValueError):
            return None
        return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else None

    def has(self, trainer: str) -> bool:
        """Whether there are values of a trainer."""
        return self._path(trainer).is_file()

    def discard(self, staged: Path | None) -> None:
        """Remove staged values that no trainer took."""
        if staged is not None:
            staged.unlink(missing_ok=True)

    def remove(self, trainer: str) -> None:
        """Remove the values of a trainer that has ended."""
        self._path(trainer).unlink(missing_ok=True)

    def keep_only(self, trainers: Collection[str]) -> None:
        """Remove the values of all other trainers, and what was staged before the controller was killed."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name.removesuffix(".json") not in trainers:
                    path.unlink(missing_ok=True)

    def _path(self, trainer: str) -> Path:
        return self.folder / f"{trainer}.json"


def move_values(path: Path) -> int:
    """Move the values that version 0.1.0 stored in the database at `path` to files, and erase them there.

    Returns how many trainers had any. It does so once; only the process that holds the folder's lock may call it.
    """
    with closing(Database.open(path, read_only=False)) as database:
        if database.row("SELECT 1 FROM kept WHERE key = ?", (_MOVED,)):
            return 0
        files, moved = EnvironmentFiles(path.parent / FOLDER), 0
        env = "CASE WHEN json_valid(spec) THEN json_extract(spec, '$.env') END"
        with database.transaction():
            for number, state, stored in database.rows(
                f"SELECT number, state, spec FROM trainers WHERE ifnull({env}, '{{}}') != '{{}}'"  # noqa: S608
            ):
                old = decoded_object(stored)
                spec, staged = files.split(old, None)
                # After a kill before the erasing, the values are in the file already and the row has none.
                if state in FINISHED or (files.has(f"t{number}") and not still_holds_values(old["env"])):
                    files.discard(staged)
                else:
                    files.adopt(staged, f"t{number}")
                database.run("UPDATE trainers SET spec = ? WHERE number = ?", (encoded(spec), number))
                moved += 1
        if moved:
            database.erase_removed()
        database.run("INSERT INTO kept (key, value) VALUES (?, 'true')", (_MOVED,))
        return moved
