"""The sockets of this process, and how to end whoever waits on one of them in a library that offers no way to.

`group` finds the sockets that belong to a process group by comparing what was open before and after.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

_KNOCK_S = 1.0


def open_sockets() -> dict[str, int]:
    """The open sockets of this process: inode and descriptor."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only, and quickly
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
            if target.startswith("socket:"):
                found[target] = int(name)
    return found


def shut(fd: int, *, listening: bool = False) -> None:
    """Shut down a connected TCP socket; a listening one only if asked to: gloo ends the process when its own fails."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as handle:
        if _is_internet(handle) and (listening or not _is_listening(handle)):
            handle.shutdown(socket.SHUT_RDWR)


def knock(fd: int, peers: int) -> None:
    """Answer for peers that will never call on gloo's listening socket: each connects, says its number and hangs up.

    Gloo takes each for the peer it waits for, finds it gone, and gives up. A gloo that expects other words drops the
    calls and waits on until its patience ends.
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
