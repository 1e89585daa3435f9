"""The listening socket of the controller: it counts who is in, and shows out whoever is too many.

Descriptors are what a controller runs out of first, and whoever can reach it can open connections without a token.
uvicorn and asyncio use a `Door` as any socket. What it shows out costs nothing further: no memory, no handshake of TLS,
no line in the log.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
import weakref
from collections import Counter
from typing import Any

LEAST_EACH = 128
"""Connections that one address may have, however few there may be in all."""
COMPLAIN_S = 60.0
MOST_AT_ONCE = 100

_log = logging.getLogger(__name__)


class Door(socket.socket):
    """Lets `most` connections in, and of one address `each` of its kind at most: see `each_of`."""

    most = 0
    """0: any number."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._inside: Counter[str] = Counter()
        self._complained_at = float("-inf")

    @property
    def inside(self) -> int:
        """How many are in, those included that have said nothing yet."""
        return self._inside.total()

    def accept(self) -> tuple[socket.socket, Any]:
        """The next one who may come in. Raises what `socket.accept` does when nobody waits."""
        for _ in range(MOST_AT_ONCE):
            descriptor, address = self._accept()  # type: ignore[attr-defined]
            guest = _Guest(self.family, self.type, self.proto, fileno=descriptor)
            who = address[0] if isinstance(address, tuple) else ""
            if not self.most or (self.inside < self.most and self._inside[who] < each_of(who, self.most)):
                self._inside[who] += 1
                guest.leaves = weakref.finalize(guest, self._left, self._inside, who)
                guest.leaves.atexit = False
                return guest, address
            guest.close()
            self._complain(who)
        raise BlockingIOError  # others have their turn, and then the rest of those who wait

    @staticmethod
    def _left(inside: Counter[str], who: str) -> None:
        inside[who] -= 1
        if inside[who] <= 0:
            del inside[who]

    def _complain(self, who: str) -> None:
        """Once in a while: a line for each would be another way to fill something."""
        now = time.monotonic()
        if now - self._complained_at >= COMPLAIN_S:
            self._complained_at = now
            _log.warning(
                "connections of %s are refused: there are %d of it, %d in all", who, self._inside[who], self.inside
            )


class _Guest(socket.socket):
    """A connection that says when it is closed."""

    leaves: weakref.finalize[..., _Guest] | None = None

    def close(self) -> None:
        """See `socket.socket`."""
        super().close()
        if self.leaves is not None:
            self.leaves()


def each_of(address: str, most: int) -> int:
    """How many connections one address may have: on this machine, where all users and virtual nodes share one, half of
    all; elsewhere a quarter, as an agent has one and nodes behind one gateway have many.
    """
    try:
        here = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        here = True
    return min(most, max(LEAST_EACH, most // 2 if here else most // 4))
