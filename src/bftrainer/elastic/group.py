"""The process group of one generation: formed, cut loose from a dead peer, and left, many times in a process's life.

The store through which the members find each other lives in rank 0 and only as long as its generation: losing it costs
what losing any member costs, a new generation.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from bftrainer.elastic import nccl, protocol
from bftrainer.elastic.forming import Aside, Cancelled
from bftrainer.elastic.membership import Place
from bftrainer.elastic.refusals import init_process_group
from bftrainer.elastic.sockets import open_sockets, shut
from bftrainer.elastic.store import SealedStore, connect_store, is_loopback, open_store
from bftrainer.errors import BFTrainerError, InputError

_LONG = timedelta(days=7)
"""A peer may take its time: an evaluation, a slow disk. A dead or silent one is cut off, not waited for."""
_FORMING = timedelta(seconds=30)
_CONNECTING = timedelta(seconds=10)
"""For the store, which is there before its address is known."""
_ABORTING_S = 20.0
"""How long an abort of NCCL may take. It takes half a second."""
_SLICE = timedelta(seconds=0.2)
"""How long to wait for gloo before looking whether there is still anybody to wait for."""
_GLOO = "bftrainer"
"""What torch.distributed calls our gloo groups."""

T = TypeVar("T")


class GroupBroken(Exception):  # noqa: N818 - a state of the world that training recovers from
    """The group cannot communicate any more; nothing it was doing has been applied."""


def default_backend(device: torch.device) -> str:
    """NCCL between GPUs, gloo otherwise; `BFTRAINER_BACKEND` says so for workers that share a GPU."""
    named = os.environ.get(protocol.BACKEND)
    if named is None:
        return "nccl" if device.type == "cuda" else "gloo"
    if named not in ("gloo", "nccl"):
        raise InputError(f"{protocol.BACKEND} must be gloo or nccl, but got {named!r}")
    if named == "nccl" and device.type != "cuda":
        raise InputError(f"{protocol.BACKEND} must be gloo where the device is {device}, but got 'nccl'")
    return named


class Group:
    """At most one process group at a time, the default one of torch.distributed."""

    def __init__(self, backend: str, device: torch.device) -> None:
        self.backend = backend
        self.rank = 0
        self.world = 1
        self.store: SealedStore | None = None
        """The rendezvous of the present group, for what its members tell each other beside collectives."""
        self.broken = ""
        """Why the present group cannot be used any more; empty while it can."""
        self._device = device
        self._opened: TCPStore | None = None  # for the next generation, if this is its rank 0
        self._no_store = ""
        self._hosting: set[str] = set()  # the sockets of that store, by inode
        self._mine: set[str] = set()  # the group's sockets, by inode
        self._live = False
        self._stuck = False  # a thread of gloo's will never end
        self._cutting = threading.Lock()
        self._aborted: threading.Event | None = None  # of an abort that is under way
        self._given_up: list[Aside[Any]] = []  # steps of forming, some of which may not have ended yet
        if backend == "nccl":
            nccl.prepare()

    def open_store(self, host: str) -> str:
        """Host the next generation's rendezvous and say where."""
        before = set(open_sockets())
        self._opened, self._hosting = None, set()
        try:
            self._opened = open_store(host, _FORMING)
        except (BFTrainerError, RuntimeError) as problem:
            self._no_store = str(problem)  # said when the generation forms: only then does anybody listen
            return f"{host}:0"
        self._hosting = set(open_sockets()) - before
        return f"{host}:{self._opened.port}"

    def form(self, place: Place, cancelled: Callable[[], bool] = lambda: False, *, connect: bool = False) -> None:
        """Join the group of a generation. Raises `GroupBroken` when that does not come about or is `cancelled`.

        A group of one has nobody to connect to; with `connect` it does all the same what a larger one would.
        """
        before = set(open_sockets())
        store, gloo = self._aside(place, partial(self._rendezvous, place, cancelled), cancelled)
        with breaking():
            _make_default(store, gloo, place)
        if gloo is None and (place.world > 1 or connect):
            self._aside(place, partial(nccl.connect, self._device), cancelled)
        with self._cutting:
            if cancelled():  # only from here on would `cut` find the group
                raise GroupBroken(f"generation {place.generation} has lost a member")
            self._mine = set(open_sockets()) - before
            self._live, self.broken, self.store = True, "", store
        self.rank, self.world = place.rank, place.world

    def check(self) -> None:
        """Raise `GroupBroken` if the group was cut: what NCCL gave since then must not be used."""
        if self.broken:
            raise GroupBroken(self.broken)

    def wait(self, work: dist.Work) -> None:
        """Wait for an operation of the group. Raises what it raises, and a RuntimeError if it never ends.

        Now and then gloo forgets to wake who sends to a lost peer, whatever becomes of its sockets.
        """
        if self.backend == "nccl":
            work.wait()  # which does not block: the device waits
            return
        while True:
            cut_before = bool(self.broken)
            try:
                work.wait(_SLICE)
            except RuntimeError:
                if work.is_completed():
                    raise
                if cut_before:
                    self._stuck = True
                    raise RuntimeError("gloo does not end an operation whose peer is lost") from None
            else:
                return

    def cut(self, reason: str = "a peer was lost") -> None:
        """Free whoever waits in the group, from any thread: no operation of it counts from now on."""
        with self._cutting:
            if not self._live:
                return
            self.broken = self.broken or reason
            if self.backend == "nccl":
                self._abort()
                return
            for inode, fd in open_sockets().items():
                if inode in self._mine:
                    shut(fd)

    def leave(self) -> None:
        """Take the group apart, whether it works or not. Peers that still need it must have been waited for."""
        self.cut("this worker has left it")
        with self._cutting:
            self._live = False
            if self.backend == "nccl":
                self._abort()  # also one that never came to be connected
        self._see_abort_end()
        if dist.is_initialized():
            if self._stuck:  # who frees it would wait for its thread for ever
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.distributed_c10d._get_default_group()))
                self._stuck = False
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        self.store = None
        self._mine = set()

    def close(self, within_s: float) -> bool:
        """Leave for good. False if a thread is still in a step of forming that was given up, `within_s` from now."""
        self.leave()
        end = time.monotonic() + within_s
        for aside in self._given_up:
            aside.join(end - time.monotonic())
        return not any(map(Aside.runs, self._given_up))

    def _abort(self) -> None:
        """Abort NCCL in a thread of its own: it takes half a second, and the caller may have better to do."""
        if self._aborted is None and dist.is_initialized():
            self._aborted = threading.Event()
            threading.Thread(target=_abort, args=(self._aborted,), name="bftrainer-abort", daemon=True).start()

    def _see_abort_end(self) -> None:
        aborted, self._aborted = self._aborted, None
        if aborted is not None and not aborted.wait(_ABORTING_S):
            print("bftrainer: NCCL does not let go of a broken group; starting again", file=sys.stderr, flush=True)
            os._exit(protocol.RESTART)

    def _aside(self, place: Place, call: Callable[[], T], cancelled: Callable[[], bool]) -> T:
        """Do a step of forming that may block. Whatever goes wrong in it means that there is no group."""
        aside = Aside(call, f"bftrainer-form-{place.generation}")
        try:
            return aside.wait(cancelled)
        except Cancelled:
            aside.end(self._hosting, place.world, gloo=self.backend == "gloo")
            self._given_up = [*filter(Aside.runs, self._given_up), aside]
            raise GroupBroken(f"generation {place.generation} has lost a member while it formed") from None
        except Exception as problem:
            raise GroupBroken(f"forming generation {place.generation} failed: {_in_words(problem, place)}") from problem

    def _rendezvous(self, place: Place, cancelled: Callable[[], bool]) -> tuple[SealedStore, ProcessGroupGloo | None]:
        """Find the peers of a generation: its store and its connected gloo group; NCCL connects later."""
        own_host = place.addresses[place.rank].rpartition(":")[0]
        opened, self._opened = self._opened, None
        if place.rank == 0 and opened is None:
            raise BFTrainerError(self._no_store)
        if place.rank != 0 or opened is None:
            host, _, port = place.addresses[0].rpartition(":")
            if port == "0":
                raise BFTrainerError(f"rank 0 cannot host the rendezvous on {host}")
            opened = connect_store(host, int(port), _CONNECTING, cancelled)
            opened.set_timeout(_FORMING)
        store = SealedStore(opened, place.secret, f"generation-{place.generation}")
        if self.backend == "nccl":
            return store, None
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _FORMING
        options._devices = [_gloo_device(own_host)]
        gloo: Any = ProcessGroupGloo(store, place.rank, place.world, options)
        gloo._set_default_timeout(_LONG)  # forming has a time limit, training has none
        return store, gloo


