"""Exchange of numbers between ranks in the middle of a step, by sums over all ranks.

Each rank has numbers under names: values that it logged, states of its metrics. Usually all ranks have the same names,
and few numbers, so one sum is enough. Each rank has a place of its own in it, so all ranks see all numbers. If a rank
has logged other names than the others, the names are exchanged too.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence

Sums = Callable[[Sequence[float]], list[float] | None]
"""Returns sums over all ranks; None if a peer was lost."""
Numbers = Mapping[str, Sequence[float]]
"""Numbers of one rank, by name."""

_HEADER = 3
"""Numbers that come first: a checksum of the names, the number of numbers, the length of the names."""
_FIRST = 32
"""Numbers that are sent with the header."""


def exchanged(numbers: Numbers, rank: int, world: int, sum_up: Sums) -> list[Numbers] | None:
    """Return the numbers of all ranks, in the order of ranks. None if a peer was lost."""
    if world == 1:
        return [numbers]
    names = json.dumps([[name, len(values)] for name, values in numbers.items()]).encode()
    flat = [float(value) for values in numbers.values() for value in values]
    header = [float(zlib.crc32(names)), float(len(flat)), float(len(names))]
    begun = _gathered([*header, *_padded(flat[:_FIRST], _FIRST)], rank, world, sum_up)
    if begun is None:
        return None
    sums, counts, lengths = ([row[place] for row in begun] for place in range(_HEADER))
    described = [names] * world
    if len(set(sums)) > 1:
        rows = _gathered(_padded([*map(float, names)], int(max(lengths))), rank, world, sum_up)
        if rows is None:
            return None
        described = [bytes(map(int, row[: int(length)])) for row, length in zip(rows, lengths, strict=True)]
    rest: list[list[float]] | None = [[] for _ in range(world)]
    more = int(max(counts)) - _FIRST
    if more > 0:
        rest = _gathered(_padded(flat[_FIRST:], more), rank, world, sum_up)
    if rest is None:
        return None
    firsts = [row[_HEADER:] for row in begun]
    return [_named(text, [*first, *last]) for text, first, last in zip(described, firsts, rest, strict=True)]


def _gathered(row: Sequence[float], rank: int, world: int, sum_up: Sums) -> list[list[float]] | None:
    """Return the rows of all ranks, which are equally long."""
    size = len(row)
    sums = sum_up([0.0] * (rank * size) + list(row) + [0.0] * ((world - rank - 1) * size))
    return None if sums is None else [sums[place * size : (place + 1) * size] for place in range(world)]


def _padded(row: list[float], size: int) -> list[float]:
    return row + [0.0] * (size - len(row))


def _named(described: bytes, flat: list[float]) -> dict[str, list[float]]:
    named, place = {}, 0
    for name, size in json.loads(described):
        named[name] = flat[place : place + size]
        place += size
    return named
