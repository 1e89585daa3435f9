"""The controller's end of one agent's connection: what is to be sent waits here until the agent takes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from bftrainer.cluster import wire
from bftrainer.cluster.wire import FromController

MOST_QUEUED = 10_000
"""Messages for an agent that does not take them; then its connection is cut."""


class Connection:
    """Of the agent of a node."""

    def __init__(self, node: str, agent: str) -> None:
        self.node = node
        self.agent = agent
        self._queue: asyncio.Queue[FromController | None] = asyncio.Queue(MOST_QUEUED)

    def send(self, message: FromController) -> None:
        """Send it as soon as the agent takes it."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self.close()

    def close(self) -> None:
        """End the connection, whatever is still to be sent."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def pump(self, send: Callable[[str], Awaitable[None]]) -> None:
        """Send what is queued until the connection is closed."""
        with contextlib.suppress(OSError, RuntimeError):  # it is gone: whoever reads notices
            while (message := await self._queue.get()) is not None:
                await send(wire.encode(message))
