"""Stray-process cleanup: finds and ends processes that a worker left behind.

That includes processes in their own sessions and process groups. Each worker has its own mark in its environment, which
all processes it starts inherit; `end_marked` kills all processes with that mark. A warm parent also adopts what its
workers leave (`become_reaper`), so processes without the mark are found among its children. This works on Linux only,
through /proc; elsewhere nothing is found.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

MARK = "BFTRAINER_PROCESS"
"""Environment of a worker and of all processes that it starts: identifies the worker that a launcher started."""
PATIENCE_S = 5.0
"""Seconds to wait for the end of killed processes: the kernel may keep one in a system call."""
_PR_SET_CHILD_SUBREAPER = 36


def new_mark() -> str:
    """Return a mark that no other process has."""
    return secrets.token_hex(12)


def become_reaper() -> bool:
    """From now on adopt descendants of this process that lose their parent. Return whether the system does that."""
    try:
        import ctypes

        return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def any_child() -> bool:
    """Return whether this process has a child, adopted and not yet reaped ones included.

    A reaper without one has no descendants, which costs one system call instead of a look at all processes of the node.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def end_marked(mark: str) -> None:
    """Kill all processes with this mark except the caller, and wait until none is left."""
    wanted = f"{MARK}={mark}".encode()

    def is_marked(pid: int) -> bool:
        with suppress(OSError):
            return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False

    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        marked = [pid for pid in _processes() if pid != os.getpid() and is_marked(pid)]
        if not marked:
            return
        for pid in marked:
            _kill_if(pid, is_marked)
        time.sleep(0.01)


def children() -> list[int]:
    """Return the children of this process, including adopted ones."""
    return [pid for pid, parent in _parents().items() if parent == os.getpid()]


def end_trees(roots: Iterable[int]) -> None:
    """Kill children of this process and their descendants, and reap the children."""
    parents = _parents()
    doomed = set(roots)
    roots = tuple(doomed)
    while more := {pid for pid, parent in parents.items() if parent in doomed} - doomed:
        doomed |= more
    for pid in doomed:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    for pid in roots:
        with suppress(ChildProcessError):
            while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
                time.sleep(0.005)


def _processes() -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - only names are needed
    return []


def _parents() -> dict[int, int]:
    """Return the parent of each process."""
    parents = {}
    for pid in _processes():
        with suppress(OSError, ValueError, IndexError):
            # The name in parentheses may contain any character, including spaces and parentheses.
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return parents


def _kill_if(pid: int, condition: Callable[[int], bool]) -> None:
    """Kill a process that is not our child, unless its id has meanwhile been given to another one."""
    with suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if condition(pid):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
