"""Text helpers: text from outside made safe to store and show, single lines of it, and the order of names."""

from __future__ import annotations

import re
from functools import lru_cache

_SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)\s*([kMGT]?B)", re.IGNORECASE)
_SPAN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhdw])")
_SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_DIGITS = re.compile(r"0*([0-9]+)")


def text(found: str) -> str:
    """Return text that can be stored. File names and output may contain bytes that are no characters."""
    return found if found.isascii() else found.encode(errors="backslashreplace").decode()


def one_line(message: object) -> str:
    """Return a message as one line: every run of white space becomes one space."""
    return " ".join(str(message).split())


def printable_line(message: object, most: int) -> str:
    """Return a message of an untrusted sender as one line of at most `most` characters, without control characters."""
    line = one_line(str(message)[: most * 4])[:most]
    return "".join(character if character.isprintable() else "?" for character in line)


def short_repr(value: object) -> str:
    """Return how Python writes a value, in at most 80 characters."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:79] + "…"


def last_line(output: str) -> str:
    """Return the last line that is not blank, without the white space around it; empty if there is none."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


@lru_cache(maxsize=1 << 17)
def natural(name: str) -> str:
    """A sort key that puts n2 before n10: every number is prefixed by its length. The name itself tells n1 from n01."""
    return _DIGITS.sub(lambda number: f"{len(number[1]):03}{number[1]}", name) + "\0" + name


def size_as_text(size: float) -> str:
    """Return a number of bytes for people, such as `12.5 GB`."""
    unit = next((unit for unit, factor in reversed(_SIZES.items()) if size >= factor), "B")
    return f"{size / _SIZES[unit]:.3g} {unit}" if size < 999.5 * _SIZES[unit] else f"{size / _SIZES[unit]:,.0f} {unit}"


def read_size(given: str) -> int | None:
    """Parse a size such as `500GB`. Returns the bytes, or None if it is none."""
    found = _SIZE.fullmatch(given.strip())
    if found is None:
        return None
    units = {unit.lower(): factor for unit, factor in _SIZES.items()}
    return round(float(found[1]) * units[found[2].lower()])


def read_span(given: str) -> float | None:
    """Parse a span of time such as `4w`, `30d`, `12h`, `90m` or `45s`. Returns the seconds, or None if it is none."""
    found = _SPAN.fullmatch(given.strip())
    return None if found is None else float(found[1]) * _SPANS[found[2]]
