"""Process group of one generation: formed, freed from dead peers and left, many times per process.

The store through which the members find each other lives in rank 0 and only as long as its generation. Losing it costs
the same as losing any member: a new generation.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from bftrainer.elastic import protocol
from bftrainer.elastic.membership import Assignment
from bftrainer.elastic.torch.group import nccl
from bftrainer.elastic.torch.group.forming import Aside, Cancelled
from bftrainer.elastic.torch.group.sealed_store import SealedStore, connect_store, is_loopback, open_store
from bftrainer.elastic.torch.group.sockets import open_sockets, shut
from bftrainer.elastic.torch.refusals import init_process_group
from bftrainer.errors import BFTrainerError, InputError

_LONG = timedelta(days=7)
"""A peer may be slow: an evaluation, a slow disk. A dead or silent peer is cut off, not waited for."""
_FORMING = timedelta(seconds=30)
_CONNECTING = timedelta(seconds=10)
"""Time limit for connecting to the store, which exists before its address is known."""
_AGREEING_S = 1.0
"""Seconds to wait for the name of rank 0's backend, which it gives as soon as it forms the group."""
_ABORTING_S = 20.0
"""Seconds that an abort of NCCL may take. Usually it takes half a second."""
_LOOK_S = 0.001
_SLICE = timedelta(seconds=0.2)
"""How long to wait for gloo before checking whether the peers are still there."""
_GLOO = "bftrainer"
"""Name of our gloo groups in torch.distributed."""

T = TypeVar("T")


class Parcel(NamedTuple):
    """A tensor that is sent to one rank, or memory for one that is received from it."""

    tensor: torch.Tensor
    peer: int
    tag: int
    """Two parcels that the same two ranks exchange at the same time have different tags."""


class GroupBroken(Exception):  # noqa: N818 - a state of the world that training recovers from
    """The group cannot communicate any more. No unfinished operation of it has been applied."""