@contextlib.contextmanager
def breaking() -> Iterator[None]:
    """Failed communication in this block raises `GroupBroken`."""
    try:
        yield
    except RuntimeError as problem:  # torch's distributed errors are of this kind
        raise GroupBroken(str(problem)) from problem
    except ValueError as problem:
        if dist.is_initialized():
            raise
        raise GroupBroken("the group was aborted") from problem  # torch does not find it any more


def _abort(aborted: threading.Event) -> None:
    dead = None
    with contextlib.suppress(Exception):  # the group may be gone, which is what is wanted
        dead = nccl.abort()
    aborted.set()
    del dead  # which may take a while


def _gloo_device(host: str) -> Any:
    """The network interface gloo uses: that of the node's address, unless GLOO_SOCKET_IFNAME names one."""
    if not host or os.environ.get("GLOO_SOCKET_IFNAME"):
        return ProcessGroupGloo.create_default_device()
    return ProcessGroupGloo.create_device(hostname=host)


def _in_words(problem: Exception, place: Place) -> str:
    """What went wrong, with what is known to cause it."""
    hosts = {address.rpartition(":")[0] for address in place.addresses}
    own = place.addresses[place.rank].rpartition(":")[0]
    misled = sorted(host for host in hosts if len(hosts) > 1 and is_loopback(host))
    text = str(problem).strip() or type(problem).__name__
    if misled:
        text += (
            f" [{', '.join(misled)} resolves to a loopback address on {own}, so peers there cannot be reached: give "
            "each node's agent its network address, or mend the nodes' /etc/hosts]"
        )
    elif len(hosts) > 1:
        text += " [is there a firewall between the nodes? Workers connect to each other on ports the system chooses]"
    return text


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
        init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=_LONG)
    finally:
        sys.excepthook = hook
