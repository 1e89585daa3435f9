"""The link of a lender: it connects to the controller, and again whenever the connection is lost.

The lender connects out, so that no port is open on the login node. The first message is its offer. A token that the
controller refuses for good ends the lender, unless it was accepted before: a controller that is being restored may not
know it for a while. After a refusal the token is read again, because the user may have saved another one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import ssl
from collections.abc import Callable
from contextlib import suppress

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI, WebSocketException

from bftrainer.cluster.lend.lender import Lender
from bftrainer.cluster.lend.rules import RefusedByRules
from bftrainer.cluster.wire import tls
from bftrainer.cluster.wire.lender_messages import (
    LENDER_BEAT_S,
    LENDER_PATH,
    MOST_LENDER_FRAME_BYTES,
    NO_TOKEN,
    REFUSED_CODE,
    CancelLent,
    LenderBeat,
    LenderHeard,
    LendPilot,
    OfferRefused,
    OfferTaken,
    Withdrawn,
    decode_lending,
    encode_lending,
)
from bftrainer.elastic.protocol import ProtocolError
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.util.backoff import Backoff
from bftrainer.util.text import one_line

OPEN_S = 10.0
SILENCE_S = 3 * LENDER_BEAT_S
"""A controller that answers no heartbeat for this long is lost."""
BACKOFF = Backoff(0.5, 30.0)

_log = logging.getLogger(__name__)


class _NotTaken(BFTrainerError):  # noqa: N818 - it names what happened
    """The controller does not take the offer."""


class _Unwanted(BFTrainerError):  # noqa: N818 - it names what happened
    """The lender does not take the controller."""


class LenderLink:
    """One lender's connection to the current controller."""

    def __init__(
        self,
        lender: Lender,
        url: str,
        token: str,
        authority: str = "",
        changed: Callable[[str], None] = lambda state: None,
        read_token: Callable[[], str] = str,
    ) -> None:
        """`changed` is called with a sentence when the connection is made or lost.

        `read_token` returns the token that the user has now; empty: none is known, so the former one stays.
        """
        self._lender = lender
        self._url = websocket_url(url)
        self._token = token
        self._tls = tls.client_context(authority, tls.CA) if self._url.startswith("wss:") else None
        self._changed = changed
        self._read_token = read_token
        self._connection: ClientConnection | None = None
        self._ever_taken = False
        self._taken = False

    async def keep(self) -> None:
        """Stay connected. Ends only by an error."""
        failures, said = 0, ""
        while True:
            self._taken = False
            try:
                problem = await self._connect()
            except InvalidStatus as refusal:
                problem = _why_refused(refusal, known_before=self._ever_taken)
                self._token = self._read_token() or self._token
                if refusal.response.status_code in (400, 401, 403, 404) and not self._ever_taken:
                    raise InputError(f"the controller at {self._url} does not take this lender: {problem}") from None
            except InvalidURI as wrong:
                raise InputError(f"the controller's URL cannot be used: {wrong}") from None
            except ssl.SSLCertVerificationError as wrong:
                problem = f"its certificate is not to be trusted: {tls.reason(wrong)}"
                if not self._ever_taken:
                    raise InputError(f"{self._url}: {problem}; set {tls.CA} to the file of its authority") from None
            except (OSError, TimeoutError, EOFError, InvalidHandshake, WebSocketException) as trouble:
                problem = one_line(str(trouble) or type(trouble).__name__)
            except _NotTaken as refusal:
                problem = str(refusal)
                self._token = self._read_token() or self._token
                if not self._ever_taken:
                    raise InputError(f"the controller at {self._url} does not take this lender: {problem}") from None
            if self._taken:
                failures, said = 0, ""
            failures += 1
            if problem != said:
                _log.warning("no controller at %s: %s", self._url, problem)
                self._changed(f"not connected: {problem}")
                said = problem
            await asyncio.sleep(BACKOFF.wait_s(failures) * random.uniform(0.5, 1.0))  # noqa: S311 - no secret

    async def say_goodbye(self, reason: str) -> None:
        """Tell the controller that the lender ends."""
        if self._connection is not None:
            with suppress(ConnectionClosed, OSError):
                await self._connection.send(encode_lending(Withdrawn(reason)))
                await self._connection.close()

    async def _connect(self) -> str:
        """Serve one connection from its start to its end. Returns why it ended."""
        async with connect(
            self._url,
            ssl=self._tls,
            additional_headers={"Authorization": f"Bearer {self._token}"},
            open_timeout=OPEN_S,
            close_timeout=0.5,
            ping_interval=None,  # heartbeats replace pings
            max_size=MOST_LENDER_FRAME_BYTES,
            compression=None,
            proxy=None,
        ) as connection:
            self._connection = connection
            beating = asyncio.create_task(_keep_beating(connection))
            try:
                await connection.send(encode_lending(self._lender.offer()))
                while True:
                    async with asyncio.timeout(SILENCE_S):
                        frame = await connection.recv()
                    await self._receive(connection, frame)
            except _Unwanted as refusal:
                return f"this lender does not take it: {refusal}"
            except TimeoutError:
                return f"it has not answered for {SILENCE_S:g} s"
            except ConnectionClosed as closed:
                reason = one_line(closed.rcvd.reason) if closed.rcvd is not None else ""
                if closed.rcvd is not None and closed.rcvd.code == REFUSED_CODE:
                    raise _NotTaken(reason) from None
                return reason or "the connection was closed"
            finally:
                self._connection = None
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)

    async def _receive(self, connection: ClientConnection, frame: str | bytes) -> None:
        """Carry out what a frame asks for. Nonsense is dropped: it must not end what others asked for.

        A controller that the lender does not take is left: `_Unwanted`.
        """
        message = None
        try:
            message = decode_lending(frame)
            if isinstance(message, OfferRefused):
                raise _NotTaken(one_line(message.reason))
            if not isinstance(message, OfferTaken | LenderHeard | LendPilot | CancelLent):
                return
            answer = await self._lender.answer(message)
        except (ProtocolError, RefusedByRules) as problem:
            if isinstance(message, OfferTaken):
                raise _Unwanted(str(problem)) from None
            _log.warning("not understood: %s", problem)
            return
        except _NotTaken:
            raise
        except BFTrainerError as problem:
            _log.error("a request failed: %s", problem)
            return
        if isinstance(message, OfferTaken):
            self._taken = self._ever_taken = True
            self._changed("connected")
        if answer is not None:
            await connection.send(encode_lending(answer))


def websocket_url(url: str) -> str:
    """Return the URL of the route of lenders, from the URL of a controller."""
    return "ws" + url.removeprefix("http").rstrip("/") + LENDER_PATH


async def _keep_beating(connection: ClientConnection) -> None:
    with suppress(ConnectionClosed):
        while True:
            await asyncio.sleep(LENDER_BEAT_S)
            await connection.send(encode_lending(LenderBeat()))


def _why_refused(refusal: InvalidStatus, *, known_before: bool) -> str:
    """Return the controller's reason, from its answer. `known_before`: it has taken the token before."""
    body = refusal.response.body or b""
    with suppress(ValueError, AttributeError):
        if detail := json.loads(body).get("detail"):
            return one_line(str(detail))[:300]
    if refusal.response.status_code in (401, 403):
        return NO_TOKEN if known_before else f"it does not know the token, or {NO_TOKEN}"
    return f"HTTP {refusal.response.status_code}"
