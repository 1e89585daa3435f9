"""Names of trainers: which are allowed, and how one is derived from a script."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection
from pathlib import PurePath

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""The pattern of a trainer's name."""
LIKE_AN_ID = re.compile(r"t[0-9]+")
"""Names that would be taken for ids."""


def default_name(script: str) -> str:
    """Derive a name from a script: its stem, or the last part of a module's name, with only the allowed characters."""
    path = PurePath(script[3:].replace(".", "/") if script.startswith("-m ") else script)
    stem = path.parent.name if path.stem == "__main__" else path.stem
    letters = unicodedata.normalize("NFKD", stem).encode("ascii", "ignore").decode()
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", letters).strip("._-")
    name = plain[:56].rstrip("._-") or "trainer"  # leaves room for an appended number
    return f"trainer-{name}"[:56] if LIKE_AN_ID.fullmatch(name) else name


def free_name(script: str, taken: Collection[str]) -> str:
    """Derive a name from a script that is not taken, with a number if necessary."""
    base = default_name(script)
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base[:58]}-{number}"
    return name
