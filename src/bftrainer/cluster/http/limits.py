"""Limits of the web server protect memory, connections and time against any client that can reach it.

- `RequestLimits` wraps the application: it bounds the size of a body and the time to receive it. It rejects a request
  with a body but without a valid token before it reads the body.
- `TimedH11Protocol` closes a connection that does not send the header of a request, or read its response, in time.
- `TimedServer` bounds the time of a TLS handshake.
- `LimitedListener` bounds the number of connections, in total and per address.

uvicorn has no settings for most of this, so the classes rely on inner parts of uvicorn, asyncio and `socket`.
`tests/cluster/test_http_privates.py` fails when a new release changes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import resource
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_BODY_BYTES = 1 << 20
BODY_S = 20.0
"""Seconds within which a body must have arrived."""
REQUEST_S = 20.0
"""Seconds, from the first byte or from the connection, within which a request's header must be complete."""
UNREAD_S = 60.0
"""Seconds within which the client must have read part of a response that exceeds the network's buffers."""
KEEP_ALIVE_S = 30
"""Seconds that a connection may be idle between two requests."""
MOST_HEADER_BYTES = 32 << 10
MOST_FILES = 16_384
SPARE_FILES = 256
"""Descriptors reserved for other uses than connections: the database, logs, pipes of processes."""

LEAST_EACH = 128
"""Connections that one address may always have, even if the total limit is low."""
LOG_EVERY_S = 60.0
MOST_AT_ONCE = 100

_log = logging.getLogger(__name__)

_CLOSE = {"Connection": "close"}
_SAFE = {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer"}


class RequestLimits:
    """ASGI application that limits requests to another one.

    `refusal` returns why a bearer token is refused, or an empty text if it is valid.
    """

    def __init__(self, app: ASGIApp, refusal: Callable[[str], str]) -> None:
        self._app = app
        self._token_refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _SAFE.items():
                    headers.setdefault(name, value)
                if scope["path"].startswith("/v1/"):
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, safely)
            return
        await self._app(scope, _Body(receive).receive, safely)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        """Return the refusal of a request that must be rejected before its body is read, else None."""
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit() and len(length) <= 18) or int(length) > MOST_BODY_BYTES:
            return _refused(413, _TOO_LARGE)
        has_body = int(length) > 0 or "transfer-encoding" in headers
        if has_body and (why := self._token_refusal(bearer(headers.get("authorization")))):
            return _refused(401, why)
        return None


NO_TOKEN = "the token is missing, wrong or revoked (BFTRAINER_TOKEN or client.json)"  # noqa: S105 - a message
_TOO_LARGE = f"the request is too large: at most {MOST_BODY_BYTES:,} bytes are allowed"


