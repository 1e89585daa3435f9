"""Frames on the connection between a donor and a newcomer: a small header, and bytes that go from memory to memory.

Both sides prove that they know the secret that the newcomer gave to its manager. Headers are read as `torch.load` reads
weights, so nothing that the other side sent can run code.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bftrainer.errors import BFTrainerError

_LENGTHS = struct.Struct("!IQ")
_MOST_HEADER = 64 << 20
_CHUNK = 4 << 20
_NONCE = 32
_PROOF = 32
_GREETING_S = 5.0
"""Seconds that either side of a new connection has for its proof."""


class FlowError(BFTrainerError):
    """The state cannot flow to a newcomer, which then takes it when it joins."""


class FlowLostError(FlowError):
    """A connection is lost or the donors were not at the same step: following can begin again."""


class FlowSlowError(FlowError):
    """The newcomer cannot keep up with the training."""


class FlowLateError(FlowLostError):
    """A donor had made the step at which the state was to be copied when it heard of it: choose a later one."""


class Frames:
    """One connection between a donor and a newcomer."""

    def __init__(self, connection: socket.socket, bytes_per_s: float | None = None) -> None:
        self._connection = connection
        self._rate = bytes_per_s
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def to_newcomer(cls, address: str, secret: str, bytes_per_s: float | None = None) -> Frames:
        """Connect to a newcomer. Raises an OSError, or a `FlowError` if it does not know the secret."""
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=_GREETING_S)
        try:
            theirs, mine = _read(connection, _NONCE), secrets.token_bytes(_NONCE)
            connection.sendall(mine + _proof(secret, b"donor", theirs, mine))
            _check(_read(connection, _PROOF), _proof(secret, b"newcomer", mine, theirs))
        except BaseException:
            connection.close()
            raise
        return cls(connection, bytes_per_s)

    @classmethod
    def from_donor(cls, connection: socket.socket, secret: str) -> Frames:
        """Accept a donor's connection. Raises an OSError, or a `FlowError` if it does not know the secret."""
        connection.settimeout(_GREETING_S)
        mine = secrets.token_bytes(_NONCE)
        connection.sendall(mine)
        theirs = _read(connection, _NONCE)
        _check(_read(connection, _PROOF), _proof(secret, b"donor", mine, theirs))
        connection.sendall(_proof(secret, b"newcomer", theirs, mine))
        return cls(connection)

    def set_timeout(self, seconds: float | None) -> None:
        """Set how long one read or write may stand still."""
        self._connection.settimeout(seconds)

    def send(self, header: Mapping[str, Any], payload: Tensor | None = None) -> None:
        """Send a header, and the bytes of a tensor in CPU memory."""
        file = io.BytesIO()
        torch.save(dict(header), file)
        packed = file.getvalue()
        length = payload.numel() if payload is not None else 0
        self._connection.sendall(_LENGTHS.pack(len(packed), length) + packed)
        if payload is None:
            return
        view, began = _view(payload), time.monotonic()
        for begin in range(0, length, _CHUNK):
            self._connection.sendall(view[begin : begin + _CHUNK])
            if self._rate is not None:
                time.sleep(max(0.0, began + (begin + _CHUNK) / self._rate - time.monotonic()))

    def receive(self) -> tuple[dict[str, Any], int]:
        """Return the next header, and the number of bytes that follow it: give room for them to `receive_into`."""
        packed, length = _LENGTHS.unpack(_read(self._connection, _LENGTHS.size))
        if packed > _MOST_HEADER:
            raise FlowError(f"a header of {packed} bytes was announced, at most {_MOST_HEADER} are read")
        try:
            header = torch.load(io.BytesIO(_read(self._connection, packed)), weights_only=True)
        except (RuntimeError, ValueError, EOFError, KeyError) as problem:
            raise FlowError(f"a header cannot be read: {problem}") from problem
        if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
            raise FlowError("a header has no kind")
        return header, length

    def receive_into(self, room: Tensor) -> None:
        """Read the bytes that follow a header into a tensor of bytes in CPU memory."""
        _fill(self._connection, _view(room))

    def close(self) -> None:
        """Close the connection. A thread that reads from it or writes to it gets an error."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _view(room: Tensor) -> memoryview:
    values: Any = room.numpy()
    return memoryview(values)


def _read(connection: socket.socket, length: int) -> bytes:
    room = bytearray(length)
    _fill(connection, memoryview(room))
    return bytes(room)


def _fill(connection: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = connection.recv_into(view[done : done + _CHUNK])
        if not count:
            raise ConnectionError("the other side has closed the connection")
        done += count


def _proof(secret: str, role: bytes, first: bytes, second: bytes) -> bytes:
    key = hashlib.sha256(f"follow\0{secret}".encode()).digest()
    return hmac.new(key, role + first + second, hashlib.sha256).digest()


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise FlowError("the other side of a connection does not know the secret")
