"""The agent's connection to the controller: kept up for as long as there is any hope.

`keep` connects, begins with the `Join` that it is given, hands on what the controller says, and connects again when the
connection is lost. What is sent while there is none is dropped: the next `Join` says it all.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI, WebSocketException

from bftrainer.cluster import tls, wire
from bftrainer.cluster.wire import FromAgent, FromController, Join, Welcome
from bftrainer.elastic.protocol import ProtocolError
from bftrainer.errors import BFTrainerError, InputError

OPEN_S = 10.0
WELCOME_S = 30.0
"""How long a controller that has taken the connection may wait with its welcome."""
MOST_FRAME_BYTES = 16 << 20
MOST_WAITING = 10_000
"""More messages than this are not read by anybody: connect again, and begin with what is true now."""
UNHEARD_MS = 10_000
"""What the other machine does not acknowledge for so long is lost, and the connection with it."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0

_log = logging.getLogger(__name__)


class Refused(InputError):  # noqa: N818 - it names what happened
    """The controller does not know the secret."""


class Lost(BFTrainerError):  # noqa: N818
    """No controller was found for too long."""


class Link:
    """One agent's way to whichever controller there is."""

    def __init__(
        self,
        url: str,
        secret: str,
        joining: Callable[[], Join],
        obey: Callable[[FromController], None],
        authority: str = "",
    ) -> None:
        self.give_up_s = 600.0
        self._url = url
        self._secret = secret
        self._tls = tls.client_context(authority, tls.CA) if url.startswith("wss:") else None
        self._joining = joining
        self._obey = obey
        self._outbox: asyncio.Queue[FromAgent] | None = None
        self._connection: ClientConnection | None = None
        self._ever_welcome = False
        self._welcome = False

    @property
    def welcome(self) -> bool:
        """Whether a controller is there and has said so."""
        return self._welcome

    @property
    def crowded(self) -> bool:
        """Whether so much waits to be sent that what is not urgent had better wait."""
        return self._outbox is not None and self._outbox.qsize() > MOST_WAITING // 100

    def send(self, message: FromAgent) -> None:
        """Have a message sent, if there is somebody to send it to."""
        if self._outbox is None:
            return
        self._outbox.put_nowait(message)
        if self._outbox.qsize() > MOST_WAITING and self._connection is not None:
            _log.warning("the controller does not read what it is sent")
            self._connection.transport.abort()

    async def flush(self, timeout_s: float) -> None:
        """Wait until all is sent, but not for long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if self._outbox is not None:
                    await self._outbox.join()

    async def keep(self) -> None:
        """Stay connected. Ends only by an error: `Refused` by the first controller, or `Lost`."""
        alone_since = time.monotonic()
        pauses = _pauses()
        said = ""
        while True:
            try:
                await self._connect(alone_since + self.give_up_s - time.monotonic())
                problem = "the controller has closed the connection"
            except InvalidStatus as refusal:
                status = refusal.response.status_code
                problem = f"HTTP {status}"
                if status in (401, 403):
                    problem = "the controller refuses the secret"
                    if not self._ever_welcome:
                        raise Refused(f"{problem}: compare it with the controller's `agent-secret`") from None
            except InvalidURI as wrong:
                raise InputError(f"`--url` leads nowhere: {wrong}") from None
            except ssl.SSLCertVerificationError as wrong:
                problem = f"its certificate is not to be trusted: {tls.reason(wrong)}"
                if not self._ever_welcome:
                    hint = f"set {tls.CA} to the file of its authority"
                    raise InputError(f"the controller at {self._url}: {problem}; {hint}") from None
            except (OSError, TimeoutError, EOFError, InvalidHandshake, WebSocketException) as trouble:
                problem = str(trouble) or type(trouble).__name__
            if self._welcome:
                self._welcome = False
                alone_since = time.monotonic()
                pauses = _pauses()
                said = ""
            if problem != said:  # once, not at every attempt
                _log.warning("no controller at %s: %s", self._url, problem)
                said = problem
            left = alone_since + self.give_up_s - time.monotonic()
            if left <= 0:
                raise Lost(f"no controller at {self._url} for {self.give_up_s:g} s: {problem}")
            await asyncio.sleep(min(next(pauses), left))

    async def _connect(self, most_s: float) -> None:
        """One connection, from its beginning to its end."""
        async with connect(
            self._url,
            ssl=self._tls,
            additional_headers={"Authorization": f"Bearer {self._secret}"},
            open_timeout=max(0.1, min(OPEN_S, most_s)),
            close_timeout=0.2,
            ping_interval=None,  # there are beats
            max_size=MOST_FRAME_BYTES,
            compression=None,
            proxy=None,
        ) as connection:
            _notice_a_dead_network(connection)
            outbox: asyncio.Queue[FromAgent] = asyncio.Queue()
            outbox.put_nowait(self._joining())
            self._outbox, self._connection = outbox, connection
            sending = asyncio.create_task(_drain(outbox, connection))
            sending.add_done_callback(lambda task: None if task.cancelled() else connection.transport.abort())
            try:
                async with asyncio.timeout(WELCOME_S) as limit:
                    async for frame in connection:
                        if self._receive(frame):
                            limit.reschedule(None)
            finally:
                self._outbox = self._connection = None
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    def _receive(self, frame: str | bytes) -> bool:
        """Hand on what a frame says. Whether it was a welcome."""
        try:
            message = wire.decode(frame)
            if isinstance(message, Welcome):
                self._welcome = self._ever_welcome = True
                self.give_up_s = float(message.give_up_s)
            if isinstance(message, FromController):
                self._obey(message)
        except (ProtocolError, TypeError, ValueError, AttributeError, LookupError) as problem:
            # One senseless order must not end the workers of other orders.
            _log.warning("not understood: %s: %s", type(problem).__name__, problem)
            return False
        return isinstance(message, Welcome)


async def _drain(outbox: asyncio.Queue[FromAgent], connection: ClientConnection) -> None:
    while True:
        await connection.send(wire.encode(await outbox.get()))
        outbox.task_done()


def _pauses() -> Iterator[float]:
    """Between attempts: longer and longer, and never the same for all agents that lost one controller."""
    longest = FIRST_PAUSE_S
    while True:
        yield longest * random.uniform(0.5, 1.0)  # noqa: S311 - no secret depends on it
        longest = min(2 * longest, LONGEST_PAUSE_S)


def _notice_a_dead_network(connection: ClientConnection) -> None:
    """Without this, what is sent into a network that is gone is retried for a quarter of an hour."""
    raw = connection.transport.get_extra_info("socket")
    if raw is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        with suppress(OSError):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)
