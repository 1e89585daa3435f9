"""Route of agents: a websocket that carries messages between an agent and the controller."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import AsyncIterator

from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from bftrainer.cluster.http.auth import Api
from bftrainer.cluster.http.limits import bearer
from bftrainer.cluster.wire import messages
from bftrainer.errors import BFTrainerError

router = APIRouter()

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
