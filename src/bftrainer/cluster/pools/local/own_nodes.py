"""Own nodes: for whom the virtual nodes of the `local` pool run, where agents have owners.

Each agent is started as its owner's account, in the owner's home, with a clean environment. Only root can do that for
several accounts. Without root there is one owner: the account that runs the controller.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bftrainer.cluster.owners.accounts import Account, clean_environment
from bftrainer.cluster.owners.folders import OwnFolders
from bftrainer.cluster.pools.base import PoolHost
from bftrainer.errors import InputError
from bftrainer.processes import variables
from bftrainer.util.backoff import Backoff
from bftrainer.util.daemon_threads import DaemonThreads

END_S = 10.0
"""The agent of a former owner is killed if it has not ended this long after it was dismissed."""
TRY_S = 5.0
"""How long it may take an account to start Python."""
TRY_AGAIN = Backoff(30.0, 3600.0)
"""When an account that cannot run Python is tried again."""
_MOST_TRIALS = 64
"""How many accounts are tried at a time. An account whose user holds up the trial does not keep others waiting."""
_BUSY_S = 1.0
_KILLED_S = 1.0
"""Seconds to wait for a killed process: its user may have another process that keeps it from being reaped."""


@dataclass(slots=True)
class _Trial:
    """Whether an account can run Python."""

    able: bool | None = None
    """None: not known yet."""
    failures: int = 0
    again_at: float = 0.0
    running: asyncio.Task[None] | None = None


class OwnNodes:
    """The owners for whom nodes are to be started, and the nodes that change their owner."""

    def __init__(self, host: PoolHost, changed: Callable[[], None] = lambda: None) -> None:
        """`changed` is called when it is known whether an account can run Python."""
        self._host = host
        self._changed = changed
        self._threads = DaemonThreads(_MOST_TRIALS, "trial of an account")
        self._owners: Mapping[str, str] = {}
        self._refused: dict[str, str] = {}
        """Owners as whom nothing can be started, and why. Each reason is noted once."""
        self._trials: dict[int, _Trial] = {}
        """By user id."""
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
        """Return why no agent can be started for an owner; empty if one can be, or if that is not known yet."""
        return "" if self._account(owner) is not None else self._refused.get(owner, "")

    def close(self) -> None:
        """Wait for no trial of an account any more."""
        for trial in self._trials.values():
            if trial.running is not None:
                trial.running.cancel()

    def _account(self, owner: str) -> Account | None:
        """Return the account of an owner; None if agents cannot run under it, which is noted, or if it is not known."""
        try:
            account = self._host.accounts.of(owner)
            if os.geteuid() not in (0, account.uid):
                raise InputError(f"only root can start agents as {account.name}: run the controller as root")
            able = self._runs_python(account)
            if able is None:
                return None
            if not able:
                raise InputError(
                    f"{account.name} cannot run {sys.executable} with BFTrainer, which agents are started with: "
                    "install BFTrainer where all users may read it, such as below /opt, and serve from there"
                )
        except InputError as problem:
            if self._refused.get(owner) != str(problem):
                self._refused[owner] = str(problem)
                self._host.note("no_account", owner=owner, error=str(problem))
            return None
        self._refused.pop(owner, None)
        return account

    def _runs_python(self, account: Account) -> bool | None:
        """Return whether an account can run this process's Python with BFTrainer, as agents must.

        Agents of another account are not started before that was tried. Trials run in threads: a user can hold up the
        processes that are started under the user's account.
        """
        if account.uid == os.geteuid():
            return True
        trial = self._trials.setdefault(account.uid, _Trial())
        if not trial.able and trial.running is None and time.monotonic() >= trial.again_at:
            trial.running = asyncio.get_running_loop().create_task(self._try(account, trial))
        return trial.able

    async def _try(self, account: Account, trial: _Trial) -> None:
        try:
            trial.able = await self._threads.run(lambda: can_run(account))
        except TimeoutError:
            trial.again_at = time.monotonic() + _BUSY_S
        else:
            trial.failures = 0 if trial.able else trial.failures + 1
            trial.again_at = time.monotonic() + TRY_AGAIN.wait_s(trial.failures)
        finally:
            trial.running = None
        self._changed()


def can_run(account: Account) -> bool:
    """Whether an account can run this process's Python with BFTrainer. Only root can find out for another one.

    The account's user can stop and change the process that is started. So it has a session of its own, without a
    terminal, runs no code of the user's at its start (`-I`), and is not waited for when it was killed in vain.
    """
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", "import bftrainer"],
            cwd="/",
            env=clean_environment(account),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            user=account.uid,
            group=account.gid,
            extra_groups=account.groups,
        )
    except OSError:
        return False
    try:
        return process.wait(TRY_S) == 0
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILLED_S)
        return False
