"""A serial thread does work on files one after the other, outside the event loop.

The controller uses it for file systems that may be slow or hang. The thread is a daemon: if it hangs, it keeps neither
the event loop nor the end of the process waiting.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

_Entry = tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]


class SerialThread:
    """Does work in the order in which it was given. Call its methods only in the thread of the running event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._entries: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._began: float | None = None

    def do(self, work: Callable[[], Any], then: Callable[[Any, BaseException | None], None]) -> None:
        """Have `work` done. `then` is called on the event loop with its result, or with the exception it raised."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._entries.put((work, then))

    @property
    def busy_s(self) -> float:
        """For how long the present work has taken; 0 if there is none."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def close(self, timeout_s: float) -> None:
        """Wait for all work that was given, for at most `timeout_s` seconds."""
        if self._thread is not None:
            self._entries.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (entry := self._entries.get()) is not None:
            work, then = entry
            result: Any = None
            failed: BaseException | None = None
            self._began = time.monotonic()
            try:
                result = work()
            except BaseException as problem:
                failed = problem
            finally:
                self._began = None
            try:
                self._loop.call_soon_threadsafe(then, result, failed)
            except RuntimeError:  # the loop has ended meanwhile
                return
