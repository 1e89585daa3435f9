"""A live system of two owners with Unix accounts of their own: a controller run by root, with the local pool."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bftrainer.cluster.owners.accounts import Account
from bftrainer.cluster.wire import tls
from bftrainer.cluster.wire.authority import OWN_AUTHORITY
from support.cluster.live import Live
from support.users.accounts import public_python, run_as, unix_users


@dataclass
class Owned:
    """The system, and what its users have."""

    live: Live
    python: str
    ann: Account
    bob: Account
    tokens: dict[str, str] = field(default_factory=dict)

    @property
    def state(self) -> Path:
        """The controller's state folder."""
        return self.live.folder

    @property
    def url(self) -> str:
        """Where the controller listens."""
        return self.live.api.address.url

    @property
    def authority(self) -> str:
        """The certificate by which users verify the controller, whose folder they cannot read."""
        return tls.one_line(self.state / OWN_AUTHORITY)

    def command(self, user: Account, *words: str, token_of: Account | None = None) -> str:
        """Run `bftrainer` as a user, with their token or another's. Returns what it printed."""
        token = self.tokens[(token_of or user).name]
        env = {"BFTRAINER_URL": self.url, "BFTRAINER_TOKEN": token, tls.CA: self.authority}
        done = run_as(user, [self.python, "-m", "bftrainer", *words], env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(
        self, user: Account, script: Path, *args: object, options: Sequence[str] = (), token_of: Account | None = None
    ) -> str:
        """Submit a script of the user's home, of which only they can read the copy. Returns the trainer's id."""
        own = user.home / script.name
        shutil.copyfile(script, own)
        os.chown(own, user.uid, user.gid)
        own.chmod(0o600)
        printed = self.command(user, "submit", *options, str(own), *map(str, args), token_of=token_of)
        return printed.split()[1]

    def as_admin(self, *words: str) -> str:
        """Run `bftrainer` as root on the state folder."""
        argv = [self.python, "-m", "bftrainer", *words, "--state", str(self.state)]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    def nodes_of(self, owner: str) -> list[str]:
        """The nodes whose agents serve an owner now."""
        return [node["node"] for node in self.live.nodes() if node.get("serves") == owner]


@contextmanager
def owned_system(folder: Path, nodes: int, *settings: str) -> Iterator[Owned]:
    """Run a controller whose trainers run as their owners."""
    with unix_users("bft-ann", "bft-bob") as (ann, bob), public_python() as python:
        options = [word for setting in ("users.mode=own", *settings) for word in ("--set", setting)]
        with Live(folder / "state", "--nodes", str(nodes), "-v", *options, python=python) as live:
            system = Owned(live, python, ann, bob)
            for user in (ann, bob):
                system.tokens[user.name] = system.as_admin("token", "create", user.name, "--owner", user.name).strip()
            yield system


def facts_of(pid: int) -> dict[str, list[str]]:
    """The ids of a process, as the kernel tells them."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {
        name: line.split()[1:] for line in lines for name in ("Uid", "Gid", "Groups") if line.startswith(name + ":")
    }


def files_below(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Everything in a folder, with its facts, and the folder itself."""
    for path in (folder, *folder.rglob("*")):
        yield path, path.lstat()


def is_private(facts: os.stat_result) -> bool:
    """Whether others than its owner may do nothing with it."""
    return not stat.S_IMODE(facts.st_mode) & 0o077


def loot_of(path: Path) -> dict[str, Any]:
    """What the hostile trainer got."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found
