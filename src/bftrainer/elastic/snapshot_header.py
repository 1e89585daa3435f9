"""Snapshot headers: which workers wrote a snapshot, and which of several is the one to resume from.

It needs no PyTorch: the controller asks too, before it removes old snapshots.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from bftrainer.elastic.leftovers import SNAPSHOT_FILE

HEADER = 512
"""Bytes before the payload: one line of fixed width, because it is filled in after the payload is written."""

NAME = "bftrainer-snapshot "
MAGIC = f"{NAME}1 ".encode()
"""First bytes of every file; the number is the version of the format."""

WIDTH = HEADER - len(MAGIC) - 64 - len(" ") - len("\n")
"""Bytes of the header that hold its JSON."""


class Lineage(NamedTuple):
    """Which workers wrote a snapshot: later ones are greater. See `lease.py`."""

    term: int = 0
    """How often the folder was taken over: by another trainer, or after the restore of a back-up."""
    generation: int = 0


def in_folder(folder: Path) -> list[tuple[int, Path]]:
    """Return the snapshots in `folder` by step, complete or not."""
    return sorted((int(match[1]), path) for path in folder.iterdir() if (match := SNAPSHOT_FILE.fullmatch(path.name)))


def lineage_of(path: Path) -> Lineage:
    """Return the lineage that a snapshot's header names; the lowest if it names none or cannot be read."""
    try:
        with path.open("rb") as source:
            meta = json.loads(source.read(HEADER)[-1 - WIDTH : -1])
        return Lineage(int(meta.get("term", 0)), int(meta.get("generation", 0)))
    except (OSError, ValueError, TypeError, AttributeError):
        return Lineage()


def by_lineage(folder: Path) -> list[tuple[Lineage, int, Path]]:
    """Return the snapshots in `folder`, complete or not: the one to resume from is the last."""
    return sorted((lineage_of(path), step, path) for step, path in in_folder(folder))
