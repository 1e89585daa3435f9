"""The process group of one generation: formed, cut loose from a dead peer, and left, many times in a process's life.

The store through which the members find each other lives in rank 0 and only as long as its generation: losing it costs
what losing any member costs, a new generation.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from bftrainer.elastic import protocol
from bftrainer.elastic.membership import Place
from bftrainer.elastic.sockets import knock, open_sockets, shut
from bftrainer.errors import InputError

_LONG = timedelta(days=7)
"""A peer may take its time: an evaluation, a slow disk. A dead or silent one is cut off, not waited for."""
_FORMING = timedelta(seconds=30)
_CONNECTING = timedelta(seconds=10)
"""For the store, which is there before its address is known."""
_LOOK_S = 0.01
_ENDING_S = 2.0
"""How long to see an attempt off that is given up. It takes milliseconds."""
_GLOO = "bftrainer"
"""What torch.distributed calls our gloo groups."""


class GroupBroken(Exception):  # noqa: N818 - a state of the world that training recovers from
    """The group cannot communicate any more; nothing it was doing has been applied."""


def default_backend(device: torch.device) -> str:
    """NCCL between GPUs, gloo otherwise; `BFTRAINER_BACKEND` says so for workers that share a GPU."""
    named = os.environ.get(protocol.BACKEND)
    if named is None:
        return "nccl" if device.type == "cuda" else "gloo"
    if named not in ("gloo", "nccl"):
        raise InputError(f"{protocol.BACKEND} must be gloo or nccl, but got {named!r}")
    return named


class Group:
    """At most one process group at a time, the default one of torch.distributed."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.rank = 0
        self.world = 1
        self._store: TCPStore | None = None
        self._hosting: set[str] = set()  # the sockets of its own store, by inode
        self._mine: set[str] = set()  # the group's sockets, by inode
        self._cutting = threading.Lock()

    def open_store(self, host: str) -> str:
        """Host the next generation's rendezvous and say where."""
        before = set(open_sockets())
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_FORMING)
        self._hosting = set(open_sockets()) - before
        return f"{host}:{self._store.port}"

    def form(self, place: Place, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Join the group of a generation. Raises `GroupBroken` when that does not come about or is `cancelled`."""
        before = set(open_sockets())
        attempt = _Attempt(place, self._store if place.rank == 0 else None, self.backend)
        try:
            store, gloo = attempt.wait(cancelled)
        except GroupBroken:
            attempt.end(before, self._hosting)
            raise
        with self._cutting:
            self._mine = set(open_sockets()) - before
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
                for inode, fd in open_sockets().items():
                    if inode in self._mine:
                        shut(fd)

    def leave(self) -> None:
        """Take the group apart, whether it works or not."""
        self.cut()
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        self._store = None
        self._hosting = set()
        self._mine = set()


@contextlib.contextmanager
def breaking() -> Iterator[None]:
    """Failed communication in this block raises `GroupBroken`."""
    try:
        yield
    except RuntimeError as problem:  # torch's distributed errors are of this kind
        raise GroupBroken(str(problem)) from problem


class _Attempt:
    """An attempt to find the peers of a generation: its store and its connected gloo group; NCCL connects later.

    Gloo waits for a peer that has died on nothing that could be interrupted, so a thread of its own waits for it.
    """

    def __init__(self, place: Place, store: TCPStore | None, backend: str) -> None:
        self._place = place
        self._found: queue.Queue[tuple[Any, ProcessGroupGloo | None] | Exception] = queue.Queue()
        name = f"bftrainer-form-{place.generation}"
        self._thread = threading.Thread(target=self._connect, args=(store, backend), name=name, daemon=True)
        self._thread.start()

    def wait(self, cancelled: Callable[[], bool]) -> tuple[Any, ProcessGroupGloo | None]:
        """What was found. Raises `GroupBroken` when nothing is, or when the attempt is `cancelled`."""
        while True:
            with contextlib.suppress(queue.Empty):
                found = self._found.get(timeout=_LOOK_S)
                if isinstance(found, Exception):
                    raise GroupBroken(f"forming generation {self._place.generation} failed: {found}") from found
                return found
            if cancelled():
                raise GroupBroken(f"generation {self._place.generation} has lost a member while it formed")

    def end(self, before: set[str], hosting: set[str]) -> None:
        """End the thread and what it holds; sockets in `before` are none of its own, but for those of its store.

        It may be between one wait and the next, so it is told until it ends.
        """
        give_up = time.monotonic() + _ENDING_S
        while self._thread.is_alive() and time.monotonic() < give_up:
            for inode, fd in open_sockets().items():
                if inode in hosting or inode not in before:
                    shut(fd)
                if inode not in before:
                    knock(fd, self._place.world)
            self._thread.join(_LOOK_S)

    def _connect(self, store: TCPStore | None, backend: str) -> None:
        place = self._place
        try:
            if store is None:
                host, _, port = place.addresses[0].rpartition(":")
                store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_CONNECTING)
                store.set_timeout(_FORMING)
            prefix = PrefixStore(f"generation-{place.generation}", store)
            if backend == "nccl":
                self._found.put((prefix, None))
                return
            gloo: Any = ProcessGroupGloo(prefix, place.rank, place.world, _FORMING)
            gloo._set_default_timeout(_LONG)  # forming has a time limit, training has none
            self._found.put((prefix, gloo))
        except Exception as problem:
            self._found.put(problem.with_traceback(None))  # which would keep the store


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
