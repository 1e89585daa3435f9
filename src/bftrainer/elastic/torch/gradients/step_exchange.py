"""Step exchange: numbers of each rank that all ranks get along with the gradients of a step.

A framework reports values of a whole batch, of which each rank computes a part. Each rank has numbers under names:
values that it logged, states of its metrics. Usually all ranks have the same names, and few numbers: one sum, which is
sent together with the gradients, is enough then. Each rank has a place of its own in it, so all ranks see all numbers.
If a rank has other names than the others, or many numbers, more sums follow.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Sums = Callable[[Sequence[float]], list[float] | None]
"""Returns sums over all ranks; None if a peer was lost."""
Numbers = Mapping[str, Sequence[float]]
"""Numbers of one rank, by name."""
Sizes = Sequence[tuple[str, int]]
"""Names, each with how many numbers it has."""

_HEADER = 3
"""Numbers that come first: a checksum of the names, the number of numbers, the length of the names."""
_FIRST = 32
"""Numbers that are sent with the header."""


class StepExchange:
    """One rank's numbers for a step, and those of all ranks when the gradients are summed."""

    def __init__(self, numbers: Numbers, rank: int, world: int) -> None:
        self.numbers: list[Numbers] | None = [numbers] if world == 1 else None
        """Numbers of all ranks, in the order of ranks, when they are known."""
        self._rank = rank
        self._world = world
        self._sizes = tuple((name, len(values)) for name, values in numbers.items())
        self._names = _written(self._sizes)
        self._flat = [float(value) for values in numbers.values() for value in values]

    @property
    def row(self) -> list[float]:
        """What is summed over the ranks along with the gradients."""
        header = [float(zlib.crc32(self._names)), float(len(self._flat)), float(len(self._names))]
        return self._placed([*header, *_padded(self._flat[:_FIRST], _FIRST)])

    def take(self, sums: Sequence[float], sum_up: Sums) -> bool:
        """Take the sums of `row`. `sum_up` makes further ones. Return False if a peer was lost meanwhile."""
        begun = self._rows(sums)
        checksums, counts, lengths = ([row[place] for row in begun] for place in range(_HEADER))
        sizes: list[Sizes] = [self._sizes] * self._world
        if len(set(checksums)) > 1:
            rows = self._gathered(_padded([*map(float, self._names)], int(max(lengths))), sum_up)
            if rows is None:
                return False
            sizes = [json.loads(bytes(map(int, row[: int(n)]))) for row, n in zip(rows, lengths, strict=True)]
        rest: list[list[float]] | None = [[] for _ in begun]
        more = int(max(counts)) - _FIRST
        if more > 0:
            rest = self._gathered(_padded(self._flat[_FIRST:], more), sum_up)
        if rest is None:
            return False
        firsts = [row[_HEADER:] for row in begun]
        self.numbers = [_named(size, [*first, *last]) for size, first, last in zip(sizes, firsts, rest, strict=True)]
        return True

    def _gathered(self, row: list[float], sum_up: Sums) -> list[list[float]] | None:
        """Return the rows of all ranks, which are equally long."""
        sums = sum_up(self._placed(row))
        return None if sums is None else self._rows(sums)

    def _placed(self, row: list[float]) -> list[float]:
        """Return this rank's row at its place among those of all ranks."""
        size = len(row)
        return [0.0] * (self._rank * size) + row + [0.0] * ((self._world - self._rank - 1) * size)

    def _rows(self, sums: Sequence[float]) -> list[list[float]]:
        size = len(sums) // self._world
        return [list(sums[rank * size : (rank + 1) * size]) for rank in range(self._world)]


class StepNumbers:
    """Numbers of all ranks of the last step, as a part of the state: a rank that missed the step gets them with it."""

    def __init__(self) -> None:
        self._step = 0
        self._numbers: list[Numbers] = []

    def made(self, step: int, numbers: list[Numbers] | None) -> None:
        """Note the numbers of a step that is summed. Steps are counted from 1."""
        self._step, self._numbers = step, numbers or []

    def of(self, step: int) -> list[Numbers] | None:
        """Return the numbers of a step; None if they are those of another one."""
        return self._numbers if step == self._step else None

    def as_state(self) -> dict[str, Any]:
        """Return the numbers as plain values."""
        return {"step": self._step, "numbers": self._numbers}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over the numbers of another rank; none if a snapshot has none."""
        self._step, self._numbers = state.get("step", 0), state.get("numbers", [])


def _padded(row: list[float], size: int) -> list[float]:
    return row + [0.0] * (size - len(row))


@functools.lru_cache(maxsize=64)  # most steps have the same names
def _written(sizes: Sizes) -> bytes:
    return json.dumps(sizes).encode()


def _named(sizes: Sizes, flat: list[float]) -> dict[str, list[float]]:
    named, place = {}, 0
    for name, size in sizes:
        named[name] = flat[place : place + size]
        place += size
    return named
