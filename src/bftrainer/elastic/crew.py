"""This worker among its peers: it follows the manager from one generation's group to the next.

The adapter says when (at a step boundary, or when the group is broken) and how newcomers get the state; the crew
leaves, arrives, forms, and tries again when a peer is lost on the way.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from bftrainer.elastic import nccl
from bftrainer.elastic.group import Group, GroupBroken
from bftrainer.elastic.meeting import Meetings
from bftrainer.elastic.membership import Membership, Place
from bftrainer.elastic.protocol import Broken

_NEWS_S = 0.3
"""How long a worker whose group broke waits for its manager's word before it complains: the manager may know why."""
_COLLATERAL_S = 1.0
"""How long an exception of the script waits for the news that a peer was lost, before it counts as the script's own."""
_LOOK_S = 0.5
"""How often a watching thread looks whether this worker has been waiting for its peers for long."""


class Crew:
    """The group of the present generation and the way to the next. Without a manager, a crew of one."""

    def __init__(self, membership: Membership | None, backend: str, device: torch.device) -> None:
        self.membership = membership
        self.waits_in: tuple[str, int] | None = None
        """The step in which this worker waits for its peers, in words and by how many waits there were before."""
        self._group = Group(backend, device)
        self._device = device
        self._meetings: Meetings | None = None
        self._closing = threading.Event()
        if membership is not None:
            membership.on_cut = self._group.cut
            threading.Thread(target=self._keep_looking, name="bftrainer-watch", daemon=True).start()

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._group.rank

    @property
    def world(self) -> int:
        """How many there are."""
        return self._group.world

    @property
    def wire(self) -> torch.device:
        """Where tensors must be for the group to carry them."""
        return torch.device("cpu") if self._group.backend == "gloo" else self._device

    @property
    def knows_of_newer(self) -> bool:
        """Whether this worker has heard of a newer generation."""
        return self.membership is not None and self.membership.changed

    def rehearse(self) -> None:
        """Form a group of one: what the first group of a process takes longer is paid before the others pause."""
        try:
            self._group.form(Place(0, ("",), 0, (self._group.open_store("127.0.0.1"),)), connect=True)
        except GroupBroken as problem:
            warnings.warn(f"a group of one cannot be formed on this node: {problem}", stacklevel=2)
        self._group.leave()

    def form_anew(self, sync: Callable[[Place], None]) -> tuple[Place, float, float]:
        """Leave the present group and join that of the newest generation, in which `sync` brings all to one state.

        Gives the seconds that forming and syncing took. Raises `Leave` when this worker is not wanted any more.
        """
        membership = self.membership
        assert membership is not None
        if self._group.backend == "nccl":
            # A rank whose kernel is through may still be sending to its peers; an abort would stop that.
            self.part()
        while True:
            place = membership.arrive(self._address)
            # Not before: all have arrived, so nobody needs the former group any more.
            self._group.leave()
            self._meetings = None
            began = time.perf_counter()
            try:
                self._group.form(place, partial(membership.lost_one, place.generation))
                formed = time.perf_counter()
                sync(place)
                self._group.check()
            except GroupBroken as problem:
                self._group.cut()
                self._complain(place.generation, problem)
                continue
            if membership.entered(place.generation):
                return place, formed - began, time.perf_counter() - formed
            membership.gave_up(place.generation)

    def meet_with(self, ranks: Sequence[int], series: str) -> Meetings:
        """From now on these ranks of the present group meet. All of them say so at the same point."""
        store = self._group.store
        assert store is not None
        self._meetings = Meetings(store, self.rank, ranks, self._group.check, series)
        return self._meetings

    @property
    def meetings(self) -> Meetings | None:
        """Those of the ranks that hold the state; None for a worker that trains alone."""
        return self._meetings

    def part(self) -> None:
        """Wait until nobody in the present group needs this worker any more, or the group is broken."""
        if self._meetings is not None and self.world > 1 and not self._group.broken:
            with contextlib.suppress(GroupBroken):
                self.meet_with(range(self.world), "parting").part()

    def give_up(self, problem: GroupBroken) -> None:
        """The present group is broken: nobody shall wait for this worker in it."""
        if self.membership is None:
            raise problem
        self._group.cut()
        self._complain(self.membership.formed, problem)

    def wait(self, work: dist.Work) -> None:
        """Wait for an operation of the group; a lost peer ends the wait."""
        self._group.wait(work)

    def check_whole(self) -> None:
        """NCCL ends what is aborted without an error: its result must not be used."""
        self._group.check()

    def is_collateral(self, error: BaseException) -> bool:
        """Whether an exception of the script came from a lost peer: its own communication broke, not its code."""
        kinds = RuntimeError | GroupBroken  # torch's distributed errors are of the first
        if self._group.broken:
            kinds |= ValueError  # what torch says of a group that was aborted
        if self.membership is None or self.world == 1 or not isinstance(error, kinds):
            return False
        return self.membership.wait_for_cut(_COLLATERAL_S)

    def close(self, within_s: float = 0.0) -> bool:
        """Leave for good. False if a thread is still in C++ then, which must not come back to Python any more."""
        self._closing.set()
        ended = self._group.close(within_s)
        if self.membership is not None:
            self.membership.close()
        return ended

    def _complain(self, generation: int, problem: GroupBroken) -> None:
        assert self.membership is not None
        self.membership.gave_up(generation)
        if not self.membership.wait_for_cut(_NEWS_S):
            self.membership.send(Broken(generation, str(problem)[:500]))

    def _address(self, rank: int) -> str:
        """Where this worker is reached; rank 0 hosts the rendezvous of its generation."""
        assert self.membership is not None
        host = self.membership.address
        return self._group.open_store(host) if rank == 0 else f"{host}:0"

    def _keep_looking(self) -> None:
        """While this worker waits for its peers in a step: tell them, and see whether NCCL has given up silently."""
        before: tuple[str, int] | None = None
        told, waits = "", 0
        while not self._closing.wait(_LOOK_S):
            step, meetings = self.waits_in, self._meetings
            if meetings is None or self._group.broken:
                before, told = None, ""
                continue
            long = step is not None and step == before
            waits += not long
            before = step
            if long and self._group.backend == "nccl" and (error := nccl.error_of(self._device)):
                self._group.cut(f"NCCL reports {error}")
                continue
            now = f"{step[0]} (wait {waits})" if long and step is not None else ""
            if now != told:
                with contextlib.suppress(Exception):  # the group broke meanwhile, which others notice
                    meetings.is_waiting(now)
                    told = now
