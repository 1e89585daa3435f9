"""`DiskSurvey` finds the trainers that have files, measures them, and removes what the rules choose.

It runs in a thread, because file systems may be slow, and reads the database on a connection of its own. `Housekeeper`
uses it beside the controller, `bftrainer prune` without one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from bftrainer.cluster.launchers.base import StateLayout
from bftrainer.cluster.retention.files import (
    LOGS,
    TrainerFiles,
    empty_aside,
    measure,
    older_snapshots,
    put_aside,
    remove_files,
)
from bftrainer.cluster.retention.rules import Removal, TrainerDisk
from bftrainer.cluster.store.store import Store
from bftrainer.util import ids

MEASURE_AGAIN_S = 86400.0
"""How long the size of a finished trainer's files is taken as known. Only their owner can change it meanwhile."""


class Removed(NamedTuple):
    """The outcome of a removal. `problem` is empty if all went well."""

    removal: Removal
    problem: str


class DiskSurvey:
    """The files of the trainers in one state folder. Its methods may be called from any thread, one at a time."""

    def __init__(self, state: Path, database: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._database = database
        self._layout = StateLayout(state, "")
        self._clock = clock
        self._known: dict[str, tuple[float, TrainerFiles]] = {}
        """When the files of finished trainers were measured, and their sizes."""
        self._turn = threading.Lock()

    def disks(self, unfinished: Collection[str] = (), only: Collection[str] | None = None) -> list[TrainerDisk]:
        """Return the trainers that have a folder, or those of `only`, with the sizes of their files.

        `unfinished` are trainers that a controller still handles, though their state may be final.
        """
        with self._turn, Store.open(self._database, read_only=True) as store:
            folders = self.folders()
            rows = store.totals.ends(folders if only is None else [each for each in folders if each in only])
            disks = [
                TrainerDisk(
                    id_, name, owner, None if id_ in unfinished else ended, self._measured(id_, finished=bool(ended))
                )
                for id_, name, owner, ended in rows
            ]
            self._known = {id_: known for id_, known in self._known.items() if id_ in set(folders)}
        return disks

    def folders(self) -> list[str]:
        """Return the ids of the trainers that have a folder."""
        try:
            return [path.name for path in (self._state / "trainers").iterdir() if ids.is_trainer_id(path.name)]
        except FileNotFoundError:
            return []

    def carry_out(self, removals: Iterable[Removal]) -> list[Removed]:
        """Remove files. A removal that fails in part is told, and does not stop the others."""
        with self._turn:
            return [Removed(removal, self._remove(removal)) for removal in removals]

    def free(self) -> None:
        """Delete the folders that removals have put aside. It may take minutes."""
        empty_aside(self._state / "trainers")

    def _remove(self, removal: Removal) -> str:
        folder = self._layout.folder(removal.trainer.id)
        self._known.pop(removal.trainer.id, None)
        match removal.part:
            case "older snapshots":
                older = older_snapshots(folder, payload=True)
                return remove_files(older) if older else f"{folder}: the newer snapshots are damaged or unreadable"
            case "log":
                return remove_files(folder / name for name in LOGS)
            case "all files":
                return put_aside(folder)

    def _measured(self, trainer: str, *, finished: bool) -> TrainerFiles:
        now, known = self._clock(), self._known.get(trainer)
        if finished and known is not None and now - known[0] < MEASURE_AGAIN_S:
            return known[1]
        files = measure(self._layout.folder(trainer))
        if finished:
            self._known[trainer] = (now, files)
        return files