def bearer(header: str | None) -> str:
    """Return the token of an Authorization header, or an empty text if there is none."""
    kind, _, token = (header or "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


class _Body:
    """A request body that is counted and timed while it arrives."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._size = 0
        self._until: float | None = None
        self._over = False

    async def receive(self) -> Message:
        """See ASGI. After the end of the body there is no time-out: the call waits until the client disconnects."""
        if self._over:
            return await self._receive()
        now = asyncio.get_running_loop().time()
        self._until = now + BODY_S if self._until is None else self._until
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the body of the request did not arrive within {BODY_S:g} s", _CLOSE) from None
        self._size += len(message.get("body", b""))
        if self._size > MOST_BODY_BYTES:
            raise HTTPException(413, _TOO_LARGE, _CLOSE)
        self._over = not message.get("more_body", False)
        return message


def _refused(status: int, message: str) -> JSONResponse:
    headers = _CLOSE | ({"WWW-Authenticate": "Bearer"} if status == 401 else {})
    return JSONResponse({"error": message}, status, headers)


class TimedH11Protocol(H11Protocol):
    """HTTP connection with a deadline for each request.

    A client that sends nothing, or sends the header byte by byte, is disconnected when the time is up.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._waiting: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._stop_waiting()
        self._go_on_reading()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`. A client that does not read its response is disconnected after `UNREAD_S`."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._go_on_reading()
        super().resume_writing()

    def _go_on_reading(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over to the websocket protocol and stop all timers."""
        super().handle_websocket_upgrade(event)
        self._stop_waiting()
        self._go_on_reading()

    def _watch(self) -> None:
        """Start or stop the request timer.

        The timer runs while no request is being processed and the next request, or the rest of an answered one, is
        awaited.
        """
        if self.transport.get_protocol() is not self or self._busy:
            self._stop_waiting()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(REQUEST_S, self._too_late)

    @property
    def _busy(self) -> bool:
        cycle: Any = self.cycle  # None before the first request
        return self.conn.their_state is not h11.IDLE and cycle is not None and not cycle.response_complete

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _too_late(self) -> None:
        self._waiting = None
        if not self._busy:
            self.transport.abort()


class TimedServer(uvicorn.Server):
    """Web server that does not handle signals and has a short timeout for TLS handshakes."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn. It has no setting for the handshake timeout, which is a minute in asyncio."""
        loop = asyncio.get_running_loop()
        if self.config.is_ssl:
            create_server = functools.partial(loop.create_server, ssl_handshake_timeout=REQUEST_S)
            loop.create_server = create_server  # type: ignore[method-assign]
        try:
            await super().startup(sockets)
        finally:
            vars(loop).pop("create_server", None)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the controller."""
        yield


class LimitedListener(socket.socket):
    """Listening socket that accepts at most `most` connections, and at most `each_of` from one address.

    A controller runs out of file descriptors first. uvicorn and asyncio use the listener like any socket. It closes
    excess connections right after `accept()`: they cost no memory, no TLS handshake and no line in the log.
    """

    most = 0
    """Limit of all connections; 0 means no limit."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._open: Counter[str] = Counter()
        """Number of open connections by address."""
        self._logged_at = float("-inf")

    @property
    def open_connections(self) -> int:
        """Number of open connections, including those that have sent nothing yet."""
        return self._open.total()

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection within the limits; close those beyond.

        Raises the same exception as `socket.accept` when no connection waits.
        """
        for _ in range(MOST_AT_ONCE):
            descriptor, address = self._accept()  # type: ignore[attr-defined]
            connection = CountedSocket(self.family, self.type, self.proto, fileno=descriptor)
            host = address[0] if isinstance(address, tuple) else ""
            if not self.most or (self.open_connections < self.most and self._open[host] < each_of(host, self.most)):
                self._open[host] += 1
                connection.on_close = weakref.finalize(connection, self._forget, self._open, host)
                connection.on_close.atexit = False
                return connection, address
            connection.close()
            self._log_refusal(host)
        raise BlockingIOError  # lets other tasks run; the rest is accepted afterwards

    @staticmethod
    def _forget(connections: Counter[str], host: str) -> None:
        connections[host] -= 1
        if connections[host] <= 0:
            del connections[host]

    def _log_refusal(self, host: str) -> None:
        """Log a refusal, at most once per `LOG_EVERY_S`: one line per connection would fill the log."""
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            _log.warning(
                "refused connections from %s: it has %d open, all clients have %d",
                host,
                self._open[host],
                self.open_connections,
            )


class CountedSocket(socket.socket):
    """Connection that tells its listener when it is closed."""

    on_close: weakref.finalize[..., CountedSocket] | None = None

    def close(self) -> None:
        """See `socket.socket`."""
        super().close()
        if self.on_close is not None:
            self.on_close()


def each_of(address: str, most: int) -> int:
    """Return how many connections one address may have.

    A loopback address may have half of all, because all users and virtual nodes of this machine share it. Any other
    address may have a quarter: one agent has one connection, but many nodes may share one gateway.
    """
    try:
        here = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        here = True
    return min(most, max(LEAST_EACH, most // 2 if here else most // 4))


def most_connections() -> int:
    """Return how many connections may be open. Raises the soft limit of file descriptors first, if it can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _wanted(soft, hard):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            continue
        soft = wanted
        break
    return max(soft - SPARE_FILES, 64) if soft != resource.RLIM_INFINITY else MOST_FILES


def _wanted(soft: int, hard: int) -> Iterator[int]:
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        yield most
