"""`run_lender` runs a lender until a signal ends it: its folder, its lock, its connection and its housekeeping.

On SIGTERM the lender says goodbye, cancels its waiting pilots and removes their secrets; pilots that run go on, because
they are connected to the controller themselves. The same happens to waiting pilots while no controller is found for
`GIVE_UP_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bftrainer.cluster.lend.jobs import LenderJobs
from bftrainer.cluster.lend.ledger import LentLedger
from bftrainer.cluster.lend.lender import Lender
from bftrainer.cluster.lend.link import LenderLink
from bftrainer.cluster.lend.pilot_files import PilotFiles
from bftrainer.cluster.lend.rules import LendRules
from bftrainer.cluster.owners import signatures
from bftrainer.cluster.owners.folders import own_home
from bftrainer.cluster.pools.slurm.settings import AGENT
from bftrainer.cluster.wire import tls
from bftrainer.errors import BFTrainerError
from bftrainer.processes import variables
from bftrainer.util import locks
from bftrainer.util.files import replace_file

LOCK, STATUS, STATE_ID_FILE = "lender.lock", "status.json", "state-id"
GIVE_UP_S = 600.0
"""How long waiting pilots are kept while there is no controller, which agents need when they start."""

TEND_S, STATUS_S = 30.0, 1.0
"""How often Slurm is asked for the lender's jobs, and how often the status is written; both only if need be."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LenderOptions:
    """What a lender is started with."""

    folder: Path
    url: str
    token: str = field(repr=False)
    authority: str
    """A file of certificates to verify the controller with, which the nodes see; empty: the system's."""
    rules: LendRules
    python: str
    agent: tuple[str, ...] = AGENT
    read_token: Callable[[], str] = str
    """Returns the token that the user has for the controller now; empty if there is none."""

    @property
    def agent_environment(self) -> dict[str, str]:
        """The variables that agents need besides their secret."""
        authority = {tls.CA: self.authority} if self.authority else {}
        return {variables.URL: self.url, **authority}


def pilot_files(options: LenderOptions) -> PilotFiles:
    """Return the files of a lender."""
    return PilotFiles(options.folder, options.agent_environment, options.python, options.agent)


def make_lender(options: LenderOptions) -> Lender:
    """Make the lender of a folder, which must be locked."""
    files, ledger = pilot_files(options), LentLedger(options.folder)
    files.prepare()
    state_id = ""
    with contextlib.suppress(OSError, ValueError):
        state_id = (options.folder / STATE_ID_FILE).read_text().strip()
    ledger.load(state_id)
    return Lender(options.rules, files, ledger, LenderJobs(files, options.rules), state_id)


async def run_lender(options: LenderOptions) -> None:
    """Run a lender until SIGTERM or SIGINT. Raises `BFTrainerError` if it cannot go on."""
    options.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(options.folder):
        await LenderJobs(pilot_files(options), options.rules).check_partitions()
        signatures.read_key(own_home(), make=True)  # agents check with it that this user has signed what they start
        lender = make_lender(options)
        status = _StatusFile(options, lender)
        link = LenderLink(lender, options.url, options.token, options.authority, status.write, options.read_token)
        status.write("connecting")
        ending = _on_signals()
        tasks = [asyncio.create_task(each) for each in (link.keep(), _keep_tending(lender, status), ending.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            failures = [task.exception() for task in tasks if task.done()]
            await link.say_goodbye("the lender was stopped")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            problem = await lender.withdraw()
            status.write("stopped" + (f"; its waiting pilots could not be cancelled: {problem}" if problem else ""))
        for failure in failures:
            if failure is not None:
                raise failure


async def _keep_tending(lender: Lender, status: _StatusFile) -> None:
    alone_since: float | None = None
    while True:
        for _ in range(int(TEND_S / STATUS_S)):
            await asyncio.sleep(STATUS_S)
            status.refresh()
        try:
            if status.connected:
                alone_since = None
                await lender.tend()
            else:
                alone_since = alone_since or time.monotonic()
                if time.monotonic() - alone_since >= GIVE_UP_S:
                    await lender.withdraw()
        except BFTrainerError as problem:
            _log.warning("the list of pilots is not up to date: %s", problem)


class _StatusFile:
    """What `bftrainer lend --status` reads."""

    def __init__(self, options: LenderOptions, lender: Lender) -> None:
        self._options = options
        self._lender = lender
        self._state = ""
        self._written = ""
        self._since = time.time()

    @property
    def connected(self) -> bool:
        """Whether a controller has taken the offer."""
        return self._state == "connected"

    def write(self, state: str) -> None:
        """Write a new state."""
        if state != self._state:
            self._state, self._since = state, time.time()
            _log.info("%s", state)
            if self.connected:
                replace_file(self._options.folder / STATE_ID_FILE, self._lender.state_id + "\n")
        self.refresh()

    def refresh(self) -> None:
        """Write the file again, if something has changed."""
        facts = {"state": self._state, "since": self._since, "pid": os.getpid(), "controller": self._options.url}
        facts |= {"pilots": self._lender.ledger.present, "max_pilots": self._lender.rules.most_pilots}
        text = json.dumps(facts) + "\n"
        if text != self._written:
            with contextlib.suppress(OSError):
                replace_file(self._options.folder / STATUS, text)
            self._written = text


def read_status(folder: Path) -> dict[str, Any]:
    """Return what a lender has written about itself; its `state` is `not running` if it does not run."""
    try:
        facts = json.loads((folder / STATUS).read_text())
        if not isinstance(facts, dict):
            raise ValueError
    except FileNotFoundError:
        facts = {"pilots": 0, "since": None, "controller": ""}
    except (OSError, ValueError) as problem:
        raise BFTrainerError(f"{folder / STATUS} cannot be read: {problem}") from None
    if not locks.is_locked(folder / LOCK):
        state = str(facts.get("state", ""))
        facts |= {"state": f"not running ({state})" if state.startswith("stopped;") else "not running", "pid": None}
    return facts


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = locks.take_lock(folder / LOCK, wait_s=0.3)
    if lock is None:
        pid = locks.read_pid(folder / LOCK) or "?"
        raise BFTrainerError(f"a lender (pid {pid}) already runs in {folder}: `bftrainer lend --status` tells more")
    try:
        locks.write_pid(lock, os.getpid())
        yield
    finally:
        os.close(lock)


def _on_signals() -> asyncio.Event:
    ending = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, ending.set)
    return ending
