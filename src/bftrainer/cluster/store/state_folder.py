"""Names in a state folder that `serve` and the doctor share, and the folder's identity. `store.py` names the database.

`serve` stores the identity of its folder. A folder with the stored identity of another one is a copy, as a restored
back-up. Processes that run under the stored id belong to the original.
"""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LOCK_FILE = "serve.lock"
"""Lock file, held (`flock`) by the controller for as long as it lives."""
SECRET_FILE = "agent-secret"  # noqa: S105 - the name of a file
"""The secret by which agents show that they belong to this controller."""
STATE_ID_KEY = "state_id"
"""Key in the store of the id that tells apart the processes of several state folders."""
FOLDER_KEY = "state_folder"
"""Key in the store of the identity of the folder that the last controller ran on."""


@dataclass(frozen=True, slots=True)
class FolderIdentity:
    """The properties that tell a state folder from its copies."""

    path: str
    host: str
    device: int
    inode: int

    @classmethod
    def of(cls, folder: Path) -> FolderIdentity:
        """Return the identity of an existing folder."""
        facts = folder.stat()
        return cls(str(folder.resolve()), socket.gethostname(), facts.st_dev, facts.st_ino)

    @classmethod
    def from_json(cls, stored: Any) -> FolderIdentity | None:
        """Return a stored identity; None if there is none, as in folders of version 0.1.0."""
        try:
            return cls(str(stored["path"]), str(stored["host"]), int(stored["device"]), int(stored["inode"]))
        except (TypeError, KeyError, ValueError):
            return None

    def as_json(self) -> dict[str, Any]:
        """Return the identity as the store holds it."""
        return asdict(self)

    def is_same(self, other: FolderIdentity) -> bool:
        """Whether both are one folder: at its old place, moved on its disk, or seen from another host.

        Device numbers change when a host restarts, and other hosts have other ones. A folder that was replaced at its
        place by a back-up is the same one.
        """
        if self.inode == other.inode and (self.path == other.path or self.device == other.device):
            return True
        return (self.path, self.host) == (other.path, other.host)


def original_of(folder: Path, stored: Any) -> FolderIdentity | None:
    """Return the folder that `folder` is a copy of; None if it is no copy. `stored`: the value of `FOLDER_KEY`."""
    before = FolderIdentity.from_json(stored)
    return None if before is None or before.is_same(FolderIdentity.of(folder)) else before
