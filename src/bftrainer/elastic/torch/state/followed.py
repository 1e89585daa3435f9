"""Followed state: the part of the state that a newcomer has before it joins, as `TrainingState` sees it.

Members that train may send their trained tensors to a newcomer in advance (`follow/`). When the newcomer joins, it then
needs only the rest of the state. `TrainingState` asks `FollowedState` whether that is so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bftrainer.elastic.torch.state import transfer
from bftrainer.elastic.torch.state.transfer import TransferGroup, memory_of


class FollowedState(Protocol):
    """The trained tensors that newcomers get in advance: sent from here, or received here."""

    @property
    def follows(self) -> bool:
        """Whether this rank is a newcomer that has received the trained tensors and repeats the others' steps."""
        ...

    def mark(self, label: str, key: Sequence[int]) -> None:
        """Tell the newcomers to which this rank sends how far it is. `label` is the same on all ranks."""
        ...

    def has_caught_up(self, label: str, key: Sequence[int], check: Callable[[], None]) -> bool:
        """Return whether the trained tensors here are the same as those of the ranks that marked this `key`.

        `check` raises if the group is broken while this rank waits for the marks.
        """
        ...

    def trained(self) -> list[Tensor]:
        """Return the trained tensors of this rank: parameters and the optimizers' states."""
        ...

    def is_taking(self, sent: int, whole: int) -> None:
        """Stop following, because the state is about to be loaded. `sent` of `whole` bytes came in the pause."""
        ...

    def begins_alone(self) -> None:
        """Forget what was received in advance: no rank has the state, and training begins here."""
        ...

    def joined(self, members: Sequence[str]) -> None:
        """Stop sending to newcomers that are members now and have the state."""
        ...

    def state_was_loaded(self) -> None:
        """Stop sending: the trained tensors here have changed other than by a step."""
        ...


class NotFollowed:
    """A rank that gets and sends nothing in advance. See `FollowedState`."""

    follows = False

    def mark(self, label: str, key: Sequence[int]) -> None:
        """See `FollowedState`."""

    def has_caught_up(self, label: str, key: Sequence[int], check: Callable[[], None]) -> bool:
        """See `FollowedState`."""
        return False

    def trained(self) -> list[Tensor]:
        """See `FollowedState`."""
        return []

    def is_taking(self, sent: int, whole: int) -> None:
        """See `FollowedState`."""

    def begins_alone(self) -> None:
        """See `FollowedState`."""

    def joined(self, members: Sequence[str]) -> None:
        """See `FollowedState`."""

    def state_was_loaded(self) -> None:
        """See `FollowedState`."""


class StateInParts:
    """A captured state of which some tensors, the `known` ones, need not be sent: those who take it have the same."""

    def __init__(self, state: dict[str, Any], known: Sequence[Tensor]) -> None:
        self._skeleton, self._tensors = transfer.take_apart(state)
        ours = {memory_of(tensor) for tensor in known if tensor.nbytes}
        self._known = {
            place: slot
            for place, slot in transfer.placed_slots(self._skeleton)
            if memory_of(self._tensors[slot.number]) in ours
        }

    @property
    def layout(self) -> str:
        """A text that is the same on ranks whose known tensors have the same places, shapes and types."""
        found = [(place, slot.dtype, slot.shape) for place, slot in self._known.items()]
        return hashlib.sha256(repr(sorted(found, key=repr)).encode()).hexdigest()

    def send(self, source: int, link: TransferGroup) -> None:
        """Send the rest of the state, all but the known tensors, to all ranks. They call `receive_rest`."""
        known = sorted(slot.number for slot in self._known.values())
        transfer.broadcast_skeleton({"skeleton": self._skeleton, "known": known}, (), source, link)
        rest = [slot for slot in transfer.slots_of(self._skeleton) if slot.number not in set(known)]
        transfer.broadcast_tensors(self._tensors, rest, source, link, sends=True)

    def tensor_at(self, place: tuple[Any, ...]) -> Tensor:
        """Return the known tensor at a place."""
        return self._tensors[self._known[place].number]


@dataclass(frozen=True, slots=True)
class ReceivedRest:
    """The rest of a state, with the known tensors in their places. Of `whole` bytes only `sent` came from a peer."""

    state: dict[str, Any]
    sent: int
    whole: int


def receive_rest(here: StateInParts | None, source: int, link: TransferGroup) -> ReceivedRest | None:
    """Receive what `StateInParts.send` sends. A rank that takes nothing has no state `here`, and gets None."""
    packed, _ = transfer.broadcast_skeleton(None, (), source, link)
    skeleton, known = packed["skeleton"], set(packed["known"])
    slots = transfer.slots_of(skeleton)
    rest = [slot for slot in slots if slot.number not in known]
    rooms = dict(zip((slot.number for slot in rest), transfer.memory_for(rest, link.wire), strict=True))
    nothing = torch.empty(0)
    tensors = [rooms.get(slot.number, nothing) for slot in slots]
    transfer.broadcast_tensors(tensors, rest, source, link, sends=False)
    if here is None:
        return None
    for place, slot in transfer.placed_slots(skeleton):
        if slot.number in known:
            tensors[slot.number] = here.tensor_at(place)
    sizes = [torch.Size(slot.shape).numel() * slot.dtype.itemsize for slot in slots]
    sent = sum(size for size, slot in zip(sizes, slots, strict=True) if slot.number not in known)
    return ReceivedRest(transfer.put_together(skeleton, tensors), sent, sum(sizes))
