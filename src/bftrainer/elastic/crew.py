"""This worker among its peers: it follows the manager from one generation's group to the next.

The adapter says when (at a step boundary, or when the group is broken) and how newcomers get the state; the crew
leaves, arrives, forms, and tries again when a peer is lost on the way.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial

import torch

from bftrainer.elastic.group import Group, GroupBroken
from bftrainer.elastic.membership import Membership, Place
from bftrainer.elastic.protocol import Broken

_NEWS_S = 0.3
"""How long a worker whose group broke waits for its manager's word before it complains: the manager may know why."""
_COLLATERAL_S = 1.0
"""How long an exception of the script waits for the news that a peer was lost, before it counts as the script's own."""


class Crew:
    """The group of the present generation and the way to the next. Without a manager, a crew of one."""

    def __init__(self, membership: Membership | None, backend: str, device: torch.device) -> None:
        self.membership = membership
        self._group = Group(backend)
        self._device = device
        if membership is not None:
            membership.on_cut = self._group.cut

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
            self._group.form(Place(0, ("",), 0, (self._group.open_store("127.0.0.1"),)))
        except GroupBroken as problem:
            warnings.warn(f"a group of one cannot be formed on this node: {problem}", stacklevel=2)
        self._group.leave()

    def form_anew(self, sync: Callable[[Place], None]) -> tuple[Place, float, float]:
        """Leave the present group and join that of the newest generation, in which `sync` brings all to one state.

        Gives the seconds that forming and syncing took. Raises `Leave` when this worker is not wanted any more.
        """
        membership = self.membership
        assert membership is not None
        while True:
            self._group.leave()
            place = membership.arrive(self._address)
            began = time.perf_counter()
            try:
                self._group.form(place, partial(membership.lost_one, place.generation))
                formed = time.perf_counter()
                sync(place)
            except GroupBroken as problem:
                self._group.cut()
                self._complain(place.generation, problem)
                continue
            if membership.entered(place.generation):
                return place, formed - began, time.perf_counter() - formed
            membership.gave_up(place.generation)

    def give_up(self, problem: GroupBroken) -> None:
        """The present group is broken: nobody shall wait for this worker in it."""
        if self.membership is None:
            raise problem
        self._group.cut()
        self._complain(self.membership.formed, problem)

    def check_whole(self) -> None:
        """NCCL ends what is aborted without an error: its result must not be used."""
        if self._group.backend == "nccl" and self.membership is not None and self.membership.cut:
            raise GroupBroken("a peer was lost")

    def is_collateral(self, error: BaseException) -> bool:
        """Whether an exception of the script came from a lost peer: its own communication broke, not its code."""
        if self.membership is None or self.world == 1 or not isinstance(error, RuntimeError | GroupBroken):
            return False  # torch's distributed errors are RuntimeErrors
        return self.membership.wait_for_cut(_COLLATERAL_S)

    def close(self) -> None:
        """Leave for good."""
        self._group.leave()
        if self.membership is not None:
            self.membership.close()

    def _complain(self, generation: int, problem: GroupBroken) -> None:
        assert self.membership is not None
        self.membership.gave_up(generation)
        if not self.membership.wait_for_newer(_NEWS_S):
            self.membership.send(Broken(generation, str(problem)[:500]))

    def _address(self, rank: int) -> str:
        """Where this worker is reached; rank 0 hosts the rendezvous of its generation."""
        assert self.membership is not None
        host = self.membership.address
        return self._group.open_store(host) if rank == 0 else f"{host}:0"
