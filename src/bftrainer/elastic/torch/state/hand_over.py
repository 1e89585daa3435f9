"""Hand-over of a state to nodes with several ranks: rank i sends to rank i, each byte once per node.

`transfer.broadcast` sends everything from one rank to all others, whether they need it or not. Here the ranks of the
source's node share the work. The bytes of all tensors are cut into shares, one per rank of the node. Rank i of the
source's node sends share i to rank i of each node that takes the state. The ranks of that node then pass their shares
on to each other, while the next piece arrives. Ranks that take nothing receive only the skeleton, and continue.

Only gloo hands over in this way. NCCL broadcasts: its rings and trees cross the network once per node and use all of a
node's GPUs and network cards by themselves. Besides, NCCL connects two ranks only when they first send to each other,
and that must not happen inside an operation; see `group/nccl.py`.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bftrainer.elastic.membership import Assignment
from bftrainer.elastic.torch.group.group import Parcel
from bftrainer.elastic.torch.state import transfer
from bftrainer.elastic.torch.state.transfer import TransferGroup

_TAGS = 1 << 30
"""The first of the tags that are used here. A script that sends tensors itself uses small ones."""


class ExchangeGroup(TransferGroup, Protocol):
    """A group whose ranks can also send to each other directly."""

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Send and receive tensors from rank to rank, all at once."""
        ...


@dataclass(frozen=True, slots=True)
class Roles:
    """Who sends the state and who takes it."""

    source: int
    helpers: tuple[int, ...]
    """Ranks on the source's node that are as far as the source, and have the same state."""
    takers: tuple[tuple[int, ...], ...]
    """Ranks that take the state, by node. Nodes without such a rank are left out."""

    @classmethod
    def of(cls, assignment: Assignment, source: int, taking: Sequence[int], equals: Sequence[int]) -> Roles:
        """Give each rank its role: `equals` are as far as the source, which may be among them."""
        firsts = assignment.first_ranks

        def node(rank: int) -> int:
            return bisect.bisect_right(firsts, rank)

        helpers = tuple(rank for rank in sorted(equals) if rank != source and node(rank) == node(source))
        takers = tuple(tuple(ranks) for _, ranks in itertools.groupby(sorted(taking), key=node))
        return cls(source, helpers, takers)


@dataclass(frozen=True, slots=True)
class Leg:
    """One piece on its way from one rank to another: the bytes from `begin` to `end`, sent in a certain round."""

    round: int
    sender: int
    taker: int
    begin: int
    end: int
    tag: int


def legs_to(takers: Sequence[int], senders: Sequence[int], size: int, piece: int) -> Iterator[Leg]:
    """Yield the legs on which `size` bytes come to the ranks of one node, in pieces of at most `piece` bytes.

    There are as many shares as the larger side has ranks. So with equal numbers, share i goes from rank i to rank i;
    otherwise the ranks of the smaller side have several shares.
    """
    shares = max(len(senders), len(takers))
    for share in range(shares):
        sender, first = senders[share % len(senders)], takers[share % len(takers)]
        begin, end = size * share // shares, size * (share + 1) // shares
        for number, at in enumerate(range(begin, end, piece)):
            tag = _TAGS + number * shares + share
            until = min(at + piece, end)
            yield Leg(number, sender, first, at, until, tag)
            for other in takers:
                if other != first:
                    yield Leg(number + 1, first, other, at, until, tag)


def hand_over(state: Mapping[str, Any] | None, roles: Roles, rank: int, link: ExchangeGroup) -> dict[str, Any] | None:
    """Return the source's state on the ranks that take it, and None on all others. All ranks call this.

    `state` is that of the source and of its helpers. A helper may give none, or one with other tensors: it then does
    not send. Raises `GroupBroken` when a peer is lost on the way.
    """
    tensors: list[Tensor] = []
    skeleton = None
    if state is not None:
        skeleton, tensors = transfer.take_apart(state)
    layout = layout_of(skeleton) if skeleton is not None else 0
    flags = _able_helpers(layout, roles, rank, link)
    skeleton, flags = transfer.broadcast_skeleton(skeleton if rank == roles.source else None, flags, roles.source, link)
    senders = sorted([roles.source, *(helper for helper, able in zip(roles.helpers, flags, strict=True) if able)])
    nodes = [takers for takers in roles.takers if rank in senders or rank in takers]
    if not nodes:
        return None
    slots = transfer.slots_of(skeleton)
    takes = rank not in senders
    memory = ByteRange(transfer.memory_for(slots, link.wire) if takes else tensors)
    legs = [leg for takers in nodes for leg in legs_to(takers, senders, memory.size, transfer.PIECE_BYTES)]
    _carry([leg for leg in legs if rank in (leg.sender, leg.taker)], rank, memory, link)
    link.check_whole()
    return transfer.put_together(skeleton, memory.tensors) if takes else None


