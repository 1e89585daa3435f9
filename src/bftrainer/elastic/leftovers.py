"""Names the temporary files that snapshots are written to, and deletes those that nobody will finish.

A snapshot is written under such a name and renamed when it is whole, so a file that keeps the name belongs to a writer
that is at work or was killed. `snapshot.py` sweeps before each write; the controller, which needs no PyTorch for it,
when a trainer has ended.
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
"""A temporary file that grew last so long ago has no writer any more, wherever that was."""
STALE_WRITES = 20.0
"""Where a write is known to take long, a file must be older than so many of them."""

_TEMPORARY = re.compile(r"\.snapshot-\d{12}\.[0-9a-f]+\.(\d{1,9})(?:-(\d{1,20}))?@(.+)\.tmp")
"""Step, a random number, process, when that was started (not in files of version 0.1.0), host."""


def temporary_name(step: int) -> str:
    """A name for the file that this process writes a snapshot of `step` to."""
    pid = os.getpid()
    started = _started(pid)
    process = f"{pid}" if started is None else f"{pid}-{started}"
    return f".snapshot-{step:012d}.{secrets.token_hex(4)}.{process}@{socket.gethostname()}.tmp"


def sweep(folder: Path, *, write_s: float = 0.0, ended: bool = False, delete: Callable[[Path], None]) -> None:
    """Have the temporary files in `folder` deleted whose writers are gone; all of them if the training has `ended`.

    On this host a process is known to be gone or not. Of another host's a file counts as left when it has not grown
    for longer than any write takes; `write_s` is how long one takes here, if that is known.
    """
    bound_s = max(STALE_S, STALE_WRITES * write_s)
    for path in list(folder.iterdir()):
        match = _TEMPORARY.fullmatch(path.name)
        if match and (ended or _is_stale(path, int(match[1]), match[2], match[3], bound_s)):
            delete(path)


def sweep_after(folder: Path) -> None:
    """The training in `folder` has ended, and nothing of it runs: delete all its temporary files that can be."""

    def delete(path: Path) -> None:
        with suppress(OSError):  # nobody is left to tell, and nothing depends on it
            path.unlink(missing_ok=True)

    with suppress(OSError):  # most likely the folder is not there, as nothing was ever written
        sweep(folder, ended=True, delete=delete)


def _is_stale(path: Path, pid: int, started: str | None, host: str, bound_s: float) -> bool:
    if host == socket.gethostname() and _is_gone(pid, started):
        return True
    try:
        return time.time() - path.stat().st_mtime > bound_s
    except OSError:
        return False


def _is_gone(pid: int, started: str | None) -> bool:
    """Whether a process of this host has ended. Its number may belong to another one by now, started later."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # somebody else's, so alive
        pass
    now = _started(pid)
    return started is not None and now is not None and started != str(now)


def _started(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks; None where the system does not tell."""
    try:
        # The name of the program, in brackets, may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
