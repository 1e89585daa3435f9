"""Route of lenders: a websocket between a user's lender and the pool, with a token of the user."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from bftrainer.cluster.http.auth import Api
from bftrainer.cluster.http.limits import bearer
from bftrainer.cluster.http.state import ApiState
from bftrainer.cluster.pools.slurm.submit.lenders import LenderRefusedError, Lenders
from bftrainer.cluster.wire.lender_messages import LENDER_PATH, MOST_LENDER_FRAME_BYTES, REFUSED_CODE
from bftrainer.errors import BFTrainerError
from bftrainer.util.text import one_line

router = APIRouter()

_NO_LENDERS = (
    "this controller takes no lenders: it does only with users.mode = own, the pool slurm and pool.submit = lend"
)

_log = logging.getLogger(__name__)


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
        await taking.serve(row.owner, _frames(socket, valid), socket.send_text)
    except LenderRefusedError as refusal:
        _log.warning("the lender of %s is refused: %s", row.owner, refusal)
        await socket.close(REFUSED_CODE, one_line(refusal)[:120])
    except BFTrainerError as problem:  # the lender tries again
        _log.error("the lender of %s cannot be served: %s", row.owner, problem)
        await socket.close(1011)


def _is_valid(api: ApiState, token: str) -> bool:
    return api.store.tokens.check(token) is not None


async def _frames(socket: WebSocket, valid: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield what a lender sends, as long as its token is valid."""
    try:
        while True:
            frame = await socket.receive_text()
            if len(frame) > MOST_LENDER_FRAME_BYTES:
                return
            if not valid():
                raise LenderRefusedError("the token is not valid any more")
            yield frame
    except (WebSocketDisconnect, KeyError, RuntimeError):
        return
