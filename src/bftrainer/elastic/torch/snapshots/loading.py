"""Loading of snapshots outside training: to inspect one, evaluate its model, or continue from it.

Users call `load_snapshot`, exported by `bftrainer.elastic`. It needs no `init` and runs no code from the file.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bftrainer.elastic.torch.snapshots import snapshot_file
from bftrainer.elastic.torch.snapshots.snapshot import Snapshots, SnapshotWarning
from bftrainer.elastic.torch.snapshots.snapshot_file import Snapshot, reason
from bftrainer.errors import InputError


class LoadedSnapshot(Mapping[str, Any]):
    """The state of a training: what each registered object's `state_dict()` returned, by the names of `run.register`.

    Made by `load_snapshot`. Pass `snapshot["model"]` to the model's `load_state_dict`. Tensors are in CPU memory.
    """

    def __init__(self, found: Snapshot) -> None:
        progress: Mapping[str, Any] = found.state.get("progress", {})
        self.path = found.path
        """The snapshot's file."""
        self.step = found.step
        """Steps made in total."""
        self.epoch = int(progress.get("epoch", 0))
        """The epoch in progress, from 0. This is also the number of complete epochs."""
        self.samples = int(progress.get("samples", 0))
        """Samples trained on in total."""
        reported: Mapping[str, Any] = found.state.get("reported", {})
        self.metrics: dict[str, float] = {name: row[0] for name, row in reported.items()}
        """Values that the script had reported last: loss, accuracy, …"""
        self._objects: Mapping[str, Any] = found.state["objects"]

    def __getitem__(self, name: str) -> Any:
        try:
            return self._objects[name]
        except KeyError:
            known = ", ".join(sorted(self._objects))
            raise KeyError(f"{self.path} holds no {name!r}; the script registered {known}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._objects)

    def __len__(self) -> int:
        return len(self._objects)

    def __repr__(self) -> str:
        return f"<snapshot {self.path}: step {self.step}, epoch {self.epoch}, {', '.join(self._objects)}>"


def load_snapshot(path: str | os.PathLike[str]) -> LoadedSnapshot:
    """Open a snapshot: a `.bft` file, or the newest complete one in a folder.

    An InputError says why a file or folder cannot be opened. Damaged files in a folder are skipped, with a
    SnapshotWarning for each.
    """
    place = Path(path)
    found = _newest(place) if place.is_dir() else _read(place)
    if not isinstance(found.state.get("objects"), dict):
        raise InputError(f"{found.path}: this snapshot was not written by a training (it holds no registered objects)")
    return LoadedSnapshot(found)


def _read(path: Path) -> Snapshot:
    try:
        return snapshot_file.read(path)
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file or folder") from None
    except Exception as problem:
        raise InputError(f"{path}: cannot be opened as a snapshot: {reason(problem)}") from None


def _newest(folder: Path) -> Snapshot:
    with warnings.catch_warnings(record=True) as passed_over:
        warnings.simplefilter("always", SnapshotWarning)
        found = Snapshots(folder).latest()
    if found is None:
        if passed_over:
            why = "; ".join(str(warning.message) for warning in passed_over)
            raise InputError(f"{folder}: no snapshot in this folder is complete: {why}")
        raise InputError(f"{folder}: there is no snapshot (snapshot-….bft) in this folder")
    for warning in passed_over:
        warnings.warn(str(warning.message), SnapshotWarning, stacklevel=3)
    return found
