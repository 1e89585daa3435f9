"""Routes of agents and of lenders: websockets that carry messages between them and the controller."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial

from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from bftrainer.cluster.http.auth import Api
from bftrainer.cluster.http.limits import bearer
from bftrainer.cluster.http.state import ApiState
from bftrainer.cluster.pools.slurm.submit.lenders import LenderRefusedError, Lenders
from bftrainer.cluster.wire import messages
from bftrainer.cluster.wire.lender_messages import (
    LENDER_PATH,
    MOST_LENDER_FRAME_BYTES,
    NO_TOKEN,
    REFUSED_CODE,
    OfferRefused,
    close_reason,
    encode_lending,
)
from bftrainer.errors import BFTrainerError
from bftrainer.util.text import one_line

router = APIRouter()

_NO_LENDERS = (
    "this controller takes no lenders: it does only with users.mode = own, the pool slurm and pool.submit = lend"
)


_log = logging.getLogger(__name__)


@router.websocket(messages.PATH)
async def agents(socket: WebSocket, api: Api) -> None:
    """Serve an agent until it disconnects."""
    token = bearer(socket.headers.get("authorization"))
    invitations, right = api.controller.agents.invitations, None
    if invitations is not None:
        right = invitations.right(token, time.time()) if token else None
        accepted = right is not None
    else:
        accepted = bool(token) and hmac.compare_digest(token.encode(), api.agent_secret.encode())
    if not accepted:
        await socket.close(1008)  # closed before it is accepted: the agent receives 403
        return
    await socket.accept()
    try:
        await api.controller.agents.serve(_frames(socket), socket.send_text, right)
    except BFTrainerError as problem:  # the agent tries again
        _log.error("an agent cannot be served: %s", problem)
        await socket.close(1011)


async def _frames(socket: WebSocket) -> AsyncIterator[str]:
    try:
        while True:
            yield await socket.receive_text()
    except (WebSocketDisconnect, KeyError, RuntimeError):
        return


@router.websocket(LENDER_PATH)
async def lenders(socket: WebSocket, api: Api) -> None:
    """Serve a lender until it disconnects."""
    token = bearer(socket.headers.get("authorization"))
    row = api.store.tokens.check(token, time.time()) if token else None
    if row is None or row.role == "monitor":
        await socket.close(1008)  # closed before it is accepted: the lender receives 403
        return
    await socket.accept()
    taking = getattr(api.controller.pool, "lenders", None)
    try:
        if not isinstance(taking, Lenders):
            raise LenderRefusedError(_NO_LENDERS)
        valid = partial(_is_valid, api, token)
        await taking.serve(row.owner, _lender_frames(socket, valid), socket.send_text)
    except LenderRefusedError as refusal:
        _log.warning("the lender of %s is refused: %s", row.owner, refusal)
        with suppress(WebSocketDisconnect, RuntimeError):  # the lender has gone
            await socket.send_text(encode_lending(OfferRefused(one_line(refusal))))
            await socket.close(REFUSED_CODE, close_reason(one_line(refusal)))
    except BFTrainerError as problem:  # the lender tries again
        _log.error("the lender of %s cannot be served: %s", row.owner, problem)
        await socket.close(1011)


def _is_valid(api: ApiState, token: str) -> bool:
    return api.store.tokens.check(token) is not None


async def _lender_frames(socket: WebSocket, valid: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield what a lender sends, as long as its token is valid."""
    try:
        while True:
            frame = await socket.receive_text()
            if len(frame) > MOST_LENDER_FRAME_BYTES:
                return
            if not valid():
                raise LenderRefusedError(NO_TOKEN)
            yield frame
    except (WebSocketDisconnect, KeyError, RuntimeError):
        return
