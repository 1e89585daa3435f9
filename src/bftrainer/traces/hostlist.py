"""Slurm's compact host lists, such as `cpn-f[15-17,19],gpu01`, expanded to node names."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from itertools import product

LIMIT = 1_000_000
"""More names than this in one list is a damaged line, not a job."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@lru_cache(maxsize=2048)
def expand(text: str) -> tuple[str, ...]:
    """The node names in `text`, in order, each once. ValueError when it is no host list."""
    names: dict[str, None] = {}
    for term in split_terms(text):
        for name in _expand_term(term):
            names[sys.intern(name)] = None
            if len(names) > LIMIT:
                raise ValueError("host list names over a million nodes")
    return tuple(names)


def split_terms(text: str) -> Iterator[str]:
    """The terms of a host list: what stands between the commas outside brackets."""
    depth = start = 0
    for i, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:i]
            start = i + 1
        if depth not in (0, 1):
            raise ValueError(f"brackets do not match in host list {text[:60]!r}")
    if depth:
        raise ValueError(f"brackets do not match in host list {text[:60]!r}")
    yield text[start:]


def _expand_term(term: str) -> Iterator[str]:
    """The names of one term, which may hold several brackets: `rack[1-2]n[01-04]`."""
    if not term or any(c.isspace() for c in term):
        raise ValueError(f"not a node name: {term[:60]!r}")
    if "[" not in term:
        return iter((term,))
    literals = re.split(r"\[[^]]*\]", term)
    choices = [_numbers(body) for body in re.findall(r"\[([^]]*)\]", term)]
    total = 1
    for choice in choices:
        total *= len(choice)
        if total > LIMIT:
            raise ValueError("host list names over a million nodes")
    return (
        "".join(part for pair in zip(literals, (*numbers, ""), strict=True) for part in pair)
        for numbers in product(*choices)
    )


def _numbers(body: str) -> list[str]:
    """The numbers of one bracket, with their leading zeros: `01-03,7` is 01, 02, 03, 7."""
    numbers: list[str] = []
    for part in body.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or len(part) > 40:
            raise ValueError(f"not a range of node numbers: {part[:60]!r}")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low) or int(high) - int(low) >= LIMIT:
            raise ValueError(f"not a range of node numbers: {part!r}")
        numbers.extend(str(n).zfill(len(low)) for n in range(int(low), int(high) + 1))
    return numbers
