"""Complete folders: a folder appears under its name when all its files are written, or not at all.

Checkpoints are folders. A process that is killed while it writes one must leave none that a later start would load.
"""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bftrainer.util.files import sync

_UNFINISHED = ".unfinished-"
"""Beginning of the name of a folder in which others are written. Only the main rank writes, one at a time."""
_BEGINNING = ".beginning-"
"""The same before training, when ranks do not know each other yet and several may write."""


@contextmanager
def unfinished_room(folder: Path, *, alone: bool = True) -> Iterator[Path]:
    """Give an empty folder inside `folder`, for folders that `publish` moves out of it. The rest is removed.

    `alone`: no other process writes here, so what is left of killed ones is removed, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_UNFINISHED}*") if alone else ():
        shutil.rmtree(left, ignore_errors=True)
    room = folder / f"{_UNFINISHED if alone else _BEGINNING}{secrets.token_hex(4)}"
    room.mkdir()
    try:
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)


def publish(written: Path, place: Path) -> None:
    """Move a folder from the room to its place. A folder that is there already is replaced."""
    for path in (*(entry for entry in written.rglob("*") if entry.is_file()), written):
        sync(path)
    if place.exists():
        place.rename(written.with_name(f"{written.name}.former"))
    try:
        written.rename(place)
    except OSError as problem:
        if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise  # else another process has put the same folder there meanwhile
    sync(place.parent)
