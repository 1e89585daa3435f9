"""Database access for the commands that edit the controller's file directly: `owner` and `token`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bftrainer.cli.common.connection import live_packages
from bftrainer.errors import BFTrainerError, InputError

if TYPE_CHECKING:
    from bftrainer.cluster.store.store import Store


def open_store(folder: Path, *, make: bool) -> Store:
    """Open the store in a state folder. If there is none, it is created with `make`, else the call is refused."""
    with live_packages():
        from bftrainer.cluster.store.store import FILE, Store

    path = folder / FILE
    if make:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as problem:
            raise BFTrainerError(f"{folder}: {problem.strerror}; choose another folder with --state") from None
    elif not path.is_file():
        raise InputError(f"{path}: there is no database: start `bftrainer serve` first, or name the folder by --state")
    return Store.open(path)
