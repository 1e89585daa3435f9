"""Forming steps: run a blocking call in its own thread, so that it can be given up.

Gloo and NCCL wait for a dead peer in a way that cannot be interrupted. `Aside` runs such a call. When the call is
cancelled, the sockets that it opened are shut, which ends it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from bftrainer.elastic.torch.group.sockets import knock, open_sockets, shut

_LOOK_S = 0.01
_ENDING_S = 1.0
"""Seconds to try to end a call that was given up. Usually it takes milliseconds."""

T = TypeVar("T")


class Cancelled(Exception):  # noqa: N818 - an answer, not an error
    """The call was given up."""


class Aside(Generic[T]):
    """One call in its own thread."""

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call = call
        self._result: queue.Queue[tuple[T | None, Exception | None]] = queue.Queue()
        self._before = set(open_sockets())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self, cancelled: Callable[[], bool]) -> T:
        """Return the result of the call or raise its exception. Raises `Cancelled` when `cancelled` returns True."""
        while True:
            with contextlib.suppress(queue.Empty):
                value, problem = self._result.get(timeout=_LOOK_S)
                if problem is not None:
                    raise problem
                return value  # type: ignore[return-value]
            if cancelled():
                raise Cancelled

    def end(self, hosting: set[str], peers: int, *, gloo: bool) -> None:
        """End the call and free what it holds. Sockets that were open before are left alone, except those in `hosting`.

        The call may be between one wait and the next, so its sockets are shut repeatedly until it ends.
        """
        give_up = time.monotonic() + _ENDING_S
        while self._thread.is_alive() and time.monotonic() < give_up:
            for inode, fd in open_sockets().items():
                if inode in hosting or inode not in self._before:
                    shut(fd, listening=not gloo)
                if gloo and inode not in self._before:
                    knock(fd, peers)
            self._thread.join(_LOOK_S)

    def runs(self) -> bool:
        """Return whether the call is still running."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the call."""
        self._thread.join(max(0.0, timeout_s))

    def _run(self) -> None:
        try:
            self._result.put((self._call(), None))
        except Exception as problem:
            self._result.put((None, problem.with_traceback(None)))  # a traceback would keep the call's objects alive
