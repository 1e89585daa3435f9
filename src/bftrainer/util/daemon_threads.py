"""Daemon threads run work that may hang, such as work on files of a network file system, outside the event loop.

A thread that hangs keeps neither the event loop nor the end of the process waiting.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class DaemonThreads:
    """Runs each piece of work in a thread of its own, at most `most` at a time."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._busy = 0

    async def run(self, work: Callable[[], T], timeout_s: float | None = None) -> T:
        """Return the result of `work`. Raises `TimeoutError` if it takes too long or too much other work hangs."""
        if self._busy >= self._most:
            raise TimeoutError
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def finish(result: T | None, problem: BaseException | None) -> None:
            self._busy -= 1
            if done.done():
                return
            if problem is not None:
                done.set_exception(problem)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result: T | None = None
            failed: BaseException | None = None
            try:
                result = work()
            except BaseException as problem:
                failed = problem
            try:
                loop.call_soon_threadsafe(finish, result, failed)
            except RuntimeError:  # the loop has ended meanwhile
                return

        self._busy += 1
        threading.Thread(target=run, name=self._name, daemon=True).start()
        async with asyncio.timeout(timeout_s):
            return await done
