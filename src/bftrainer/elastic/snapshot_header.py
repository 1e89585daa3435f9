"""Snapshot headers: which workers wrote a snapshot, whether it is whole, and which of several is to be resumed from.

The header holds the length and the checksum of the payload and begins with a checksum of itself.

It needs no PyTorch: the controller asks too, before it removes old snapshots.
"""

from __future__ import annotations

import hashlib
import json
import os
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from bftrainer import __version__
from bftrainer.elastic.leftovers import SNAPSHOT_FILE
from bftrainer.errors import InputError

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


def header(step: int, length: int, digest: str, lineage: Lineage) -> bytes:
    """Return the header of a payload of so many bytes with a SHA-256."""
    written = datetime.now(UTC).isoformat(timespec="seconds")
    meta = {"step": step, "length": length, "sha256": digest, "written": written, "bftrainer": __version__}
    if lineage != Lineage():
        meta |= lineage._asdict()
    text = json.dumps(meta).encode().ljust(WIDTH)
    assert len(text) == WIDTH
    return _sealed(text)


def check(source: BufferedReader, step: int | None = None, *, payload: bool = True) -> dict[str, Any]:
    """Return what the header of an open snapshot says, or raise `InputError` that says what is wrong with the file.

    If `step` is given, the snapshot must be of that step. Without `payload` only its length is checked, not its bytes.
    """
    head = source.read(HEADER)
    if head and not head.startswith(NAME.encode()[: len(head)]):
        raise InputError("it does not begin with a snapshot header")
    if len(head) < HEADER:
        raise InputError(f"it is cut short: {len(head)} bytes, less than its header")
    if not head.startswith(MAGIC):
        raise InputError(f"BFTrainer {__version__} does not support its format {head[len(NAME) :].split()[0]!r}")
    text = head[-1 - WIDTH : -1]
    if head != _sealed(text):
        raise InputError("its header is damaged")
    meta: dict[str, Any] = json.loads(text)
    if step is not None and meta["step"] != step:
        raise InputError(f"it holds step {meta['step']}, not what its name says")
    length = os.fstat(source.fileno()).st_size - HEADER
    if length != meta["length"]:
        raise InputError(f"it has {length} bytes of state where {meta['length']} were written")
    if payload and hashlib.file_digest(source, "sha256").hexdigest() != meta["sha256"]:
        raise InputError("its checksum is wrong: the state in it is damaged")
    return meta


def is_whole(path: Path, step: int, *, payload: bool) -> bool:
    """Return whether a snapshot can be resumed from; see `check`. Raises `OSError` if it cannot be read."""
    try:
        with path.open("rb") as source:
            check(source, step, payload=payload)
    except InputError:
        return False
    return True


def lineage_of(path: Path) -> Lineage:
    """Return the lineage that a snapshot's header names; the lowest if it names none or cannot be read."""
    try:
        return _lineage_in(path)
    except OSError:
        return Lineage()


def by_lineage(folder: Path, *, strict: bool = False) -> list[tuple[Lineage, int, Path]]:
    """Return the snapshots in `folder`, complete or not: the one to resume from is the last.

    `strict`: a file that cannot be read raises `OSError`, and is not taken for one of the lowest lineage.
    """
    read = _lineage_in if strict else lineage_of
    return sorted((read(path), step, path) for step, path in in_folder(folder))


def _lineage_in(path: Path) -> Lineage:
    with path.open("rb") as source:
        head = source.read(HEADER)
    try:
        meta = json.loads(head[-1 - WIDTH : -1])
        return Lineage(int(meta.get("term", 0)), int(meta.get("generation", 0)))
    except (ValueError, TypeError, AttributeError):
        return Lineage()


def _sealed(text: bytes) -> bytes:
    return MAGIC + hashlib.sha256(text).hexdigest().encode() + b" " + text + b"\n"
