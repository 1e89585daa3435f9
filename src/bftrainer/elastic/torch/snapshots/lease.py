"""Snapshot lease: lets only the newest group of a trainer write snapshots to a folder.

A controller that has lost sight of all workers of a trainer starts others. The first ones may still run, cut off from
the controller but not from the file system. A file beside the snapshots says which trainer writes here and in which
generation. A worker of an older generation is refused. Every snapshot names its lineage, and a training resumes from
the newest lineage, not from the one that made more steps.

A controller whose database was restored from a back-up begins with lower generations than those that were written here.
So workers also know the number of the controller's start that they come from (`start`). Workers of a later start take
the folder over whatever their generation is. Workers that survive a restart go on with those of the later start, as
long as the generations rise.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bftrainer.elastic.snapshot_header import Lineage, in_folder, lineage_of
from bftrainer.errors import BFTrainerError
from bftrainer.util.files import replace_file

FILE = "lease.json"
STALE_S = 3600.0
"""A lease that was not renewed for this long may be taken over: workers without a controller have ended by then."""


class SupersededError(BFTrainerError):
    """Newer workers write snapshots to this folder."""


class _Lease(NamedTuple):
    lineage: Lineage
    owner: str
    start: int
    """The highest start among the workers that wrote the lease."""
    since: int
    """The start of the workers that began the present term. Workers of earlier starts have no part in it."""
    renewed: float


class SnapshotLease:
    """The right of one process to write to a folder. `owner` names its trainer; without one, nothing is refused."""

    def __init__(self, folder: Path, owner: str, clock: Callable[[], float] = time.time, *, start: int = 0) -> None:
        """`start`: the number of the controller's start that this process comes from; 0 if it has none."""
        self.generation = 0
        """The generation that this process trains in."""
        self._path = folder / FILE
        self._owner = owner
        self._clock = clock
        self._start = start
        self._lineage: Lineage | None = None

    def claim(self) -> Lineage:
        """Return the lineage of the snapshots that this process writes from now on.

        Raises `SupersededError` if newer workers write to the folder, and `OSError`.
        """
        found = self._read()
        if not self._owner:
            self._lineage = self._lineage or found.lineage
            return self._lineage
        mine = self._next(found)
        is_new_term = mine.term != found.lineage.term
        since = self._start if is_new_term else found.since
        start = self._start if is_new_term else max(found.start, self._start)
        if (mine, self._owner, start) != (found.lineage, found.owner, found.start):
            row = {**mine._asdict(), "owner": self._owner, "start": start, "since": since}
            replace_file(self._path, json.dumps(row) + "\n")
        else:
            os.utime(self._path)
        self._lineage = mine
        return mine

    def _next(self, found: _Lease) -> Lineage:
        """Return the lineage that follows from the lease in the folder."""
        mine = self._lineage
        if found.owner != self._owner:
            if mine is not None and found.owner:
                raise SupersededError(
                    f"{self._path.parent}: another trainer writes its snapshots to this folder by now; "
                    "give each trainer a folder of its own"
                )
            if mine is not None and Lineage(mine.term, self.generation) < found.lineage:
                raise self._superseded(found)
            return Lineage(found.lineage.term + 1, self.generation)
        is_of_term = self._start >= found.since and (mine is None or mine.term == found.lineage.term)
        if is_of_term and self.generation >= found.lineage.generation:
            return Lineage(found.lineage.term, self.generation)
        is_later = self._start > found.start and self.generation > 0
        if is_later or (mine is None and self._clock() - found.renewed > STALE_S):
            return Lineage(found.lineage.term + 1, self.generation)
        raise self._superseded(found)

    def _superseded(self, found: _Lease) -> SupersededError:
        return SupersededError(
            f"{self._path.parent}: newer workers of this trainer write snapshots here (generation "
            f"{found.lineage.generation}); this worker is of generation {self.generation}, is no longer needed and "
            "writes none"
        )

    def _read(self) -> _Lease:
        """Return the lease in the folder. A missing or damaged one is derived from the snapshots."""
        try:
            row = json.loads(self._path.read_text())
            lineage = Lineage(int(row["term"]), int(row["generation"]))
            start, since = int(row.get("start", 0)), int(row.get("since", 0))
            return _Lease(lineage, str(row["owner"]), start, since, self._path.stat().st_mtime)
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, AttributeError):  # damaged
            pass
        try:
            found = [lineage_of(path) for _, path in in_folder(self._path.parent)]
        except FileNotFoundError:
            found = []
        return _Lease(max(found, default=Lineage()), "", 0, 0, 0.0)
