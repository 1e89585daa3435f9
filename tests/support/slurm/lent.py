"""Users of a controller on a real Slurm whose trainers run as themselves: their tokens, lenders and submissions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bftrainer.cluster.owners.accounts import Account, clean_environment
from bftrainer.cluster.wire import tls
from bftrainer.cluster.wire.authority import OWN_AUTHORITY
from support.slurm.lab import Lab
from support.users.accounts import processes_of, run_as


class LentUser:
    """A user with an account on this machine and a token of a controller, who may run a lender."""

    def __init__(
        self,
        lab: Lab,
        account: Account,
        python: str,
        url: Callable[[], str],
        token: str,
        authority: Callable[[], str] = str,
    ) -> None:
        self.account = account
        self.python = python
        self.folder = account.home / ".local" / "state" / "bftrainer-lend"
        self.log = account.home.parent / f"{account.name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._url = url
        self._authority = authority
        self._own = {"BFTRAINER_TOKEN": token, "SLURM_CONF": str(lab.conf), "PATH": os.environ["PATH"]}

    @property
    def environment(self) -> dict[str, str]:
        """What this user's commands need."""
        ours = {**clean_environment(self.account), **self._own, "BFTRAINER_URL": self._url()}
        ours[tls.CA] = self._authority()
        return {name: value for name, value in ours.items() if name not in ("BFTRAINER_TOKEN", tls.CA) or value}

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command as this user."""
        return run_as(self.account, argv, self.environment, 120.0)

    def bftrainer(self, *words: str) -> str:
        """Run `bftrainer` as this user, and return what it printed."""
        done = self.run(self.python, "-m", "bftrainer", *words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def lend(self, *options: str) -> None:
        """Start the lender, and wait until the controller has taken its offer."""
        words = (self.python, "-m", "bftrainer", "lend", "--partition", "scavenger", *options)
        account = self.account
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                words,
                user=account.uid,
                group=account.gid,
                extra_groups=list(account.groups),
                cwd=account.home,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def lent(self) -> str:
        """What the lender says of itself."""
        try:
            return str(json.loads((self.folder / "status.json").read_text())["state"])
        except FileNotFoundError:
            return ""

    def end(self, signum: int = signal.SIGTERM) -> int:
        """End the lender; its exit status."""
        assert self.process is not None
        self.process.send_signal(signum)
        status = self.process.wait(60)
        self.process = None
        return status

    def processes(self) -> dict[int, str]:
        """The command lines of this user's processes, by id."""
        found = {}
        for pid in processes_of(self.account.uid):
            with suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        return found

    def submit(self, script: Path, *args: str, nodes: str) -> str:
        """Submit a trainer; its id."""
        words = ("submit", "--json", "--nodes", nodes, "--cwd", str(self.account.home), str(script), *args)
        return str(json.loads(self.bftrainer(*words))["id"])


def new_token(state: Path, owner: str) -> str:
    """Make a token of an owner."""
    words = (sys.executable, "-m", "bftrainer", "token", "create", f"of-{owner}", "--owner", owner)
    done = subprocess.run(words, env={**os.environ, "BFTRAINER_STATE": str(state)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def url_of(state: Path) -> str:
    """The URL of the controller that serves a folder."""
    return str(json.loads((state / "client.json").read_text())["url"])


def authority_of(state: Path) -> str:
    """The certificate by which users verify that controller."""
    return tls.one_line(state / OWN_AUTHORITY)


def users_of(lab: Lab) -> dict[str, str]:
    """The user of the job on each node."""
    lines = (line.split() for line in lab.run("squeue", "-h", "-t", "R", "-o", "%N %u").splitlines())
    return {line[0]: line[1] for line in lines if len(line) == 2}


def files_with(text: str, *folders: Path) -> list[str]:
    """The files below folders that contain a text."""
    done = subprocess.run(
        ("grep", "-rlF", "--devices=skip", text, *map(str, folders)), capture_output=True, text=True, check=False
    )
    return done.stdout.split()
