"""Small applications behind the controller's own HTTP protocol and listener."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

from bftrainer.cluster.http import limits


@contextlib.contextmanager
def served(app: Any, listening: socket.socket | None = None, **settings: Any) -> Iterator[int]:
    """An application behind the controller's protocol, on a port, in a thread."""
    config = uvicorn.Config(app, http=limits.TimedH11Protocol, log_config=None, lifespan="off", **settings)
    server = limits.TimedServer(config)
    listening = listening or socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers when it has the whole body."""
    message: Any = {"more_body": True}
    while message.get("more_body"):
        message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def limited_listener(most: int) -> limits.LimitedListener:
    found = limits.LimitedListener(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.bind(("127.0.0.1", 0))
    found.listen()
    found.most = most
    return found
