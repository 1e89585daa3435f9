"""The agent's private folder holds its socket and its workers' output.

The agent removes its folder when it ends. The folder of an agent that was killed is removed by a later agent: a living
agent holds the lock in its folder, and a lock does not outlive its process.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bftrainer.util.locks import is_locked, take_lock

PREFIX = "bft-agent-"
YOUNG_S = 60.0
"""Folders younger than this are not removed: a folder that has just been made may not be locked yet."""
_MOST_PRINTED = 4 << 20
_MOST_PATH = 80
"""The longest path of the folder. The path of a Unix socket may have only about a hundred characters."""


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder of mode 0700 with a short path, lock it, and remove it at the end."""
    base = Path(tempfile.gettempdir())
    if len(str(base)) + len(PREFIX) > _MOST_PATH:
        base = Path("/tmp")  # noqa: S108 - the folder in it is private
    sweep(base)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    lock = take_lock(folder / "lock")
    assert lock is not None, "nobody else knows the new folder"
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep(base: Path) -> None:
    """Remove the folders that this user's killed agents left in `base`."""
    for folder in base.glob(f"{PREFIX}*"):
        with suppress(OSError):
            facts = folder.lstat()
            old = time.time() - facts.st_mtime > YOUNG_S
            if old and stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not is_locked(folder / "lock"):
                shutil.rmtree(folder, ignore_errors=True)


def print_to(path: Path) -> None:
    """Let this process, and what it starts, print to a file of its own, in two folders that nobody else may enter.

    A large file of before is begun anew.
    """
    for folder in (path.parent.parent, path.parent):  # `parents=True` would make the first one open to all
        folder.mkdir(mode=0o700, exist_ok=True)
    begun = os.O_TRUNC if path.exists() and path.stat().st_size > _MOST_PRINTED else 0
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | begun, 0o600)
    for descriptor in (1, 2):
        os.dup2(opened, descriptor)
    os.close(opened)
