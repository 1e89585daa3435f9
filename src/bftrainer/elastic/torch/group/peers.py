"""Peers of a worker: form the group of each new generation, as the manager says.

`Run` decides when (at a step boundary, or when the group is broken) and how newcomers get the state. `Peers` leaves the
old group, arrives, forms the new one, and tries again when a peer is lost on the way.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from bftrainer.elastic import protocol
from bftrainer.elastic.membership import Assignment, Membership
from bftrainer.elastic.protocol import Broken
from bftrainer.elastic.torch.group import nccl
from bftrainer.elastic.torch.group.group import Group, GroupBroken, Parcel
from bftrainer.elastic.torch.group.meeting import Meetings

_NEWS_S = 0.3
"""How long a worker whose group broke waits for news before it reports that: the manager may know why."""
_COLLATERAL_S = 1.0
"""Seconds to wait for news of a lost peer before an exception of the script counts as the script's own."""
_LOOK_S = 0.5
"""Seconds between two checks by the watching thread whether this worker has long been waiting for its peers."""


class Peers:
    """The group of the present generation and the way to the next one. Without a manager, a group of one."""

    def __init__(self, membership: Membership | None, backend: str, device: torch.device) -> None:
        self.membership = membership
        self.waits_in: tuple[tuple[int, ...], int] | None = None
        """The step in which this worker waits for its peers: its place, and the number of waits so far."""
        self._group = Group(backend, device)
        self._assignment: Assignment | None = None  # that of the present group
        self._device = device
        self._meetings: Meetings | None = None
        self._closing = threading.Event()
        if membership is not None:
            membership.on_cut = self._group.cut
            threading.Thread(target=self._keep_looking, name="bftrainer-watch", daemon=True).start()

    @property
    def rank(self) -> int:
        """This process's number among all ranks, from 0."""
        return self._group.rank

    @property
    def world(self) -> int:
        """Number of ranks in the group."""
        return self._group.world

    @property
    def local_rank(self) -> int:
        """This process's number among the ranks on its node, from 0."""
        return self.membership.local_rank if self.membership is not None else 0

    @property
    def local_world(self) -> int:
        """Number of ranks on this process's node."""
        if self._assignment is not None:
            return self._assignment.local_world
        return int(os.environ.get(protocol.LOCAL_WORLD) or 1) if self.membership is not None else 1

    @property
    def node_rank(self) -> int:
        """Number of this process's node among all nodes, from 0."""
        return self._assignment.node_rank if self._assignment is not None else 0

    @property
    def nodes(self) -> int:
        """Number of nodes in the group."""
        return self._assignment.nodes if self._assignment is not None else 1

    @property
    def wire(self) -> torch.device:
        """Device that tensors must be on for the group to transfer them."""
        return torch.device("cpu") if self._group.backend == "gloo" else self._device

    @property
    def can_exchange(self) -> bool:
        """Whether tensors can be sent from one rank to another one: not with NCCL, see `state/hand_over.py`."""
        return self._group.backend == "gloo"

    @property
    def knows_of_newer(self) -> bool:
        """Whether this worker has heard of a newer generation."""
        return self.membership is not None and self.membership.changed

    def rehearse(self) -> None:
        """Form a group of one. The first group of a process takes longer; this pays for it before the others pause."""
        try:
            self._group.form(Assignment(0, ("",), 0, (self._group.open_store("127.0.0.1"),)), connect=True)
        except GroupBroken as problem:
            warnings.warn(f"a group of one cannot be formed on this node: {problem}", stacklevel=2)
        self._group.leave()

    def form_anew(self, sync: Callable[[Assignment], None]) -> tuple[Assignment, float, float]:
        """Leave the present group and join that of the newest generation.

        `sync` gives all members of the new group the same state. Returns the assignment and the seconds that forming
        and syncing took. Raises `Leave` when this worker is no longer a member.
        """
        membership = self.membership
        assert membership is not None
        if self._group.backend == "nccl":
            # A rank whose kernel has ended may still be sending to its peers; an abort would stop that.
            self.part()
        while True:
            place = membership.arrive(self._address)
            # Not earlier: now all have arrived, so no rank needs the former group any more.
            self._group.leave()
            self._meetings = None
            began = time.perf_counter()
            try:
                self._group.form(place, partial(membership.lost_one, place.generation))
                self._assignment = place
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
        """From now on hold meetings among these ranks of the present group. All of them call this at the same point."""
        store = self._group.store
        assert store is not None
        self._meetings = Meetings(store, self.rank, ranks, self._group.check, series)
        return self._meetings

    @property
    def meetings(self) -> Meetings | None:
        """Meetings of the ranks that hold the state; None for a worker that trains alone."""
        return self._meetings

    def part(self) -> None:
        """Wait until no rank of the present group needs this worker any more, or the group is broken."""
        if self._meetings is not None and self.world > 1 and not self._group.broken:
            with contextlib.suppress(GroupBroken):
                self.meet_with(range(self.world), "parting").part()

    def give_up(self, problem: GroupBroken) -> None:
        """Give up the present group, which is broken, so that no peer waits for this worker in it."""
        if self.membership is None:
            raise problem
        self._group.cut()
        self._complain(self.membership.formed, problem)

    def wait(self, work: dist.Work) -> None:
        """Wait for an operation of the group; a lost peer ends the wait."""
        self._group.wait(work)

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Send and receive tensors from rank to rank, all at once. Raises `GroupBroken` when a peer is lost."""
        self._group.exchange(sends, receives)

    def check_whole(self) -> None:
        """Raise `GroupBroken` if the group was cut: NCCL ends aborted operations without an error."""
        self._group.check()

    def is_collateral(self, error: BaseException) -> bool:
        """Return whether an exception of the script came from a lost peer: its communication broke, not its code."""
        kinds = RuntimeError | GroupBroken  # torch's distributed errors are RuntimeErrors
        if self._group.broken:
            kinds |= ValueError  # torch raises it for a group that was aborted
        if self.membership is None or self.world == 1 or not isinstance(error, kinds):
            return False
        return self.membership.wait_for_cut(_COLLATERAL_S)

    def close(self, within_s: float = 0.0) -> bool:
        """Leave permanently. Return False if a thread is still in C++ code, from which it must not return to Python."""
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
        """Return where this worker can be reached; rank 0 hosts the rendezvous of its generation."""
        assert self.membership is not None
        host = self.membership.address
        return self._group.open_store(host) if rank == 0 else f"{host}:0"

    def _keep_looking(self) -> None:
        """Watch for long waits in a step: tell the peers about them, and check whether NCCL has failed silently."""
        before: tuple[tuple[int, ...], int] | None = None
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
                with contextlib.suppress(Exception):  # the group broke, which the main thread notices
                    meetings.is_waiting(now)
                    told = now
