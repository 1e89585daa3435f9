"""Route of agents: a websocket that carries messages between an agent and the controller."""

from __future__ import annotations

import hmac
import logging
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
    if not token or not hmac.compare_digest(token.encode(), api.agent_secret.encode()):
        await socket.close(1008)  # closed before it is accepted: the agent receives 403
        return
    await socket.accept()
    try:
        await api.controller.agents.serve(_frames(socket), socket.send_text)
    except BFTrainerError as problem:  # the agent tries again
        _log.error("an agent cannot be served: %s", problem)
        await socket.close(1011)


async def _frames(socket: WebSocket) -> AsyncIterator[str]:
    try:
        while True:
            yield await socket.receive_text()
    except (WebSocketDisconnect, KeyError, RuntimeError):
        return
