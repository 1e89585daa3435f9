"""Measures the files of a trainer in the state folder, and removes them.

Only the folder `trainers/ID` counts. Snapshots and output that a user has moved elsewhere, by variables of the
environment, are the user's own. Symbolic links are not followed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bftrainer.elastic.snapshot_header import by_lineage, is_whole

SNAPSHOTS, OUTPUT = "snapshots", "output"
LOGS = ("log", "log.1")
ASIDE = ".removed"
"""Folder beside those of the trainers. A folder to remove is moved there first, because deleting it takes long."""


@dataclass(frozen=True, slots=True)
class TrainerFiles:
    """What a trainer has in its folder, in bytes."""

    older_snapshots: int = 0
    """All snapshots before the last whole one."""
    logs: int = 0
    results: int = 0
    """The last whole snapshot and those after it, the output folder, and all other files."""

    @property
    def total(self) -> int:
        """All bytes."""
        return self.older_snapshots + self.logs + self.results


def measure(folder: Path) -> TrainerFiles:
    """Return the sizes of a trainer's files; zeros if it has no folder, or a link. It waits for the file system."""
    if folder.is_symlink():
        return TrainerFiles()
    older = sum(_size(path) for path in older_snapshots(folder))
    logs = sum(_size(folder / name) for name in LOGS)
    return TrainerFiles(older, logs, max(_tree_size(folder) - older - logs, 0))


def older_snapshots(folder: Path, *, payload: bool = False) -> list[Path]:
    """Return the snapshots before the newest one that is whole, which is the one to resume from.

    `payload`: a snapshot counts as whole only if the checksum of all its bytes is right; to find out, it is read.
    If a file cannot be read, nothing is returned.
    """
    snapshots = folder / SNAPSHOTS
    if folder.is_symlink() or snapshots.is_symlink():
        return []
    with suppress(OSError):
        found = by_lineage(snapshots, strict=True)
        for number, (_, step, path) in reversed(list(enumerate(found))):
            if is_whole(path, step, payload=payload):
                return [older for _, _, older in found[:number]]
    return []


def remove_files(paths: Iterable[Path]) -> str:
    """Delete files. Returns what went wrong, or an empty text."""
    problem = ""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            problem = f"{path}: {error.strerror or error}"
    return problem


def put_aside(folder: Path) -> str:
    """Move a trainer's folder to `ASIDE`, at once and completely. Returns what went wrong, or an empty text."""
    try:
        if folder.is_symlink():
            return f"{folder} is a symbolic link: remove it and what it points to by hand"
        aside = folder.parent / ASIDE
        aside.mkdir(mode=0o700, exist_ok=True)
        folder.rename(aside / f"{folder.name}.{secrets.token_hex(4)}")
    except FileNotFoundError:
        return ""  # somebody else removed it
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    return ""


def empty_aside(trainers: Path) -> None:
    """Delete what was put aside. What cannot be deleted stays for the next time."""
    with suppress(OSError):
        for path in list((trainers / ASIDE).iterdir()):
            shutil.rmtree(path, ignore_errors=True)


def _size(path: Path) -> int:
    try:
        found = path.lstat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _tree_size(folder: Path) -> int:
    """Return the bytes of all files below a folder. A file with several names counts once per name."""
    total, folders = 0, [os.fspath(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        elif entry.is_file(follow_symlinks=False):
                            total += entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
    return total
