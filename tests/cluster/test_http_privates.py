"""The inner parts of uvicorn, asyncio and `socket` that `http/limits.py` relies on are as it expects them.

If one of these fails after an upgrade, compare `limits.py` with the new release before the tests of its behaviour
(`test_security.py`, `test_tls.py`) are trusted.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import socket
import textwrap
from collections.abc import Callable
from typing import Any

import h11
import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def calls(function: Callable[..., Any]) -> set[str]:
    """The calls in a function's source, such as `loop.create_server`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("connection_made", ["self", "transport"]),
        ("data_received", ["self", "data"]),
        ("connection_lost", ["self", "exc"]),
        ("pause_writing", ["self"]),
        ("resume_writing", ["self"]),
        ("handle_websocket_upgrade", ["self", "event"]),
    ],
)
def test_uvicorns_protocol_has_the_methods_that_are_extended(method: str, expected: list[str]) -> None:
    assert parameters(getattr(H11Protocol, method)) == expected


def test_uvicorns_protocol_calls_the_method_that_hands_websockets_over() -> None:
    assert "self.handle_websocket_upgrade" in calls(H11Protocol.handle_events)


def test_uvicorns_protocol_has_none_of_the_names_that_are_added() -> None:
    added = {"_waiting", "_unread", "_watch", "_busy", "_too_late", "_stop_waiting", "_go_on_reading"}
    protocol = _protocol()
    assert not {name for name in added if hasattr(protocol, name)}


def test_uvicorns_protocol_keeps_its_connection_and_its_request_under_these_names() -> None:
    protocol = _protocol()
    assert isinstance(protocol.loop, asyncio.AbstractEventLoop)
    assert isinstance(protocol.conn, h11.Connection)
    assert protocol.conn.their_state is h11.IDLE
    assert protocol.transport is None
    assert protocol.cycle is None
    assert "self.response_complete = False" in inspect.getsource(RequestResponseCycle.__init__)


def _protocol() -> H11Protocol:
    async def make() -> H11Protocol:
        config = uvicorn.Config(_app, log_config=None, lifespan="off")
        return H11Protocol(config=config, server_state=ServerState(), app_state={})

    return asyncio.run(make())


async def _app(scope: Any, receive: Any, send: Any) -> None: ...


def test_uvicorns_server_starts_listening_through_the_running_loop() -> None:
    assert parameters(uvicorn.Server.startup) == ["self", "sockets"]
    assert "loop.create_server" in calls(uvicorn.Server.startup)
    assert "ssl_handshake_timeout" in parameters(asyncio.BaseEventLoop.create_server)
    assert isinstance(uvicorn.Config(_app).is_ssl, bool)


def test_uvicorns_server_takes_signals_only_in_the_method_that_is_replaced() -> None:
    assert "self.capture_signals" in calls(uvicorn.Server.serve)
    assert parameters(uvicorn.Server.capture_signals) == ["self"]


def test_a_listening_socket_accepts_through_these_parts() -> None:
    assert "self._accept" in calls(socket.socket.accept)
    assert parameters(socket.socket.__init__) == ["self", "family", "type", "proto", "fileno"]
    assert "sock.accept" in calls(asyncio.selector_events.BaseSelectorEventLoop._accept_connection)


def test_sockets_have_none_of_the_names_that_are_added() -> None:
    added = {"most", "_open", "_logged_at", "open_connections", "_forget", "_log_refusal", "on_close"}
    assert not added & set(dir(socket.socket))
