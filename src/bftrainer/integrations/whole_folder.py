"""Whole folders and files: they appear under their names when all is written, or not at all.

Checkpoints are folders. A process that is killed while it writes one must leave none that a later start would load.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bftrainer.util.files import sync

_UNFINISHED = ".unfinished-"
"""Beginning of the name of a folder in which others are written. Only the main rank writes, one at a time."""


@contextmanager
def unfinished_room(folder: Path) -> Iterator[Path]:
    """Give an empty folder inside `folder`, for what `publish` moves out of it. The rest is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_UNFINISHED}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    room = folder / f"{_UNFINISHED}{secrets.token_hex(4)}"
    room.mkdir()
    try:
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)


def publish(written: Path, place: Path) -> None:
    """Move a folder or a file from the room to its place. One that is there already is replaced."""
    for path in (*(entry for entry in written.rglob("*") if entry.is_file()), written):
        sync(path)
    if written.is_file():
        os.replace(written, place)  # noqa: PTH105 - at once
        sync(place.parent)
        return
    if place.exists():
        place.rename(written.with_name(f"{written.name}.former"))
    written.rename(place)
    sync(place.parent)
