"""The agent beside the controller: started when the first trainer needs it, and found again after a kill.

It is a process of its own session, so that it outlives the controller with all that it runs. As long as it lives it
holds a lock that the controller has handed to it: a new controller sees by the lock that there is one already, which
will come back, and starts no second.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from bftrainer.cluster import wire
from bftrainer.cluster.launchers.base import HEAD

LOCK, LOG = "head.lock", "head.log"
STRAY_S = 30.0
"""One that lives and has not come for so long does not find the controller: it is ended, and another one started."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Between two attempts to start one."""
GOOD_S = 60.0
"""One that stayed for so long has not failed."""
END_S = 3.0
_MOST_LOG = 4 << 20

_log = logging.getLogger(__name__)


class HeadAgent:
    """Keeps one running while it is wanted. All methods are for the thread of the running event loop."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._pause_s = FIRST_PAUSE_S
        self._not_before = self._started_at = 0.0
        self._missing_since: float | None = None

    def keep(self, *, wanted: bool, here: bool, now: float | None = None) -> None:
        """Start one if it is `wanted`, not `here`, and not on its way. To be called again and again."""
        now = time.monotonic() if now is None else now
        self._reap(now)
        if not wanted or here:
            self._missing_since = None
            return
        if self._missing_since is None:
            self._missing_since = now
        if now < self._not_before:
            return
        try:
            lock = self._take_lock()
            if lock is not None:
                self._start(lock, now)
            elif now - self._missing_since > STRAY_S:
                self._signal(signal.SIGTERM)
                self._missing_since = now
        except OSError as problem:
            _log.error("cannot start an agent beside the controller: %s", problem)
            self._not_before = now + self._pause_s

    async def end(self) -> None:
        """Have none left: whoever is on its way, or does not find the way, has no controller to tell it."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            if not self._lives():
                break
            self._signal(signum)
            deadline = time.monotonic() + END_S
            while self._lives() and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
        self._reap(time.monotonic())

    def _reap(self, now: float) -> None:
        if self._process is None or self._process.poll() is None:
            return
        dismissed = self._process.returncode == 0
        if dismissed or now - self._started_at > GOOD_S:
            self._pause_s = FIRST_PAUSE_S
        else:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._not_before = now if dismissed else now + self._pause_s
        self._process = None

    def _lives(self) -> bool:
        lock = self._take_lock()
        if lock is not None:
            os.close(lock)
        return lock is None

    def _take_lock(self) -> int | None:
        """The lock's descriptor, or None while an agent has it."""
        descriptor = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor

    def _start(self, lock: int, now: float) -> None:
        path = self._folder / LOG
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size > _MOST_LOG:
                path.replace(path.with_name(LOG + ".1"))
        log = -1
        try:
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.ftruncate(lock, 0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "bftrainer.cluster.agent"],
                env={**wire.inherited(os.environ), **self._environment, wire.NODE: HEAD},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(lock,),
            )
            os.pwrite(lock, f"{self._process.pid}\n".encode(), 0)
        finally:
            os.close(lock)  # the agent has it too, and keeps it
            if log >= 0:
                os.close(log)
        self._started_at = now
        self._not_before = now + self._pause_s
        _log.info("an agent beside the controller is started, pid %d", self._process.pid)

    def _signal(self, signum: int) -> None:
        """Signal the one that holds the lock. While it does, its process id is its own."""
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((self._folder / LOCK).read_text()), signum)
