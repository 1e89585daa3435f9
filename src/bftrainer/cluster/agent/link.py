"""The controller link keeps an agent connected to the controller.

`keep` connects, sends a `Join` first, passes the controller's messages on, and connects again when the connection is
lost. It gives up after `give_up_s` seconds without a controller. Messages sent while there is no connection are
dropped: the next `Join` contains everything.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI, WebSocketException

from bftrainer.cluster.agent.call_back import TRY_S, CallBack, why_unreached
from bftrainer.cluster.wire import codec, tls
from bftrainer.cluster.wire.messages import GIVE_UP_S, FromAgent, FromController, Join, Welcome
from bftrainer.elastic.protocol import ProtocolError
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.util.backoff import Backoff

OPEN_S = 10.0
FIRST_OPEN_S = 7.0
"""The same for an agent that tells why it cannot reach its controller."""
WELCOME_S = 30.0
"""How long a controller that has accepted the connection may take to send its welcome."""
MOST_FRAME_BYTES = 16 << 20
MOST_WAITING = 10_000
"""With more messages waiting, the controller is not reading. The agent reconnects and starts with the current state."""
UNHEARD_MS = 10_000
"""Data that the other machine does not acknowledge for this long is lost, and the connection with it."""
BACKOFF = Backoff(0.1, 5.0)

_log = logging.getLogger(__name__)


class Refused(InputError):  # noqa: N818 - it names what happened
    """The controller does not accept the agent's secret."""


class Lost(BFTrainerError):  # noqa: N818
    """No controller was found for too long."""


class ControllerLink:
    """One agent's connection to the current controller.

    `joining` makes the first message of each connection. `obey` gets every message of the controller. `authority` is a
    file of certificates to verify the controller with; empty: the system's. With a `call_back`, the agent tries for a
    shorter time to reach the controller for the first time, and tells why it does not.
    """

    def __init__(
        self,
        url: str,
        secret: str,
        joining: Callable[[], Join],
        obey: Callable[[FromController], None],
        authority: str = "",
        call_back: CallBack | None = None,
    ) -> None:
        self.give_up_s = GIVE_UP_S if call_back is None else TRY_S
        self._call_back = call_back
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
        """Whether the controller has answered the current connection with a `Welcome`."""
        return self._welcome

    @property
    def crowded(self) -> bool:
        """Whether so many messages wait to be sent that less urgent ones should wait."""
        return self._outbox is not None and self._outbox.qsize() > MOST_WAITING // 100

    def send(self, message: FromAgent) -> None:
        """Queue a message to be sent. Without a connection it is dropped."""
        if self._outbox is None:
            return
        self._outbox.put_nowait(message)
        if self._outbox.qsize() > MOST_WAITING and self._connection is not None:
            _log.warning("the controller does not read the messages of this agent")
            self._connection.transport.abort()

    async def flush(self, timeout_s: float) -> None:
        """Wait until all messages are sent, for at most `timeout_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if self._outbox is not None:
                    await self._outbox.join()

    async def keep(self) -> None:
        """Stay connected. Ends only by an error, such as `Refused` by the first controller, or `Lost`."""
        alone_since = time.monotonic()
        failures = 0
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
                        self._unreached(refusal, for_good=True)
                        raise Refused(f"{problem}: compare it with the controller's `agent-secret`") from None
            except InvalidURI as wrong:
                raise InputError(f"`--url` cannot be used: {wrong}") from None
            except ssl.SSLCertVerificationError as wrong:
                problem = f"its certificate is not to be trusted: {tls.reason(wrong)}"
                if not self._ever_welcome:
                    self._unreached(wrong, for_good=True)
                    hint = f"set {tls.CA} to the file of its authority"
                    raise InputError(f"the controller at {self._url}: {problem}; {hint}") from None
            except (OSError, TimeoutError, EOFError, InvalidHandshake, WebSocketException) as trouble:
                problem = str(trouble) or type(trouble).__name__
                if not self._ever_welcome:
                    problem = why_unreached(trouble)[1]
                    self._unreached(trouble)
            if self._welcome:
                self._welcome = False
                alone_since = time.monotonic()
                failures = 0
                said = ""
            if problem != said:  # log it once, not at every attempt
                _log.warning("no controller at %s: %s", self._url, problem)
                said = problem
            left = alone_since + self.give_up_s - time.monotonic()
            if left <= 0:
                raise Lost(f"no controller at {self._url} for {self.give_up_s:g} s: {problem}")
            failures += 1
            await asyncio.sleep(min(_pause_s(failures), left))

    def _unreached(self, problem: BaseException, *, for_good: bool = False) -> None:
        """Tell the pool why the controller was never reached."""
        if self._call_back is not None:
            kind, reason = why_unreached(problem)
            self._call_back.failed(kind, reason, for_good=for_good)

    async def _connect(self, most_s: float) -> None:
        """Serve one connection from its start to its end."""
        async with connect(
            self._url,
            ssl=self._tls,
            additional_headers={"Authorization": f"Bearer {self._secret}"},
            open_timeout=max(0.1, min(OPEN_S if self._call_back is None else FIRST_OPEN_S, most_s)),
            close_timeout=0.2,
            ping_interval=None,  # heartbeats replace pings
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
        """Pass the message of a frame on to `obey`. Returns whether it was a `Welcome`."""
        try:
            message = codec.decode(frame)
            if isinstance(message, Welcome):
                self._welcome = self._ever_welcome = True
                if self._call_back is not None:
                    self._call_back.reached()
                    self._call_back = None
                self.give_up_s = float(message.give_up_s)
                self._secret = message.secret or self._secret
            if isinstance(message, FromController):
                self._obey(message)
        except (ProtocolError, TypeError, ValueError, AttributeError, LookupError) as problem:
            # One invalid order must not end the workers of other orders.
            _log.warning("not understood: %s: %s", type(problem).__name__, problem)
            return False
        return isinstance(message, Welcome)


async def _drain(outbox: asyncio.Queue[FromAgent], connection: ClientConnection) -> None:
    while True:
        await connection.send(codec.encode(await outbox.get()))
        outbox.task_done()


def _pause_s(failures: int) -> float:
    """Return the seconds to wait after so many attempts in a row.

    They are random, so that all agents that lost one controller do not return at the same time.
    """
    return BACKOFF.wait_s(failures) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret depends on it


def _notice_a_dead_network(connection: ClientConnection) -> None:
    """Limit the time without acknowledgement. By default, data sent into a dead network is retried for 15 minutes."""
    raw = connection.transport.get_extra_info("socket")
    if raw is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        with suppress(OSError):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)
