"""Meetings of a group's ranks through its store instead of a collective.

The ranks that hold the state meet at the end of an epoch, in `run.evaluate` and in `run.share`. A meeting can wait for
hours without occupying the device, and it can leave out newcomers. Ranks that are at different points of the script get
an error, where a collective would hang or end the process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from bftrainer.elastic.torch.group.group import breaking
from bftrainer.elastic.torch.group.sealed_store import SealedStore
from bftrainer.errors import InputError

_SLICE = timedelta(seconds=0.1)
"""How long to wait before checking whether the peers are still there."""
_DOUBT_S = 1.5
"""Seconds after which a waiting rank checks where the others are, and after as long again checks once more."""
_ALL_HERE, _NOT_ALIKE, _THEN = b"+", b"-", b"\0"
Judge = Callable[[list[bytes]], bytes]
"""Computes one value from all ranks' notes, in the order of ranks, or raises an InputError."""


class Meetings:
    """Successive meetings of some ranks of one generation. All of these ranks create it at the same point.

    `series` distinguishes these meetings from others of the generation. `check` raises when the group is broken.
    """

    def __init__(
        self, store: SealedStore, rank: int, ranks: Sequence[int], check: Callable[[], None], series: str
    ) -> None:
        self._store = store
        self._rank = rank
        self._ranks = tuple(ranks)
        self._check = check
        self._series = series
        self._number = 0
        self._before = ""  # the meeting before the present one

    @property
    def leads(self) -> bool:
        """Whether this rank leads: all ranks get its value."""
        return self._rank == self._ranks[0]

    def meet(self, point: str, value: bytes = b"", note: bytes = b"", judge: Judge | None = None) -> bytes:
        """Wait for all ranks to reach `point`. Return the leader's value, or the leader's verdict on all ranks' notes.

        Raises `GroupBroken` when a peer is lost. Raises an InputError on all ranks when they are not at the same point
        or when `judge` raises one.
        """
        if len(self._ranks) == 1:
            return value if judge is None else judge([note])
        place, said = self._next(), point.encode() + _THEN + note
        with breaking():
            if not self.leads:
                self._store.set(f"{place}/at/{self._rank}", said)
                return self._answer(place, point)
            try:
                notes = [note, *self._notes(point, self._collect(place, point))]
                value = value if judge is None else judge(notes)
            except InputError as problem:
                self._store.set(f"{place}/done", _NOT_ALIKE + str(problem).encode())
                raise
            self._store.set(f"{place}/done", _ALL_HERE + value)
            return value

    def gather(self, value: bytes, point: str = "a new group") -> list[bytes]:
        """Return the values of all ranks, in the order of ranks."""
        if len(self._ranks) == 1:
            return [value]
        place = self._next()
        with breaking():
            if self.leads:
                values = [value, *self._collect(place, point)]
                table = b"".join(len(one).to_bytes(8, "big") + one for one in values)
                self._store.set(f"{place}/done", _ALL_HERE + table)
            else:
                self._store.set(f"{place}/at/{self._rank}", value)
                values = list(_parts(self._answer(place, point)))
        return values

    def part(self) -> None:
        """Wait until all ranks are here and no other rank needs this rank's store any more."""
        self.meet("parting")
        others = self._ranks[1:]
        with breaking():
            if not self.leads:
                self._store.set(f"{self._series}/bye/{self._rank}", b"")
            elif others:
                self._wait([f"{self._series}/bye/{rank}" for rank in others], "parting")

    def is_waiting(self, step: str) -> None:
        """Tell the others in which step this rank has been waiting for a while; an empty text means in none.

        A watching thread calls this. Two different waits never have the same text.
        """
        with breaking():
            self._store.set(f"where/{self._rank}", step)

    def _next(self) -> str:
        self._number += 1
        return f"{self._series}/{self._number}"

    def _collect(self, place: str, point: str) -> list[bytes]:
        """Wait for all other ranks and return what each has sent."""
        others = self._ranks[1:]
        try:
            self._wait([f"{place}/at/{rank}" for rank in others], point)
        except InputError as problem:
            self._store.set(f"{place}/done", _NOT_ALIKE + str(problem).encode())
            raise
        self._forget_before(place)
        return [self._store.get(f"{place}/at/{rank}") for rank in others]

    def _notes(self, point: str, said: list[bytes]) -> Iterator[bytes]:
        """Yield the notes of the other ranks, which must be at the same point."""
        for rank, words in zip(self._ranks[1:], said, strict=True):
            place, _, note = words.partition(_THEN)
            if place.decode() != point:
                raise _not_alike(self._rank, point, rank, place.decode())
            yield note

    def _forget_before(self, place: str) -> None:
        """Delete the keys of the previous meeting. All ranks have reached this one, so no rank reads them any more."""
        before, self._before = self._before, place
        if before:
            for rank in self._ranks[1:]:
                self._store.delete_key(f"{before}/at/{rank}")
            self._store.delete_key(f"{before}/done")

    def _answer(self, place: str, point: str) -> bytes:
        self._wait([f"{place}/done"], point)
        answer = self._store.get(f"{place}/done")
        if answer.startswith(_NOT_ALIKE):
            raise InputError(answer[1:].decode())
        return answer[1:]

    def _wait(self, keys: list[str], point: str) -> None:
        asked, waiting = time.monotonic(), dict[int, bytes]()
        while not self._store.check(keys):
            self._check()
            with contextlib.suppress(RuntimeError):  # the time slice is over; `check` finds other problems
                self._store.wait(keys, _SLICE)
            if time.monotonic() - asked > _DOUBT_S:
                before, waiting = waiting, self._waiting()
                for rank, step in waiting.items():
                    if before.get(rank) == step and not self._store.check(keys):
                        raise _not_alike(self._rank, point, rank, f"run.step() {step.decode()}")
                asked = time.monotonic()

    def _waiting(self) -> dict[int, bytes]:
        """Return the ranks that wait in a step, with the step.

        A rank seen twice in the same step waits for this rank.
        """
        keys = {rank: f"where/{rank}" for rank in self._ranks if rank != self._rank}
        told = {rank: self._store.get(key) for rank, key in keys.items() if self._store.check([key])}
        return {rank: step for rank, step in told.items() if step}


def _parts(table: bytes) -> Iterator[bytes]:
    begin = 0
    while begin < len(table):
        end = begin + 8 + int.from_bytes(table[begin : begin + 8], "big")
        yield table[begin + 8 : end]
        begin = end


def _not_alike(rank: int, point: str, other: int, place: str) -> InputError:
    return InputError(
        f"the ranks are at different points of the script: rank {rank} is at {point}, rank {other} at {place}. "
        "run.evaluate(), run.share() and the end of the loop over the batches must be reached by all ranks in the "
        "same step: decide by run.progress or by what run.share() gave, not by time, rank or a counter of your own"
    )