def layout_of(skeleton: Any) -> int:
    """Return a number above 0 that is the same for states with the same tensors in the same places."""
    placed = transfer.placed_slots(skeleton)
    text = repr([(place, slot.number, slot.dtype, slot.shape) for place, slot in placed])
    return 1 + int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _able_helpers(layout: int, roles: Roles, rank: int, link: ExchangeGroup) -> list[int]:
    """Return, on the source, 1 for each helper whose state has the same tensors and 0 for the others."""
    mine = torch.tensor([layout], dtype=torch.int64)
    theirs = [torch.zeros(1, dtype=torch.int64) for _ in roles.helpers]
    if rank in roles.helpers:
        link.exchange([Parcel(mine, roles.source, _TAGS)], [])
    elif rank == roles.source and roles.helpers:
        link.exchange([], [Parcel(one, helper, _TAGS) for one, helper in zip(theirs, roles.helpers, strict=True)])
        link.check_whole()
    return [int(one.item() == layout) for one in theirs]


def _carry(legs: Sequence[Leg], rank: int, memory: ByteRange, link: ExchangeGroup) -> None:
    """Send and receive the pieces, round by round. In each round, what came in the last one is passed on."""
    before: dict[tuple[int, int], Tensor] = {}
    for _, round_ in itertools.groupby(sorted(legs, key=lambda leg: leg.round), key=lambda leg: leg.round):
        pieces: dict[tuple[int, int], Tensor] = {}
        sends, receives = [], []
        for leg in round_:
            where = leg.begin, leg.end
            if leg.taker == rank:
                pieces[where] = memory.room(*where)
                receives.append((where, Parcel(pieces[where], leg.sender, leg.tag)))
            else:
                if where not in pieces:
                    pieces[where] = before[where] if where in before else memory.read(*where)
                sends.append(Parcel(pieces[where], leg.taker, leg.tag))
        link.exchange(sends, [parcel for _, parcel in receives])
        for where, parcel in receives:
            memory.write(where[0], parcel.tensor)
        before = pieces


class ByteRange:
    """The memory of several tensors as one range of bytes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self._ends = list(itertools.accumulate(tensor.nbytes for tensor in tensors))
        self.size = self._ends[-1] if self._ends else 0

    def read(self, begin: int, end: int) -> Tensor:
        """Return the bytes from `begin` to `end` in CPU memory; of a part of one tensor there, without a copy."""
        parts = [transfer.bytes_of(tensor)[first:last].cpu() for tensor, first, last in self._parts(begin, end)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def room(self, begin: int, end: int) -> Tensor:
        """Return memory for the bytes from `begin` to `end`; give it to `write` when it is filled."""
        parts = self._parts(begin, end)
        if len(parts) == 1:
            tensor, first, last = parts[0]
            return transfer.bytes_of(tensor)[first:last]
        return torch.empty(end - begin, dtype=torch.uint8)

    def write(self, begin: int, piece: Tensor) -> None:
        """Put bytes in place that were written to memory from `room`."""
        parts = self._parts(begin, begin + piece.numel())
        if len(parts) == 1:
            return  # they are in place
        sizes = [last - first for _, first, last in parts]
        for (tensor, first, last), values in zip(parts, torch.split(piece, sizes), strict=True):
            transfer.bytes_of(tensor)[first:last].copy_(values)

    def _parts(self, begin: int, end: int) -> list[tuple[Tensor, int, int]]:
        """Return the tensors of this range of bytes, each with the range in its own bytes."""
        parts = []
        number = bisect.bisect_right(self._ends, begin)
        while begin < end:
            tensor, upto = self.tensors[number], self._ends[number]
            start = upto - tensor.nbytes
            if start < upto:
                parts.append((tensor, begin - start, min(end, upto) - start))
                begin = min(end, upto)
            number += 1
        return parts
