"""Warm launcher: forks workers in milliseconds from a parent process, which has already imported torch.

`WarmLauncher` starts the parents (`parent.py`) and chooses one for each command. For a script whose imports are known,
that is a branch of a parent, which has done them too (`ahead`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from bftrainer.processes.ahead.branches import Branches
from bftrainer.processes.launch import ColdLauncher, Command, Process, RunAs
from bftrainer.processes.parent import PATIENCE_S, NotWarmError, WarmParent, adopt, what_loading_reads

PARENTS = 4
"""Maximum number of warm parents. Each holds its imports in memory, and commands rarely need different parents."""

_log = logging.getLogger(__name__)

PRELOAD = ("torch", "torch._dynamo", "bftrainer.elastic.torch.run", "bftrainer.elastic.torch.ddp.standing_in")


class WarmLauncher:
    """Forks Python scripts from a warm parent.

    Everything else, or if that fails everything, starts as in `ColdLauncher`.

    The parent is started with the first command, or by `prepare`. `preload` names the modules that it imports. The
    parents and all that they fork run under the account `run_as`, from their first instruction on. Sockets are made in
    `folder`, which is private and which its owner removes, or in the system's folder for temporary files.
    """

    def __init__(
        self,
        python: str = sys.executable,
        preload: tuple[str, ...] = PRELOAD,
        run_as: RunAs | None = None,
        folder: Path | None = None,
    ) -> None:
        self._python = python
        self._preload = preload
        self._run_as = run_as
        self._cold = ColdLauncher(python, run_as)
        self._parents: dict[tuple[str, ...], asyncio.Task[WarmParent]] = {}
        self._branches = Branches(self._parent, folder)
        self._warned: set[tuple[str, ...]] = set()
        """The parents without which a command was started, after a warning."""

    async def start(self, command: Command) -> Process:
        """See `ProcessLauncher`."""
        if command.python and _is_plain(command):
            if command.preload and (branch := await self._branches.of(command)) is not None:
                with suppress(NotWarmError):  # it has just ended: the warm parent itself is next best
                    return await branch.start(command)
            try:
                parent = await self._parent(command)
                return await parent.start(command)
            except NotWarmError as problem:
                self._warn(command, problem)
        return await self._cold.start(command)

    def prepare(self, environment: Mapping[str, str], inherited: tuple[int, socket.socket] | None = None) -> None:
        """Start a parent for commands with this environment before the first command comes.

        `inherited` is a parent that `forker.fork_forker` returned, for this launcher's interpreter. When it ends, the
        next command gets a new parent as usual.
        """
        command = Command((), environment, os.getcwd(), None)  # noqa: PTH109
        key = what_loading_reads(command)
        if key not in self._parents:
            self._parents[key] = asyncio.create_task(self._first_parent(command, inherited))

    def import_ahead(self, command: Command) -> None:
        """Begin to import what a command's script imports (`Command.preload`), before the command comes."""
        if command.python and command.preload and _is_plain(command):
            self._branches.prepare(command)

    async def close(self, patience_s: float = PATIENCE_S) -> None:
        """See `ProcessLauncher`. A parent that has not ended after `patience_s` is killed."""
        await self._branches.close()
        tasks = list(self._parents.values())
        self._parents.clear()
        for task in tasks:
            task.cancel()
        for parent in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(parent, WarmParent):
                await parent.close(patience_s)
        await self._cold.close()

    @property
    def parents(self) -> list[Process]:
        """The parents that are ready."""
        done = [task for task in self._parents.values() if task.done() and not task.cancelled()]
        return [task.result().process for task in done if task.exception() is None]

    def kill_parents(self) -> None:
        """Kill the parents, for example if they do not obey. All that they have started ends with them."""
        for parent in self.parents:
            parent.kill_group()

    async def _first_parent(self, command: Command, inherited: tuple[int, socket.socket] | None) -> WarmParent:
        if inherited is not None:
            pid, connection = inherited
            try:
                return await WarmParent.ready(adopt(pid), connection)
            except NotWarmError as problem:
                _log.warning("a new warm parent replaces the inherited one: %s", problem)
        return await WarmParent.spawned(command, self._python, self._preload, self._run_as)

    def _warn(self, command: Command, problem: NotWarmError) -> None:
        """Warn once per parent that a command starts without it: a parent may fail as often as it wants."""
        key = what_loading_reads(command)
        if key not in self._warned:
            self._warned = {*(self._warned & self._parents.keys()), key}
            _log.warning("%s starts without the warm parent: %s", command.argv[0], problem)

    async def _parent(self, command: Command) -> WarmParent:
        """Return the warm parent for a command, once it is ready."""
        key = what_loading_reads(command)
        for known, task in list(self._parents.items()):
            # A parent that never got ready stays, with its error: the next one would fail too.
            if task.done() and task.exception() is None and task.result().gone:
                del self._parents[known]
                self._warned.discard(known)
        if key not in self._parents:
            if len(self._parents) >= PARENTS:
                raise NotWarmError(f"there are {PARENTS} with other settings")
            self._parents[key] = asyncio.create_task(
                WarmParent.spawned(command, self._python, self._preload, self._run_as)
            )
        return await asyncio.shield(self._parents[key])


def _is_plain(command: Command) -> bool:
    script = Path(command.cwd, command.argv[0])
    if command.argv[0] == "-m":
        return Path(command.cwd).is_dir()
    return script.is_file() and script.suffix not in (".zip", ".pyz", ".pyc")
