"""The process group of one generation: formed, cut loose from a dead peer, and left, many times in a process's life.

The store through which the members find each other lives in rank 0 and only as long as its generation: losing it costs
what losing any member costs, a new generation.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from bftrainer.elastic.membership import Place

_LONG = timedelta(days=7)
"""A peer may take its time: an evaluation, a slow disk. A dead or silent one is cut off, not waited for."""
_FORMING = timedelta(seconds=30)
_LOOK_S = 0.01
_GLOO = "bftrainer"
"""What torch.distributed calls our gloo groups."""


class GroupBroken(Exception):  # noqa: N818 - a state of the world that training recovers from
    """The group cannot communicate any more; nothing it was doing has been applied."""


class Group:
    """At most one process group at a time, the default one of torch.distributed."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.rank = 0
        self.world = 1
        self._store: TCPStore | None = None
        self._mine: set[str] = set()  # the group's sockets, by inode
        self._cutting = threading.Lock()

    def open_store(self, host: str) -> str:
        """Host the next generation's rendezvous and say where."""
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_FORMING)
        return f"{host}:{self._store.port}"

    def form(self, place: Place, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Join the group of a generation. Raises `GroupBroken` when that does not come about or is `cancelled`."""
        before = set(_sockets())
        store, gloo = _connected(place, self._store if place.rank == 0 else None, self.backend, cancelled)
        with self._cutting:
            self._mine = set(_sockets()) - before
        with breaking():
            _make_default(store, gloo, place)
        self.rank, self.world = place.rank, place.world
        if cancelled():  # only from here on would `cut` have found its sockets
            self.cut()
            raise GroupBroken(f"generation {place.generation} has lost a member")

    def cut(self) -> None:
        """Wake whoever waits in the group, from any thread: every operation of it fails from now on."""
        if self.backend == "nccl" and dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.distributed_c10d._abort_process_group()
        with self._cutting:
            if self._mine:
                for inode, fd in _sockets().items():
                    if inode in self._mine:
                        _shut(fd)

    def leave(self) -> None:
        """Take the group apart, whether it works or not."""
        self.cut()
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        self._store = None
        self._mine = set()


@contextlib.contextmanager
def breaking() -> Iterator[None]:
    """Failed communication in this block raises `GroupBroken`."""
    try:
        yield
    except RuntimeError as problem:  # torch's distributed errors are of this kind
        raise GroupBroken(str(problem)) from problem


def _connected(
    place: Place, store: TCPStore | None, backend: str, cancelled: Callable[[], bool]
) -> tuple[Any, ProcessGroupGloo | None]:
    """The store of a generation and its connected gloo group; NCCL connects later.

    Gloo waits for a peer that has died on nothing that could be cut, so a thread of its own waits for it. Abandoned, it
    ends when gloo loses patience.
    """
    results: queue.Queue[tuple[Any, ProcessGroupGloo | None] | Exception] = queue.Queue()

    def connect() -> None:
        try:
            rendezvous = store
            if rendezvous is None:
                host, _, port = place.addresses[0].rpartition(":")
                rendezvous = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_FORMING)
            prefix = PrefixStore(f"generation-{place.generation}", rendezvous)
            if backend == "nccl":
                results.put((prefix, None))
                return
            gloo: Any = ProcessGroupGloo(prefix, place.rank, place.world, _FORMING)
            gloo._set_default_timeout(_LONG)  # forming has a time limit, training has none
            results.put((prefix, gloo))
        except Exception as problem:
            results.put(problem)

    threading.Thread(target=connect, name=f"bftrainer-form-{place.generation}", daemon=True).start()
    while True:
        with contextlib.suppress(queue.Empty):
            found = results.get(timeout=_LOOK_S)
            if isinstance(found, Exception):
                raise GroupBroken(f"forming generation {place.generation} failed: {found}") from found
            return found
        if cancelled():
            raise GroupBroken(f"generation {place.generation} has lost a member while it formed")


def _make_default(store: Any, gloo: ProcessGroupGloo | None, place: Place) -> None:
    """Have torch.distributed use a connected group, so that the script's own collectives work too."""
    connected = [gloo]

    def group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        # The first one asked for is the default group; later ones are the script's own (`new_group`).
        return connected.pop() if connected else ProcessGroupGloo(store, rank, size, timeout)

    hook = sys.excepthook  # each new group would wrap it once more
    try:
        if gloo is not None:
            dist.Backend.register_backend(_GLOO, group, devices=["cpu", "cuda"])
        backend = "nccl" if gloo is None else _GLOO
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=_LONG)
    finally:
        sys.excepthook = hook


def _sockets() -> dict[str, int]:
    """The open sockets of this process: inode and descriptor."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only, and quickly
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
            if target.startswith("socket:"):
                found[target] = int(name)
    return found


def _shut(fd: int) -> None:
    """Shut down a connected TCP socket. Listening ones stay: gloo ends the process when its own fails."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as handle:
        if handle.family in (socket.AF_INET, socket.AF_INET6) and not handle.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            handle.shutdown(socket.SHUT_RDWR)
