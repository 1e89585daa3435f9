"""Text helpers: text from outside made safe to store and show, single lines of it, and the order of names."""

from __future__ import annotations

import re
from functools import lru_cache

_DIGITS = re.compile(r"0*([0-9]+)")


def text(found: str) -> str:
    """Return text that can be stored. File names and output may contain bytes that are no characters."""
    return found if found.isascii() else found.encode(errors="backslashreplace").decode()


def one_line(message: object) -> str:
    """Return a message as one line: every run of white space becomes one space."""
    return " ".join(str(message).split())


def last_line(output: str) -> str:
    """Return the last line that is not blank, without the white space around it; empty if there is none."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


@lru_cache(maxsize=1 << 17)
def natural(name: str) -> str:
    """A sort key that puts n2 before n10: every number is prefixed by its length. The name itself tells n1 from n01."""
    return _DIGITS.sub(lambda number: f"{len(number[1]):03}{number[1]}", name) + "\0" + name
