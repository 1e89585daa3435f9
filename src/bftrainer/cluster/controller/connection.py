"""A connection queues the controller's messages until an agent takes them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from bftrainer.cluster.wire import codec
from bftrainer.cluster.wire.messages import FromController

MOST_QUEUED = 10_000
"""The most messages queued for an agent. With more, its connection is closed."""


class Connection:
    """The controller's side of the connection to the agent of one node."""

    def __init__(self, node: str, agent: str) -> None:
        self.node = node
        self.agent = agent
        self.on_close: Callable[[], None] | None = None
        """Called when the connection is closed: its peer may neither read nor send, so nothing else would end it."""
        self._queue: asyncio.Queue[FromController | None] = asyncio.Queue(MOST_QUEUED)

    def send(self, message: FromController) -> None:
        """Queue a message. It is sent as soon as the agent takes it."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self.close()

    def close(self) -> None:
        """End the connection. Messages that are still queued are dropped."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)
        if self.on_close is not None:
            self.on_close()

    async def pump(self, send: Callable[[str], Awaitable[None]]) -> None:
        """Send the queued messages until the connection is closed."""
        with contextlib.suppress(OSError, RuntimeError):  # the peer is gone: the reading side notices
            while (message := await self._queue.get()) is not None:
                await send(codec.encode(message))


class Connections(dict[str, Connection]):
    """The current connection of each node's agent, by node."""

    def is_current(self, connection: Connection) -> bool:
        """Whether no other connection of the node's agent has replaced this one."""
        return self.get(connection.node) is connection

    def send(self, node: str, message: FromController) -> None:
        """Queue a message for the agent of a node. It is dropped if the agent is not connected."""
        if node in self:
            self[node].send(message)
