"""Lists the files below a folder, for the controller and for clients: names, sizes and times."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bftrainer.util.text import natural

_BEING_WRITTEN = re.compile(r"\..+\.[0-9]+-[0-9a-f]{8}\.tmp")
"""Names of the temporary files that `files.replacing` writes."""


class ListedFile(NamedTuple):
    """A file below a folder."""

    name: str
    """Its path from the folder, with slashes."""
    bytes: int
    time: float
    """When it was written last, in seconds since 1970."""


def list_files(folder: Path, most: int | None = None) -> tuple[list[ListedFile], bool]:
    """Return the files below a folder in the order of their names, and whether these are all: at most `most`.

    Links, and files that are being written by `files.replacing`, are left out. A folder below that cannot be read is
    left out too; if the folder itself cannot be read, this raises `OSError`.
    """
    found: list[ListedFile] = []
    for listed in _walk(os.fspath(folder), ""):
        if len(found) == most:
            return found, False
        found.append(listed)
    return found, True


def _walk(folder: str, prefix: str) -> Iterator[ListedFile]:
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: natural(entry.name))
    for entry in found:
        with suppress(OSError):  # it has gone meanwhile, or may not be read
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path, f"{prefix}{entry.name}/")
            elif entry.is_file(follow_symlinks=False) and not _BEING_WRITTEN.fullmatch(entry.name):
                facts = entry.stat(follow_symlinks=False)
                yield ListedFile(prefix + entry.name, facts.st_size, facts.st_mtime)
