"""The head agent runs workers on the controller's machine.

It starts when the first trainer needs it. It runs in its own session, so it and its workers outlive the controller.
While it lives it holds a lock that the controller passed to it. A new controller, after a kill, sees from the lock that
a head agent exists and will reconnect, and does not start a second one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from bftrainer.cluster.launchers.base import HEAD
from bftrainer.processes import variables
from bftrainer.util import locks
from bftrainer.util.backoff import Backoff

LOCK, LOG = "head.lock", "head.log"
STRAY_S = 30.0
"""A head agent that is alive but has not connected for this long is ended, and another one is started."""
BACKOFF = Backoff(1.0, 30.0)
"""Waits between two attempts to start a head agent."""
GOOD_S = 60.0
"""A head agent that ran for longer than this has not failed."""
END_S = 3.0
_MOST_LOG = 4 << 20

_log = logging.getLogger(__name__)


class HeadAgent:
    """Keeps a head agent running while it is wanted. Call its methods in one thread at a time.

    `keep` looks at files of the state folder, which may be on a file system that hangs: not on the event loop.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._failures = 0
        self._not_before = self._started_at = 0.0
        self._missing_since: float | None = None

    def keep(self, *, wanted: bool, here: bool, now: float | None = None) -> None:
        """Start a head agent if it is `wanted`, not connected (`here`), and not starting. Call this regularly."""
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
            lock = locks.take_lock(self._folder / LOCK)  # None while an agent holds it
            if lock is not None:
                self._start(lock, now)
            elif now - self._missing_since > STRAY_S:
                self._signal(signal.SIGTERM)
                self._missing_since = now
        except OSError as problem:
            _log.error("cannot start an agent beside the controller: %s", problem)
            self._not_before = now + self._pause_s

    async def end(self) -> None:
        """Terminate the head agent, also one that is still starting or cannot reach us: it would never get a `Bye`."""
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
            self._failures = 0
        else:
            self._failures += 1
        self._not_before = now if dismissed else now + self._pause_s
        self._process = None

    @property
    def _pause_s(self) -> float:
        return BACKOFF.wait_s(self._failures + 1)

    def _lives(self) -> bool:
        try:
            return locks.is_locked(self._folder / LOCK)
        except OSError:  # of a file system that has no locks at the moment: nothing says that the agent ended
            return True

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
                env={**variables.inherited(os.environ), **self._environment, variables.NODE: HEAD},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(lock,),
            )
            locks.write_pid(lock, self._process.pid)
        finally:
            os.close(lock)  # the agent has its own copy and keeps the lock
            if log >= 0:
                os.close(log)
        self._started_at = now
        self._not_before = now + self._pause_s
        _log.info("an agent beside the controller is started, pid %d", self._process.pid)

    def _signal(self, signum: int) -> None:
        """Signal the agent that holds the lock. While it holds the lock, its process id cannot be another's."""
        pid = locks.read_pid(self._folder / LOCK)
        if pid is not None:
            with contextlib.suppress(OSError):
                os.kill(pid, signum)
