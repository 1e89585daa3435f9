"""The files of a lender: the script of its pilots, and the secret of each pilot until the pilot has read it.

All are in a folder of the user that the nodes see and nobody else may read. A secret is one line in a file of its own
(0600); the script removes the file before it becomes the agent. `sweep` removes what pilots left that never started.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from bftrainer.cluster.lend.rules import PILOT_ID
from bftrainer.cluster.pools.slurm.settings import AGENT
from bftrainer.errors import BFTrainerError
from bftrainer.processes import variables
from bftrainer.util.files import replace_file

SCRIPT, SECRETS, LOGS, CALL_BACKS = "pilot.sh", "secrets", "logs", "call-backs"
_NO_SECRET = 75
"""Exit status of a pilot whose secret is gone: another one has read it, or its lender took it back."""


class PilotFiles:
    """The folder of a lender."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], python: str, agent: tuple[str, ...] = AGENT
    ) -> None:
        """`environment` has what agents need besides their secret. `python` runs them."""
        self.folder = folder
        self.script = folder / SCRIPT
        self._environment = environment
        self._argv = (python, *agent)

    def prepare(self) -> None:
        """Make the folder."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _only_ours(self.folder)
            for name in (SECRETS, LOGS, CALL_BACKS):
                (self.folder / name).mkdir(mode=0o700, exist_ok=True)
                _only_ours(self.folder / name)
        except OSError as problem:
            where = problem.filename or self.folder
            raise BFTrainerError(f"{where}: {problem.strerror or problem}") from None

    def write_script(self, state_id: str, owner: str) -> None:
        """Write the script of pilots for the controller that has taken the offer."""
        replace_file(self.script, self.text(state_id, owner), 0o700)

    def text(self, state_id: str, owner: str) -> str:
        """Return the script of pilots."""
        ours = {variables.STATE_ID: state_id, variables.OWNER: owner}
        return pilot_script(self.folder, {**self._environment, **ours}, self._argv)

    def log(self, node: str) -> Path:
        """Return the file of a pilot's output."""
        return self.folder / LOGS / f"{node}.log"

    def write_secret(self, pilot: str, secret: str) -> None:
        """Write the secret of a pilot."""
        replace_file(self.folder / SECRETS / pilot, secret + "\n")

    def remove_secret(self, pilot: str) -> None:
        """Remove the secret of a pilot, if it is still there."""
        with suppress(OSError):
            (self.folder / SECRETS / pilot).unlink(missing_ok=True)

    def unread(self) -> frozenset[str]:
        """Return the pilots whose secrets are still there."""
        with suppress(OSError):
            names = (path.name for path in (self.folder / SECRETS).iterdir())
            return frozenset(name for name in names if PILOT_ID.fullmatch(name))
        return frozenset()

    def sweep(self, keep: Collection[str]) -> None:
        """Remove all secrets but those of pilots in `keep`, and what a write that was cut off has left."""
        with suppress(OSError):
            for path in list((self.folder / SECRETS).iterdir()):
                if path.name not in keep:
                    self.remove_secret(path.name)


def pilot_script(folder: Path, environment: Mapping[str, str], argv: tuple[str, ...]) -> str:
    """Return the script of all pilots of a lender. Its argument is the id of the pilot.

    It has no secret, and nothing of a request. It becomes the agent: a shell in between would have to forward the
    signal with which Slurm takes the node back.
    """
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return "\n".join(
        (
            "#!/bin/sh",
            f"secret={shlex.quote(str(folder / SECRETS))}/$1",
            f'IFS= read -r {variables.SECRET} 2>/dev/null < "$secret" || exit {_NO_SECRET}',
            'rm -f -- "$secret"',
            f"export {variables.SECRET}",
            *exports,
            f'export {variables.NODE}="$SLURMD_NODENAME"',
            f'export {variables.CALL_BACK}={shlex.quote(str(folder / CALL_BACKS))}/"$SLURMD_NODENAME"',
            f"exec {shlex.join(argv)}",
            "",
        )
    )


def _only_ours(folder: Path) -> None:
    """Raise an error unless a folder belongs to this user; close it to all others."""
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
        raise BFTrainerError(f"{folder} must be a folder of yours: choose another one by --folder")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        folder.chmod(0o700)
