"""Leftovers of snapshot writes: names temporary files, and deletes those whose writers are gone.

A snapshot is written under a temporary name and renamed when it is complete. A file that still has the temporary name
belongs to a writer that is at work or was killed. `torch/snapshots/snapshot.py` deletes leftovers before each write.
The controller, which has no PyTorch, deletes them when a trainer has ended.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

STALE_S = 300.0
"""A temporary file that has not grown for this long has no writer any more, on whichever host that was."""
STALE_WRITES = 20.0
"""If the duration of a write is known, a file must also be older than this many writes."""

SNAPSHOT_FILE = re.compile(r"snapshot-(\d{12})\.bft")
"""Name of a complete snapshot: its step."""
_TEMPORARY = re.compile(r"\.snapshot-\d{12}\.[0-9a-f]+\.(\d{1,9})(?:-(\d{1,20}))?@(.+)\.tmp")
"""Step, random number, process id, start time of the process (not in files of version 0.1.0), host."""


def temporary_name(step: int) -> str:
    """Return a name for the file that this process writes a snapshot of `step` to."""
    pid = os.getpid()
    started = _started(pid)
    process = f"{pid}" if started is None else f"{pid}-{started}"
    return f".snapshot-{step:012d}.{secrets.token_hex(4)}.{process}@{socket.gethostname()}.tmp"


def sweep(folder: Path, *, write_s: float = 0.0, ended: bool = False, delete: Callable[[Path], None]) -> None:
    """Call `delete` for each temporary file in `folder` whose writer is gone, or for all if the training has `ended`.

    For writers on this host the process table tells whether they are gone. A file of another host counts as left behind
    when it has not grown for longer than any write takes. `write_s` is how long a write takes here, if that is known.
    """
    bound_s = max(STALE_S, STALE_WRITES * write_s)
    for path in list(folder.iterdir()):
        match = _TEMPORARY.fullmatch(path.name)
        if match and (ended or _is_stale(path, int(match[1]), match[2], match[3], bound_s)):
            delete(path)


def sweep_after(folder: Path) -> None:
    """Delete all temporary files in `folder` of a training that has ended and has no process left."""

    def delete(path: Path) -> None:
        with suppress(OSError):  # no process is left to report it to, and nothing depends on it
            path.unlink(missing_ok=True)

    with suppress(OSError):  # most likely the folder does not exist because nothing was ever written
        sweep(folder, ended=True, delete=delete)


def _is_stale(path: Path, pid: int, started: str | None, host: str, bound_s: float) -> bool:
    if host == socket.gethostname() and _is_gone(pid, started):
        return True
    try:
        return time.time() - path.stat().st_mtime > bound_s
    except OSError:
        return False


def _is_gone(pid: int, started: str | None) -> bool:
    """Return whether a process of this host has ended. A process started later may have its number by now."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it belongs to another user, so it is alive
        pass
    now = _started(pid)
    return started is not None and now is not None and started != str(now)


def _started(pid: int) -> int | None:
    """Return when a process was started, in the kernel's ticks; None where the system does not tell."""
    try:
        # The program's name, in brackets, may contain any character.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
