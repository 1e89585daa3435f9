"""Host lists: parses Slurm's compact node lists, such as `cpn-f[15-17,19],gpu01`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import lru_cache

LIMIT = 1_000_000
"""Most names in one list: a list with more is a damaged line, not a job."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_BRACKET = re.compile(r"\[([^]]*)\]")
_SPACE = re.compile(r"\s")


@lru_cache(maxsize=4096)
def expand(text: str) -> tuple[str, ...]:
    """The node names in `text`, in order, each once. Raises ValueError if `text` is no host list."""
    if not text or _SPACE.search(text):
        raise ValueError(f"not a host list: {text[:60]!r}")
    names: list[str] = []
    for term in split_terms(text) if "[" in text or "]" in text else text.split(","):
        if not term:
            raise ValueError(f"a name is missing in host list {text[:60]!r}")
        names += _expand_term(term) if "[" in term else (term,)
        if len(names) > LIMIT:
            raise ValueError("host list names over a million nodes")
    return tuple(dict.fromkeys(map(sys.intern, names)))


def split_terms(text: str) -> Iterator[str]:
    """The terms of a host list: the texts between commas outside brackets."""
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


def _expand_term(term: str) -> list[str]:
    """The names of one term, which may hold several brackets: `rack[1-2]n[01-04]`."""
    head, *rest = _BRACKET.split(term)  # text, then bodies of brackets and texts in turn
    names = [head]
    for body, after in zip(rest[::2], rest[1::2], strict=True):
        numbers = _numbers(body)
        if len(names) * len(numbers) > LIMIT:
            raise ValueError("host list names over a million nodes")
        names = [f"{name}{number}{after}" for name in names for number in numbers]
    return names


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
        width = len(low)
        numbers += [f"{n:0{width}}" for n in range(int(low), int(high) + 1)]
    return numbers
