"""The listener limits the connections of the controller's socket, in total and per address.

A controller runs out of file descriptors first, and any client that can reach it can open connections without a token.
uvicorn and asyncio use a `LimitedListener` like any socket. It closes excess connections right after `accept()`. They
cost no memory, no TLS handshake and no line in the log.
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
"""Connections that one address may always have, even if the total limit is low."""
COMPLAIN_S = 60.0
MOST_AT_ONCE = 100

_log = logging.getLogger(__name__)


class LimitedListener(socket.socket):
    """Listening socket that accepts at most `most` connections, and at most `each_of` from one address."""

    most = 0
    """Limit of all connections; 0 means no limit."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._inside: Counter[str] = Counter()
        self._complained_at = float("-inf")

    @property
    def inside(self) -> int:
        """Number of open connections, including those that have sent nothing yet."""
        return self._inside.total()

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection within the limits; close those beyond.

        Raises the same exception as `socket.accept` when no connection waits.
        """
        for _ in range(MOST_AT_ONCE):
            descriptor, address = self._accept()  # type: ignore[attr-defined]
            guest = CountedSocket(self.family, self.type, self.proto, fileno=descriptor)
            who = address[0] if isinstance(address, tuple) else ""
            if not self.most or (self.inside < self.most and self._inside[who] < each_of(who, self.most)):
                self._inside[who] += 1
                guest.leaves = weakref.finalize(guest, self._left, self._inside, who)
                guest.leaves.atexit = False
                return guest, address
            guest.close()
            self._complain(who)
        raise BlockingIOError  # lets other tasks run; the rest is accepted afterwards

    @staticmethod
    def _left(inside: Counter[str], who: str) -> None:
        inside[who] -= 1
        if inside[who] <= 0:
            del inside[who]

    def _complain(self, who: str) -> None:
        """Log a refusal, at most once per `COMPLAIN_S`: one line per connection would fill the log."""
        now = time.monotonic()
        if now - self._complained_at >= COMPLAIN_S:
            self._complained_at = now
            _log.warning(
                "connections of %s are refused: there are %d of it, %d in all", who, self._inside[who], self.inside
            )


class CountedSocket(socket.socket):
    """Connection that tells its listener when it is closed."""

    leaves: weakref.finalize[..., CountedSocket] | None = None

    def close(self) -> None:
        """See `socket.socket`."""
        super().close()
        if self.leaves is not None:
            self.leaves()


def each_of(address: str, most: int) -> int:
    """Return how many connections one address may have.

    A loopback address may have half of all, because all users and virtual nodes of this machine share it. Any other
    address may have a quarter: one agent has one connection, but many nodes may share one gateway.
    """
    try:
        here = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        here = True
    return min(most, max(LEAST_EACH, most // 2 if here else most // 4))
