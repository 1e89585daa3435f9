"""Files as they were when a training began: keeps the checkpoints that a script has loaded then, for newcomers.

A script loads its checkpoint at its top and begins in that epoch. It also overwrites the checkpoint while it trains. A
worker that joins later runs the same code, and must find what the others have found: the former file, or none.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from bftrainer.elastic import protocol
from bftrainer.util.files import replace_file

_NAME = "ddp-start.json"
_FIRST = "ddp-first"


class StartFiles:
    """The files of one training. They are listed in its folder of snapshots, or in that of its output."""

    def __init__(self) -> None:
        named = os.environ.get(protocol.SNAPSHOTS) or os.environ.get(protocol.OUTPUT)
        self._folder = Path(named) if named and protocol.CHANNEL in os.environ else None

    def is_first(self) -> bool:
        """Return True in one of the processes that run the script: that one writes files before the training."""
        if self._folder is None:
            return True
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            (self._folder / _FIRST).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def keep(self, path: Path) -> None:
        """Keep a file that is about to be written for the first time in this training. The main rank calls it."""
        known = self._known()
        name = str(path.absolute())
        if self._folder is None or name in known:
            return
        kept: Path | None = None
        if path.exists():
            kept = self._folder / f"ddp-start-{hashlib.sha256(name.encode()).hexdigest()[:16]}{path.suffix}"
            with suppress(FileNotFoundError):
                kept.unlink()
            try:
                os.link(path, kept)
            except OSError:
                shutil.copy2(path, kept)
        known[name] = str(kept) if kept is not None else None
        replace_file(self._folder / _NAME, json.dumps(known), 0o644)

    def find(self, path: Path) -> Path | None:
        """Return where a file is as it was when the training began; None if there was none."""
        known = self._known()
        kept = known.get(str(path.absolute()), str(path))
        return Path(kept) if kept is not None else None

    def _known(self) -> dict[str, str | None]:
        if self._folder is None:
            return {}
        try:
            known: dict[str, str | None] = json.loads((self._folder / _NAME).read_text())
        except FileNotFoundError:
            return {}
        return known


def forget(folder: Path) -> None:
    """Forget an earlier training whose output was in this folder."""
    for name in (_NAME, _FIRST):
        with suppress(FileNotFoundError):
            (folder / name).unlink()