def default_backend(device: torch.device) -> str:
    """Return NCCL between GPUs, gloo otherwise. `BFTRAINER_BACKEND` overrides it, for workers that share a GPU."""
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
        """Store of the present group, for messages between its members that are not collectives."""
        self.broken = ""
        """Why the present group cannot be used any more; empty while it can."""
        self._device = device
        self._opened: TCPStore | None = None  # for the next generation, if this is its rank 0
        self._no_store = ""
        self._hosting: set[str] = set()  # the sockets of the opened store, by inode
        self._mine: set[str] = set()  # the group's sockets, by inode
        self._live = False
        self._stuck = False  # one of gloo's threads will never end
        self._cutting = threading.Lock()
        self._aborted: threading.Event | None = None  # set when the running abort ends
        self._given_up: list[Aside[Any]] = []  # forming steps, some of which may still run
        if backend == "nccl":
            nccl.prepare()

    def open_store(self, host: str) -> str:
        """Host the rendezvous of the next generation and return its address."""
        before = set(open_sockets())
        self._opened, self._hosting = None, set()
        try:
            self._opened = open_store(host, _FORMING)
        except (BFTrainerError, RuntimeError) as problem:
            self._no_store = str(problem)  # reported when the generation forms: only then is it read
            return f"{host}:0"
        self._hosting = set(open_sockets()) - before
        return f"{host}:{self._opened.port}"

    def form(self, place: Assignment, cancelled: Callable[[], bool] = lambda: False, *, connect: bool = False) -> None:
        """Join the group of a generation. Raises `GroupBroken` if that fails or is `cancelled`.

        A group of one has no peer to connect to. With `connect` it still makes all the connections that a larger group
        makes.
        """
        before = set(open_sockets())
        store, gloo = self._aside(place, partial(self._rendezvous, place, cancelled), cancelled)
        with breaking():
            _make_default(store, gloo, place)
        if gloo is None and (place.world > 1 or connect):
            first = self._aside(place, partial(nccl.connect, self._device), cancelled)
            self._see_done(first, place, cancelled)
        with self._cutting:
            if cancelled():  # until here `cut` would not find the group
                raise GroupBroken(f"generation {place.generation} has lost a member")
            self._mine = set(open_sockets()) - before
            self._live, self.broken, self.store = True, "", store
        self.rank, self.world = place.rank, place.world

    def check(self) -> None:
        """Raise `GroupBroken` if the group was cut: results that NCCL returned since then must not be used."""
        if self.broken:
            raise GroupBroken(self.broken)

    def wait(self, work: dist.Work) -> None:
        """Wait for an operation of the group. Raises what the operation raises, and a RuntimeError if it never ends.

        Sometimes gloo does not wake a thread that sends to a lost peer, even when its sockets are shut.
        """
        if self.backend == "nccl":
            work.wait()  # does not block: the device waits
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

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Send and receive tensors from rank to rank, all at once. Only gloo can. Raises `GroupBroken`.

        The operations are waited for in their own thread and not in time slices, as `wait` does: gloo closes all
        connections of the group when an operation between two ranks times out.
        """
        # The present group, also if the thread is so late that there is another one.
        group = dist.group.WORLD
        aside = Aside(partial(_exchange, sends, receives, group), "bftrainer-exchange")
        try:
            with breaking():
                aside.wait(lambda: bool(self.broken))
        except Cancelled:
            aside.join(_SLICE.total_seconds())
            if aside.runs():  # see `wait`: gloo does not wake it
                self._stuck = True
                self._given_up = [*filter(Aside.runs, self._given_up), aside]
            raise GroupBroken(self.broken) from None

    def cut(self, reason: str = "a peer was lost") -> None:
        """End all waits in the group, from any thread. No operation of the group counts from now on."""
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
        """Take the group apart, whether it works or not. Call it only when no peer needs the group any more."""
        self.cut("this worker has left it")
        with self._cutting:
            self._live = False
            if self.backend == "nccl":
                self._abort()  # also a group that was never connected
        self._see_abort_end()
        if dist.is_initialized():
            if self._stuck:  # freeing it would wait for that thread for ever
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.distributed_c10d._get_default_group()))
                self._stuck = False
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        self.store = None
        self._mine = set()

    def close(self, within_s: float) -> bool:
        """Leave permanently. Return False if a forming step that was given up still runs after `within_s` seconds."""
        self.leave()
        end = time.monotonic() + within_s
        for aside in self._given_up:
            aside.join(end - time.monotonic())
        return not any(map(Aside.runs, self._given_up))

    def _abort(self) -> None:
        """Abort NCCL in its own thread: the abort takes half a second, and the caller need not wait for it."""
        if self._aborted is None and dist.is_initialized():
            self._aborted = threading.Event()
            threading.Thread(target=_abort, args=(self._aborted,), name="bftrainer-abort", daemon=True).start()

    def _see_abort_end(self) -> None:
        aborted, self._aborted = self._aborted, None
        if aborted is not None and not aborted.wait(_ABORTING_S):
            print("bftrainer: NCCL does not release a broken group; the worker restarts", file=sys.stderr, flush=True)
            os._exit(protocol.RESTART)

    def _aside(self, place: Assignment, call: Callable[[], T], cancelled: Callable[[], bool]) -> T:
        """Run a forming step that may block. Any error in it means that there is no group."""
        aside = Aside(call, f"bftrainer-form-{place.generation}")
        try:
            return aside.wait(cancelled)
        except Cancelled:
            aside.end(self._hosting, place.world, gloo=self.backend == "gloo")
            self._given_up = [*filter(Aside.runs, self._given_up), aside]
            raise GroupBroken(f"generation {place.generation} has lost a member while it formed") from None
        except Exception as problem:
            raise GroupBroken(f"forming generation {place.generation} failed: {_in_words(problem, place)}") from problem

    def _see_done(self, work: dist.Work, place: Assignment, cancelled: Callable[[], bool]) -> None:
        """Wait for NCCL's first operation without blocking: if a peer is lost it never ends."""
        while not work.is_completed():
            if cancelled():
                raise GroupBroken(f"generation {place.generation} has lost a member while it formed")
            time.sleep(_LOOK_S)
        if error := nccl.error_of(self._device):
            raise GroupBroken(f"forming generation {place.generation} failed: NCCL reports {error}")

    def _rendezvous(
        self, place: Assignment, cancelled: Callable[[], bool]
    ) -> tuple[SealedStore, ProcessGroupGloo | None]:
        """Find the peers of a generation. Return its store and its connected gloo group; NCCL connects later."""
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
        self._agree_on_backend(store, place, cancelled)
        if self.backend == "nccl":
            return store, None
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _FORMING
        options._devices = [_gloo_device(own_host)]
        gloo: Any = ProcessGroupGloo(store, place.rank, place.world, options)
        gloo._set_default_timeout(_LONG)  # forming has a time limit, training has none
        return store, gloo

    def _agree_on_backend(self, store: SealedStore, place: Assignment, cancelled: Callable[[], bool]) -> None:
        """Refuse a group whose ranks would use different backends: they would wait for each other in vain."""
        if place.rank == 0:
            store.set("backend", self.backend)
            return
        give_up = time.monotonic() + _AGREEING_S
        while not store.check(["backend"]):
            if cancelled() or time.monotonic() > give_up:  # rank 0 is of an older version
                return
            time.sleep(_LOOK_S)
        if (common := store.get("backend").decode()) != self.backend:
            raise BFTrainerError(
                f"this node computes on the {self._device.type} with {self.backend}, rank 0 with {common}: a trainer's "
                "nodes must all have GPUs or none. Choose them (`constraint`), or submit with "
                f"--env {protocol.BACKEND}=gloo"
            )


