"""Own nodes: for whom the virtual nodes of the `local` pool run, where agents have owners.

Each agent is started as its owner's account, in the owner's home, with a clean environment. Only root can do that for
several accounts. Without root there is one owner: the account that runs the controller.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bftrainer.cluster.owners.accounts import Account, clean_environment
from bftrainer.cluster.owners.folders import OwnFolders
from bftrainer.cluster.pools.base import PoolHost
from bftrainer.errors import InputError
from bftrainer.processes import variables

END_S = 10.0
"""The agent of a former owner is killed if it has not ended this long after it was dismissed."""
TRY_S = 10.0
"""How long it may take an account to start Python."""
TRY_AGAIN_S = 30.0
"""An account that cannot run Python is tried again after this time."""


class OwnNodes:
    """The owners for whom nodes are to be started, and the nodes that change their owner."""

    def __init__(self, host: PoolHost) -> None:
        self._host = host
        self._owners: Mapping[str, str] = {}
        self._refused: dict[str, str] = {}
        """Owners as whom nothing can be started, and why. Each reason is noted once."""
        self._tried: dict[int, tuple[bool, float]] = {}
        """Whether an account can run Python, and when that was tried."""
        self._leaving: dict[str, float] = {}
        """Nodes whose agents end for those of other owners, and when each is killed."""

    def look(self, missing: Sequence[str]) -> None:
        """Ask for whom agents are to be started on nodes that have none."""
        self._owners = self._host.owners_for(missing) if missing else {}

    def may_start(self, node: str) -> bool:
        """Whether an agent can be started on a node now: somebody can use it, and has an account."""
        return node in self._owners and self._account(self._owners[node]) is not None

    def start(self, node: str, settings: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the account of a node's agent, as the host of virtual nodes reads it, and its whole environment."""
        owner = self._owners[node]
        account = self._account(owner)
        assert account is not None, "`may_start` was asked before"
        env = {**clean_environment(account), **settings, **self._host.invitation(node, owner)}
        env[variables.AGENT_LOG] = str(OwnFolders(account.home).agent_log(node))
        if account.uid == os.geteuid():
            return {}, env
        facts = {"uid": account.uid, "gid": account.gid, "groups": list(account.groups), "home": str(account.home)}
        return facts, env

    def hand_over(self, node: str, now: float) -> None:
        """Expect the agent of a node to end, because another owner's takes its place."""
        self._leaving[node] = now + END_S

    def ended(self, node: str) -> bool:
        """Record that the agent of a node has ended. Returns whether another owner's takes its place."""
        return self._leaving.pop(node, None) is not None

    def overdue(self, now: float, running: Collection[str]) -> list[str]:
        """Return the nodes whose dismissed agents do not end."""
        late = [node for node, by in self._leaving.items() if now >= by and node in running]
        self._leaving.update(dict.fromkeys(late, now + END_S))
        return late

    def why_not(self, owner: str) -> str:
        """Return why no agent can be started for an owner; empty if one can be."""
        return "" if self._account(owner) is not None else self._refused[owner]

    def _account(self, owner: str) -> Account | None:
        """Return the account of an owner; None if agents cannot run under it, and that is noted."""
        try:
            account = self._host.accounts.of(owner)
            if os.geteuid() not in (0, account.uid):
                raise InputError(f"only root can start agents as {account.name}: run the controller as root")
            self._check_python(account)
        except InputError as problem:
            if self._refused.get(owner) != str(problem):
                self._refused[owner] = str(problem)
                self._host.note("no_account", owner=owner, error=str(problem))
            return None
        self._refused.pop(owner, None)
        return account

    def _check_python(self, account: Account) -> None:
        """Raise `InputError` if an account cannot run this process's Python with BFTrainer, as agents must."""
        if account.uid == os.geteuid():
            return
        now = time.monotonic()
        able, at = self._tried.get(account.uid, (False, -TRY_AGAIN_S))
        if not able and now - at >= TRY_AGAIN_S:
            able = can_run(account)
            self._tried[account.uid] = (able, now)
        if not able:
            raise InputError(
                f"{account.name} cannot run {sys.executable} with BFTrainer, which agents are started with: install "
                "BFTrainer where all users may read it, such as below /opt, and serve from there"
            )


def can_run(account: Account) -> bool:
    """Whether an account can run this process's Python with BFTrainer. Only root can find out for another one."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import bftrainer"],
            cwd="/",
            env=clean_environment(account),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TRY_S,
            check=False,
            user=account.uid,
            group=account.gid,
            extra_groups=account.groups,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
