"""Keeps the caches of compiled code within a limit: those of the scripts that compiled longest ago go.

`Housekeeper` calls it in a thread. A cache that is missing is made again.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

RECENT_S = 3600.0
"""Caches that were written to within this time stay: a worker may be compiling."""


def trim_compiled(folder: Path, most_bytes: float, now: float) -> int:
    """Remove the oldest scripts' caches until the rest has at most so many bytes. Returns the bytes removed."""
    caches = sorted((*_newest_and_size(cache), cache) for cache in _folders(folder))
    excess = sum(size for _, size, _ in caches) - most_bytes
    removed = 0
    for written, size, cache in caches:
        if excess <= removed or now - written < RECENT_S:
            break
        shutil.rmtree(cache, ignore_errors=True)
        removed += size
    return removed


def _folders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []


def _newest_and_size(folder: Path) -> tuple[float, int]:
    """Return when a file below a folder was written last, and the bytes of all."""
    newest, size = 0.0, 0
    for base, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                file = Path(base, name).lstat()
                newest, size = max(newest, file.st_mtime), size + file.st_size
    return newest, size
