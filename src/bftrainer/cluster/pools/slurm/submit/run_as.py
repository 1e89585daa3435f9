"""`RunAsOwners` submits pilots as other accounts: `runuser -u OWNER -- sbatch …`, or with a prefix that a site allows.

The controller must be run by root, or by an account for which the site has a rule (such as one of sudo for `sbatch` and
`scancel`). Nothing of the controller's environment goes along, and the controller writes nothing into folders of the
owner: `sbatch` reads the script, with the secret in it, from its standard input. Slurm keeps scripts of jobs where only
root, its own account and the job's owner can read them, and removes them some minutes after the job (`MinJobAge`).
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bftrainer.cluster.owners.accounts import ROOT, Account, Accounts
from bftrainer.cluster.pools.slurm.read import Pilot
from bftrainer.cluster.pools.slurm.runner import SlurmCommandError, SlurmRunner
from bftrainer.cluster.pools.slurm.submit.base import OwnedPilot, Submitter
from bftrainer.cluster.pools.slurm.submit.job import (
    cancel_words,
    have_ended,
    job_number,
    plain_environment,
    sbatch_words,
)
from bftrainer.errors import InputError
from bftrainer.processes import variables

RUNUSER = ("runuser", "-u", "{account}", "--")
LOOK_UP_S = 60.0
"""How often the account of an owner is looked up again."""
_PLACE = "{account}"
_LOGS = ".local/state/bftrainer-pilots"
"""Folder of the output of pilots in the home of their owner. The pilots make it themselves."""

_Read = TypeVar("_Read")


class AccountSubmitter:
    """Submits the pilots of one account. See `Submitter`."""

    def __init__(
        self, account: Account, name: str, prefix: Sequence[str], python: Sequence[str], runner: SlurmRunner
    ) -> None:
        """`name` is that of all pilots' jobs. `python` runs agents on the nodes."""
        self._account = account
        self._name = name
        self._prefix = tuple(word.replace(_PLACE, account.name) for word in prefix)
        self._python = tuple(python)
        self._runner = runner

    async def submit(self, pilot: OwnedPilot) -> int:
        """See `Submitter`."""
        words = (*sbatch_words(pilot.job, Path("/"), Path(os.devnull)), "--export=NONE")
        script = script_with_secret(self._account.home, pilot.invitation, self._python)
        return await self._run(words, job_number, script.encode())

    async def cancel(self, pilots: Sequence[Pilot], *, only_waiting: bool = False) -> None:
        """See `Submitter`."""
        jobs = [pilot.job for pilot in pilots]
        words = cancel_words(jobs, str(self._account.uid), self._name, only_waiting=only_waiting)
        try:
            await self._run(words, lambda text: None)
        except SlurmCommandError as problem:
            if not have_ended(problem):
                raise

    async def _run(self, words: Sequence[str], read: Callable[[str], _Read], stdin: bytes = b"") -> _Read:
        environment = plain_environment(os.environ)
        return await self._runner.ask(
            (*self._prefix, *words), read, stdin=stdin, environment=environment, name=words[0]
        )


class RunAsOwners:
    """The accounts of all owners. See `Submitters`."""

    def __init__(
        self,
        accounts: Accounts,
        name: str,
        prefix: Sequence[str],
        python: Sequence[str],
        runner: SlurmRunner,
    ) -> None:
        self._accounts = accounts
        self._name = name
        self._prefix = tuple(prefix) or RUNUSER
        self._python = tuple(python)
        self._runner = runner
        self._known: dict[str, tuple[Account | str, float]] = {}
        if not prefix and os.geteuid() != ROOT:
            raise InputError(
                "`submit` is run-as, which needs a controller that root runs, or a rule of the site: set submit_as, "
                'such as submit_as = ["sudo", "-n", "-u", "{account}"], or let users run `bftrainer lend`'
            )
        if shutil.which(self._prefix[0]) is None:
            raise InputError(f"`submit_as` begins with {self._prefix[0]}, which is not on the PATH")

    def of(self, owner: str) -> Submitter:
        """See `Submitters`."""
        account = self._account(owner)
        if isinstance(account, str):
            raise SlurmCommandError(account)
        return AccountSubmitter(account, self._name, self._prefix, self._python, self._runner)

    def why_not(self, owner: str) -> str:
        """See `Submitters`."""
        account = self._account(owner)
        return account if isinstance(account, str) else ""

    def _account(self, owner: str) -> Account | str:
        """Return the account of an owner, or why there is none; looked up now and then."""
        now = time.monotonic()
        known = self._known.get(owner)
        if known is None or now - known[1] > LOOK_UP_S:
            try:
                known = (self._accounts.of(owner), now)
            except InputError as problem:
                known = (str(problem), now)
            self._known[owner] = known
        return known[0]

    def most(self, owner: str) -> int | None:
        """See `Submitters`."""
        return None

    def log_of(self, owner: str, node: str) -> str:
        """See `Submitters`."""
        return f"~{self._accounts.name_of(owner)}/{_LOGS}/{node}.log"

    def describe(self) -> Mapping[str, Any]:
        """See `Submitters`."""
        return {"submit": "run-as", "prefix": list(self._prefix)}


def script_with_secret(home: Path, invitation: Mapping[str, str], python: Sequence[str]) -> str:
    """Return the script of one pilot. It becomes the agent, with its output in the home of its owner."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(invitation.items())]
    return "\n".join(
        (
            "#!/bin/sh",
            "umask 077",
            f': "${{HOME:={home}}}"',
            f'mkdir -p "$HOME/{_LOGS}" && exec > "$HOME/{_LOGS}/$SLURMD_NODENAME.log" 2>&1',
            'cd "$HOME" || cd /',
            *exports,
            f'export {variables.NODE}="$SLURMD_NODENAME"',
            f"exec {shlex.join(python)}",
            "",
        )
    )