@contextlib.contextmanager
def breaking() -> Iterator[None]:
    """Turn failed communication in this block into `GroupBroken`."""
    try:
        yield
    except RuntimeError as problem:  # torch's distributed errors are RuntimeErrors
        raise GroupBroken(str(problem)) from problem
    except ValueError as problem:
        if dist.is_initialized():
            raise
        raise GroupBroken("the group was aborted") from problem  # torch no longer finds the group


def _exchange(sends: Sequence[Parcel], receives: Sequence[Parcel], group: Any) -> None:
    works = [dist.irecv(tensor, peer, group=group, tag=tag) for tensor, peer, tag in receives]
    works += [dist.isend(tensor, peer, group=group, tag=tag) for tensor, peer, tag in sends]
    for work in works:
        assert work is not None  # None stands for a rank that is not in the group
        work.wait(_LONG)


def _abort(aborted: threading.Event) -> None:
    dead = None
    with contextlib.suppress(Exception):  # the group may be gone already, which is fine
        dead = nccl.abort()
    aborted.set()
    del dead  # this may take a while


def _gloo_device(host: str) -> Any:
    """Return gloo's network interface: that of the node's address, unless GLOO_SOCKET_IFNAME names one."""
    if not host or os.environ.get("GLOO_SOCKET_IFNAME"):
        return ProcessGroupGloo.create_default_device()
    return ProcessGroupGloo.create_device(hostname=host)


def _in_words(problem: Exception, place: Assignment) -> str:
    """Describe what went wrong, with its likely cause."""
    hosts = {address.rpartition(":")[0] for address in place.addresses}
    own = place.addresses[place.rank].rpartition(":")[0]
    misled = sorted(host for host in hosts if len(hosts) > 1 and is_loopback(host))
    text = str(problem).strip() or type(problem).__name__
    if misled:
        text += (
            f" [{', '.join(misled)} resolves to a loopback address on {own}, so peers there cannot be reached: give "
            "each node's agent its network address, or correct the nodes' /etc/hosts]"
        )
    elif len(hosts) > 1:
        text += " [is there a firewall between the nodes? Workers connect to each other on ports the system chooses]"
    return text


def _make_default(store: Any, gloo: ProcessGroupGloo | None, place: Assignment) -> None:
    """Make torch.distributed use a connected group, so that the script's own collectives work too."""
    connected = [gloo]

    def group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        # The first group requested is the default group; later ones are the script's own (`new_group`).
        return connected.pop() if connected else ProcessGroupGloo(store, rank, size, timeout)

    hook = sys.excepthook  # each new group would wrap it again
    try:
        if gloo is not None:
            dist.Backend.register_backend(_GLOO, group, devices=["cpu", "cuda"])
        backend = "nccl" if gloo is None else _GLOO
        init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=_LONG)
    finally:
        sys.excepthook = hook
