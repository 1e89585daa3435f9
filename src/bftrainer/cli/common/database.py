"""Database access for the commands that edit the controller's file directly: `owner` and `token`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from bftrainer.cli.common.connection import live_packages
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.util import locks

if TYPE_CHECKING:
    from bftrainer.cluster.store.store import Store


def open_store(folder: Path, *, make: bool = False, read_only: bool = False) -> Store:
    """Open the store in a state folder. If there is none, it is created with `make`, else the call is refused.

    A file of an older version is migrated only while no controller uses it, and never if it is only read.
    """
    with live_packages():
        from bftrainer.cluster.store.database import OlderSchemaError
        from bftrainer.cluster.store.store import FILE, Store

    path = folder / FILE
    if make:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as problem:
            raise BFTrainerError(f"{folder}: {problem.strerror}; choose another folder with --state") from None
    elif not path.is_file():
        raise InputError(f"{path}: there is no database: start `bftrainer serve` first, or name the folder by --state")
    if read_only:
        return Store.open(path, read_only=True)
    if path.is_file():
        try:
            Store.open(path, read_only=True).close()
        except OlderSchemaError:
            return _migrated(path)
    return Store.open(path)


def _migrated(path: Path) -> Store:
    """Open a file of an older version, and migrate it while this process holds the controller's lock."""
    from bftrainer.cluster.store.state_folder import LOCK_FILE
    from bftrainer.cluster.store.store import Store

    lock_file = path.with_name(LOCK_FILE)
    try:
        lock = locks.take_lock(lock_file)
    except OSError as problem:
        raise BFTrainerError(f"{lock_file}: {problem.strerror}") from None
    if lock is None:
        raise BFTrainerError(
            f"{path} is of an older BFTrainer, and a controller (pid {locks.read_pid(lock_file) or '?'}) uses it: use "
            "the `bftrainer` of that version, or stop the controller and start it with this one"
        )
    try:
        return Store.open(path)
    finally:
        os.close(lock)
