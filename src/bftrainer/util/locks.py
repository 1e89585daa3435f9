"""Lock files: a lock (`flock`) that the kernel releases when the last process with its descriptor ends.

The descriptor is the lock: a process keeps it open, or hands it to a child, which then holds the lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_LOOK_S = 0.02


def try_lock(descriptor: int) -> bool:
    """Take the lock of an open file. Returns False while another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def take_lock(path: Path, wait_s: float = 0.0) -> int | None:
    """Take the lock of a file, which is created if it is missing. Returns its descriptor.

    Returns None if another process still holds the lock after `wait_s` seconds.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + wait_s
    try:
        while not try_lock(descriptor):
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            time.sleep(_LOOK_S)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file. A file that is missing is not locked."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        # A shared lock, so that two processes that look do not take each other for the holder.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def write_pid(descriptor: int, pid: int) -> None:
    """Write the holder's process id into the lock file."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{pid}\n".encode(), 0)


def read_pid(path: Path) -> int | None:
    """Return the process id in a lock file. It is the holder's only while the lock is held."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
