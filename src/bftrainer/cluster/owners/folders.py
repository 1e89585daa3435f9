"""Own folders: where the files of trainers lie that run as their owners.

They are below the owner's home, which all nodes must see, unless the owner names others by variables of the trainer's
environment (`BFTRAINER_SNAPSHOTS`, `BFTRAINER_OUTPUT`). Agents make them; the controller only names them.
"""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path


def own_home() -> Path:
    """Return the home of this process's account. `$HOME` is not asked: it may have been set to anything."""
    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        return Path.home()


@dataclass(frozen=True, slots=True)
class OwnFolders:
    """The folders of one owner."""

    home: Path

    @property
    def base(self) -> Path:
        """The folder that has all others."""
        return self.home / ".bftrainer"

    @property
    def compiled(self) -> Path:
        """The folder of compiled code."""
        return self.base / "compiled"

    def agent_log(self, node: str) -> Path:
        """Return the file to which the agent of a node of the `local` pool prints."""
        return self.base / "agents" / f"{node}.log"

    def trainer(self, state_id: str, trainer: str) -> Path:
        """Return the folder of a trainer of the controller whose state has this id."""
        return self.base / "trainers" / f"{state_id}-{trainer}"

    def snapshots(self, state_id: str, trainer: str) -> Path:
        """Return the folder of a trainer's snapshots."""
        return self.trainer(state_id, trainer) / "snapshots"

    def output(self, state_id: str, trainer: str) -> Path:
        """Return the folder that a trainer's script writes to."""
        return self.trainer(state_id, trainer) / "output"

    def make(self, folder: Path) -> None:
        """Make one of the folders, so that nobody else may enter it."""
        self.base.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
