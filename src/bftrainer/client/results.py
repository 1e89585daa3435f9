"""Results of a trainer as a client sees them: its last metrics, and its output folder, if it can be read from here.

The controller lists the folder. Whether this machine sees the same folder is found out here: a path may mean another
folder on another machine.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.wire.api import ResultsView
from bftrainer.elastic.metrics import Position
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.util.files import replacing
from bftrainer.util.folders import list_files

_SAME_TIME_S = 1.0
"""Times of one file on two machines differ by less: file systems round them."""


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A file in a trainer's output folder."""

    name: str
    """Its path from the folder."""
    bytes: int
    time: float
    """When it was written last, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class TrainerResults:
    """What a trainer has to show so far."""

    id: str
    name: str
    state: str
    reason: str
    started: float | None
    ended: float | None
    epoch: int
    step: int
    samples: int
    metrics: Mapping[str, float]
    """The last value of each metric."""
    at: Mapping[str, Position]
    """Position (epoch, step, samples) of each metric."""
    host: str
    """The controller's machine."""
    folder: Path
    """The output folder, as the controller's machine and the nodes name it."""
    exists: bool
    """Whether the controller can read the folder."""
    files: tuple[ResultFile, ...]
    """The files in the folder, as the controller sees them. Links are left out."""
    complete: bool
    """Whether `files` has all of them; very many are not listed."""
    problem: str
    """Why the files cannot be read from this machine; empty if they can, or if there are none."""

    @property
    def finished(self) -> bool:
        """Whether the trainer has ended."""
        return self.state in FINISHED

    def path(self, name: str) -> Path:
        """Return the path of a file of this name. Raises an error if it is not there, or not readable from here."""
        if self.problem:
            raise BFTrainerError(self.problem)
        path = self.folder / name
        if not path.is_file():
            has = ", ".join(file.name for file in self.files[:10]) or "no files"
            raise InputError(f"{self.name} ({self.id}) has no file {name!r:.80} in {self.folder}; there are: {has}")
        return path

    def copy(self, to: str | Path, *, force: bool = False) -> list[Path]:
        """Copy all files to a folder, which is made if it is missing, and return the paths of the copies.

        Files that exist there are refused before anything is copied, unless `force` says to replace them. Each copy is
        written completely or not at all.
        """
        if self.problem:
            raise BFTrainerError(self.problem)
        target = Path(to)
        names = [file.name for file in (list_files(self.folder)[0] if self.files else ())]
        there = [name for name in names if os.path.lexists(target / name)]
        if there and not force:
            raise InputError(
                f"{target / there[0]} exists{f', and {len(there) - 1} more' if len(there) > 1 else ''}: choose another "
                "folder, or replace files with --force (force=True)"
            )
        return [_copied(self.folder / name, target / name) for name in names]


def _copied(source: Path, copy: Path) -> Path:
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as file, replacing(copy, "wb") as out:
            shutil.copyfileobj(file, out, 1 << 20)
        shutil.copystat(source, copy)
    except FileNotFoundError:
        raise BFTrainerError(f"{source} is gone: the trainer has removed it meanwhile; try again") from None
    except OSError as problem:
        raise BFTrainerError(f"{source} cannot be copied to {copy}: {problem.strerror or problem}") from None
    return copy


def read_results(view: ResultsView, here: str | None = None) -> TrainerResults:
    """Make the results of the controller's answer, and look whether this machine (`here`) can read the files."""
    return TrainerResults(
        id=view["id"],
        name=view["name"],
        state=view["state"],
        reason=view["reason"],
        started=view["started"],
        ended=view["ended"],
        epoch=view["epoch"],
        step=view["step"],
        samples=view["samples"],
        metrics={name: math.nan if value is None else float(value) for name, value in view["metrics"].items()},
        at={name: Position(**place) for name, place in view["metrics_at"].items()},
        host=view["host"],
        folder=Path(view["folder"]),
        exists=view["exists"],
        files=tuple(ResultFile(**file) for file in view["files"]),
        complete=view["complete"],
        problem=_problem(view, socket.gethostname() if here is None else here),
    )


def _problem(view: ResultsView, here: str) -> str:
    host, folder = view["host"], Path(view["folder"])
    if view["problem"]:
        return f"the controller on {host} cannot read {folder}: {view['problem']}"
    if not view["files"]:
        return ""
    elsewhere = (
        f"{here} does not see the files: they are in {folder} on {host}. Run this command there, or copy them: "
        f"scp -r {host}:{folder} ."
    )
    try:
        seen = {file.name: file for file in list_files(folder)[0]}
    except PermissionError:
        return f"you may not read {folder} on {here}: ask its owner, or have the script write to a folder of yours"
    except OSError:
        return elsewhere
    same = (
        seen[file["name"]].bytes == file["bytes"] and abs(seen[file["name"]].time - file["time"]) < _SAME_TIME_S
        for file in view["files"]
        if file["name"] in seen
    )
    return "" if host == here or any(same) else elsewhere
