"""Socket helpers: list this process's sockets, and end waits on them inside other libraries.

Those libraries offer no way to cancel a wait. `Group` finds the sockets of a process group by comparing the open
sockets before and after it was formed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

_KNOCK_S = 1.0


def open_sockets() -> dict[str, int]:
    """Return the open sockets of this process: descriptor by inode."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only, and quickly
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
            if target.startswith("socket:"):
                found[target] = int(name)
    return found


def shut(fd: int, *, listening: bool = False) -> None:
    """Shut down a connected TCP socket; a listening one only if `listening` is set.

    Gloo ends the process when its own listening socket fails.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as handle:
        if _is_internet(handle) and (listening or not _is_listening(handle)):
            handle.shutdown(socket.SHUT_RDWR)


def knock(fd: int, peers: int) -> None:
    """Connect to gloo's listening socket in place of peers that will never come: send a rank number and hang up.

    Gloo takes each connection for a peer, finds it gone and gives up. A gloo version that expects another greeting
    drops the connections and waits until its timeout.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as handle:
        if not _is_internet(handle) or not _is_listening(handle):
            return
        address = handle.getsockname()[:2]
        for number in range(peers):
            with socket.create_connection(address, timeout=_KNOCK_S) as call:
                call.sendall(number.to_bytes(8, sys.byteorder))


def _is_internet(handle: socket.socket) -> bool:
    return handle.family in (socket.AF_INET, socket.AF_INET6)


def _is_listening(handle: socket.socket) -> bool:
    return bool(handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
