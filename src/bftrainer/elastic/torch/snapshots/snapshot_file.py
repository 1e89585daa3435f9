"""Snapshot file: writes a state to one file and reads it back, or says what is wrong with the file.

The file is a header of fixed width (`snapshot_header.py`), followed by the output of `torch.save`. No byte of the file
can be lost or changed unnoticed. `snapshot.py` uses it for all reading and writing. Nothing that is read can run code.
"""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from bftrainer.elastic.snapshot_header import HEADER, Lineage, check, header
from bftrainer.elastic.torch.snapshots.portable import restored
from bftrainer.errors import BFTrainerError, InputError


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A state to resume from, with its tensors in CPU memory."""

    step: int
    path: Path
    state: dict[str, Any]


def file_name(step: int) -> str:
    """Return the name of a complete snapshot of a step."""
    return f"snapshot-{step:012d}.bft"


def reason(problem: Exception) -> str:
    """Describe a problem in one line, without parts that differ from try to try, such as names of temporary files."""
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    line = next(iter(str(problem).splitlines()), "")
    return line if isinstance(problem, BFTrainerError) else f"{type(problem).__name__}: {line}"


def write(path: Path, step: int, state: dict[str, Any], lineage: Lineage = Lineage()) -> None:  # noqa: B008 - a value
    """Write a new file and flush it to the disk."""
    with path.open("xb") as out:
        out.write(bytes(HEADER))
        sink = _Sink(out)
        torch.save(state, cast("IO[bytes]", sink))
        if sink.problem is not None:
            raise OSError(*sink.problem)
        out.seek(0)
        out.write(header(step, sink.length, sink.digest.hexdigest(), lineage))
        out.flush()
        os.fsync(out.fileno())


def read(path: Path, step: int | None = None) -> Snapshot:
    """Return the snapshot in a file, or raise an error that says what is wrong with it.

    If `step` is given, the snapshot must be of that step.
    """
    with path.open("rb") as source:
        meta = check(source, step)
        source.seek(HEADER)
        try:
            state = restored(torch.load(source, weights_only=True, map_location="cpu"))
        except Exception as problem:  # the file is complete: another torch wrote it, or memory is short
            lines = str(problem).splitlines() or [""]
            line = next((line for line in lines if "Unpickler error" in line), lines[0]).strip()
            raise InputError(f"torch {torch.__version__} cannot load it ({type(problem).__name__}: {line})") from None
    return Snapshot(meta["step"], path, state)


class _Sink:
    """Passes on what `torch.save` writes and keeps its length and checksum.

    It catches errors and keeps them in `problem`: raised through torch's zip writer they would become another error.
    """

    def __init__(self, out: IO[bytes]) -> None:
        self.out = out
        self.length = 0
        self.digest = hashlib.sha256()
        self.problem: tuple[int, str] | None = None

    def write(self, data: memoryview) -> int:
        if self.problem is None:
            try:
                self.out.write(data)
            except OSError as problem:
                self.problem = (problem.errno or errno.EIO, problem.strerror or str(problem))
            self.digest.update(data)
            self.length += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is flushed once its header is filled in."""
