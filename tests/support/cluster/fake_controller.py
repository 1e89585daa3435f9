"""A controller that a test plays itself: takes down what agents say, stores their logs, says what it is told to."""

from __future__ import annotations

import http
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from bftrainer.cluster.wire import messages
from bftrainer.cluster.wire.messages import Ended, Forget, FromAgent, FromController, Join, Log, Logged, Welcome
from support.waiting import until

M = TypeVar("M")


@dataclass
class FakeController:
    """One that can be closed and opened again at the same port, with what it has stored."""

    secret: str = "quite-secret"
    welcome: Mapping[str, Any] = field(default_factory=dict)
    forgets: bool = True
    """Whether it says `Forget` to every `Ended`."""
    logs: dict[str, str] = field(default_factory=dict)
    log_sizes: dict[str, int] = field(default_factory=dict)
    acknowledges: bool = True
    heard: list[FromAgent] = field(default_factory=list)
    """All connections' messages."""
    connections: int = 0
    refusals: int = 0
    port: int = 0
    _server: Server | None = None
    _connection: ServerConnection | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> FakeController:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        self._server = await serve(
            self._serve, "127.0.0.1", self.port, process_request=self._check, max_size=16 << 20, ping_interval=None
        )
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    async def cut(self) -> None:
        """Lose the connection as a broken network does."""
        assert self._connection is not None
        self._connection.transport.abort()

    def _check(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.headers.get("Authorization") == f"Bearer {self.secret}" and request.path == messages.PATH:
            return None
        self.refusals += 1
        return connection.respond(http.HTTPStatus.UNAUTHORIZED, "no\n")

    async def _serve(self, connection: ServerConnection) -> None:
        self._connection = connection
        self.connections += 1
        try:
            async for frame in connection:
                message = messages.decode(frame)
                assert isinstance(message, FromAgent)
                self.heard.append(message)
                await self._answer(message)
        except ConnectionClosed:
            pass

    async def _answer(self, message: FromAgent) -> None:
        match message:
            case Join():
                await self.say(Welcome(**{"beat_s": 0.1, **self.welcome, "logged": self.log_sizes}))
                if self.forgets:
                    for worker in message.workers:
                        if worker.status is not None:
                            await self.say(Forget(worker.worker))
            case Log(worker, offset, text, size):
                if offset == self.log_sizes.get(worker, 0):
                    self.logs[worker] = self.logs.get(worker, "") + text
                    self.log_sizes[worker] = offset + size
                if self.acknowledges:
                    await self.say(Logged(worker, self.log_sizes[worker]))
            case Ended(worker) if self.forgets:
                await self.say(Forget(worker))

    async def say(self, message: FromController) -> None:
        await self.say_raw(messages.encode(message))

    async def say_raw(self, frame: str | bytes) -> None:
        assert self._connection is not None
        await self._connection.send(frame)

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def hears(self, kind: type[M], count: int = 1) -> M:
        """The newest message of a kind, once there are so many."""
        await until(lambda: len(self.all(kind)) >= count, f"{count} × {kind.__name__}")
        return self.all(kind)[-1]

    def said(self, worker: str) -> list[str]:
        """The types of what a worker said."""
        return [m.message["type"] for m in self.all(messages.Heard) if m.worker == worker]
