"""Work that the ranks share outside of steps, such as an evaluation: each item is computed on one of them.

The ranks meet, so that all know which results each one has, and compute what is missing. Then they send their results
to each other, and meet again. If a rank was lost since the first meeting, they begin again with the results they have:
only those of the lost rank are computed anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bftrainer.elastic.torch.group.group import GroupBroken
from bftrainer.elastic.torch.loop import TrainingLoop
from bftrainer.elastic.torch.meetings.shared_values import packed
from bftrainer.elastic.torch.meetings.together import Note
from bftrainer.elastic.torch.member import TrainingMember
from bftrainer.elastic.torch.state.transfer import broadcast

_BROKEN = -1
"""In place of a generation: a rank could not send or receive all results."""


class SharedWork:
    """Divides work over the ranks that hold the state."""

    def __init__(self, member: TrainingMember, loop: TrainingLoop) -> None:
        self._member = member
        self._loop = loop

    def divide(self, what: str, count: int, compute: Callable[[list[int]], Mapping[int, Any]]) -> list[Any]:
        """Return the results of `count` items on every rank. `compute` makes those of the items it is given."""
        results: dict[int, Any] = {}
        while True:
            begun = self._begin(what, results)
            # A rank that missed the end of that meeting, because a peer was lost, is in a later generation.
            made_in = begun["generation"] if begun["generation"] == self._member.meter.generation else _BROKEN
            if made_in != _BROKEN and not self._make(begun["held"], count, results, compute):
                made_in = _BROKEN
            if self._end(what, made_in):
                return [results[number] for number in range(count)]

    def _begin(self, what: str, results: Mapping[int, Any]) -> dict[str, Any]:
        """Meet, and return which results each rank has, in which generation."""

        def judge(notes: list[bytes]) -> bytes:
            held = [json.loads(note) for note in notes]
            return packed({"generation": self._member.meter.generation, "held": held}, what)

        note = Note(lambda: json.dumps(sorted(results)).encode(), judge)
        begun: dict[str, Any] = self._loop.meet(f"the start of {what}", lambda: None, note)
        return begun

    def _end(self, what: str, made_in: int) -> bool:
        """Meet, and return whether all ranks have all results and none was lost since the work began."""

        def judge(notes: list[bytes]) -> bytes:
            return packed({int(note) for note in notes} == {self._member.meter.generation}, what)

        return bool(self._loop.meet(f"the end of {what}", lambda: None, Note(lambda: b"%d" % made_in, judge)))

    def _make(
        self,
        held: Sequence[Sequence[int]],
        count: int,
        results: dict[int, Any],
        compute: Callable[[list[int]], Mapping[int, Any]],
    ) -> bool:
        """Compute this rank's part and exchange all results. Return False if a peer was lost."""
        member = self._member
        if member.world == 1 or member.state.owes:
            # Newcomers in the group wait for the state, and take no part in an exchange: each rank computes all.
            results.update(compute([number for number in range(count) if number not in results]))
            return True
        owners = owners_of(count, held)
        results.update(compute([n for n, owner in enumerate(owners) if owner == member.rank and n not in results]))
        own = {number: results[number] for number, owner in enumerate(owners) if owner == member.rank}
        try:
            for source in range(member.world):
                sent = {"results": own} if source == member.rank else None
                results.update(broadcast(sent, source, member.peers)["results"])
        except GroupBroken as problem:
            member.recover_inside(problem)
            return False
        return True


def owners_of(count: int, held: Sequence[Sequence[int]]) -> list[int]:
    """Return the rank that provides each item: one that has it, or else the ranks in turn. `held` is by rank."""
    owners: dict[int, int] = {}
    for rank, numbers in enumerate(held):
        for number in numbers:
            owners.setdefault(number, rank)
    missing = [number for number in range(count) if number not in owners]
    owners |= {number: turn % len(held) for turn, number in enumerate(missing)}
    return [owners[number] for number in range(count)]
