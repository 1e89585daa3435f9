"""Users of a controller on a real Slurm whose trainers run as themselves: their tokens, lenders and submissions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bftrainer.cluster.owners.accounts import Account, clean_environment
from support.cluster.live import Live
from support.slurm.lab import Lab
from support.users.accounts import run_as
from support.waiting import wait_until


class LentUser:
    """A user with an account on this machine and a token of the controller."""

    def __init__(self, lab: Lab, live: Live, account: Account, python: str) -> None:
        self.account = account
        self.python = python
        self.folder = account.home / ".local" / "state" / "bftrainer-lend"
        self.log = account.home / "lend.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._live = live
        self.token = new_token(live.folder, account.name)
        self.environment = {
            "BFTRAINER_TOKEN": self.token,
            "SLURM_CONF": str(lab.conf),
            "PATH": os.environ["PATH"],
        }

    @property
    def _all(self) -> dict[str, str]:
        return {**clean_environment(self.account), **self.environment, "BFTRAINER_URL": url_of(self._live.folder)}

    def bftrainer(self, *words: str) -> str:
        """Run the command as this user, and return what it printed."""
        done = run_as(self.account, (self.python, "-m", "bftrainer", *words), self._all, 120.0)
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
                env=self._all,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(lambda: self.lent() == "connected", lambda: (self.lent(), self.log.read_text()[-2000:]), 60)

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

    def submit(self, script: Path, *args: str, nodes: str, **env: str) -> str:
        """Submit a trainer; its id."""
        more = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        printed = self.bftrainer(
            "submit", "--json", "--nodes", nodes, "--cwd", str(self.account.home), *more, str(script), *args
        )
        return str(json.loads(printed)["id"])

    def processes(self) -> Mapping[int, str]:
        """The command lines of this user's processes, by id."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and entry.stat().st_uid == self.account.uid:
                    line = (entry / "cmdline").read_bytes().decode(errors="replace")
                    found[int(entry.name)] = line.replace("\0", " ")
            except OSError:
                continue
        return found


def new_token(state: Path, owner: str) -> str:
    """Make a token of an owner."""
    words = (sys.executable, "-m", "bftrainer", "token", "create", f"of-{owner}", "--owner", owner)
    done = subprocess.run(words, env={**os.environ, "BFTRAINER_STATE": str(state)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def url_of(state: Path) -> str:
    """The URL of the controller that serves a folder."""
    return str(json.loads((state / "client.json").read_text())["url"])


def rows(lab: Lab) -> dict[str, list[Any]]:
    """The user, the name and the node of each job that has not ended, by its id."""
    lines = lab.run("squeue", "-h", "-o", "%i %u %j %T %n").splitlines()
    return {line.split()[0]: line.split()[1:] for line in lines}
