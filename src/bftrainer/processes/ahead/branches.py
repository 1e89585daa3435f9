"""Branches of warm parents: for each kind of script one parent that has also imported what the script imports.

`WarmLauncher` asks for the branch of a command that names modules (`Command.preload`). A branch is forked from the warm
parent that would start the command otherwise, so it shares the memory of its imports; `branch.py` is what runs in it.
There are few branches: each holds the memory of its own modules.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bftrainer.processes import variables
from bftrainer.processes.ahead.branch import folder_of, stamp
from bftrainer.processes.launch import Command, Process, hasten
from bftrainer.processes.parent import NotWarmError, WarmParent, what_loading_reads

MOST = 3
"""Maximum number of branches."""
_TRIES = 5
"""How often a branch is forked again without a module that cannot be imported ahead."""
_CONNECT_S = 30.0
_OF_WORKERS = frozenset(
    {variables.CHANNEL, variables.WORKER, variables.ORDERED, variables.LOCAL_RANK, variables.LOCAL_WORLD}
)

_log = logging.getLogger(__name__)

_Key = tuple[tuple[str, ...], str, tuple[str, ...]]


class Branches:
    """The branches of one launcher. `parent_of` returns the warm parent for a command, once it is ready.

    Each branch connects to a socket in `folder`, or in the system's folder for temporary files.
    """

    def __init__(self, parent_of: Callable[[Command], Awaitable[WarmParent]], folder: Path | None = None) -> None:
        self._parent_of = parent_of
        self._folder = folder
        self._tasks: dict[_Key, asyncio.Task[WarmParent]] = {}
        self._dropped: dict[asyncio.Task[WarmParent], asyncio.Task[None]] = {}
        """Branches that are not used any more, each with the task that ends it."""
        self._pids: dict[_Key, tuple[int, int]] = {}
        """Of each branch: its process, and the warm parent that it was forked from."""
        self._bad: dict[str, str] = {}

    def prepare(self, command: Command) -> None:
        """Begin to import ahead what a command needs, at the command's priority, if nothing has begun it yet."""
        key = _key(command)
        if self._modules(command) and key not in self._tasks:
            self._begin(key, command, background=command.background)

    async def of(self, command: Command) -> WarmParent | None:
        """Return the branch for a command, once it is ready; None if the command must start without one."""
        key = _key(command)
        if not self._modules(command):
            return None
        for _ in range(2):
            if key not in self._tasks:
                self._begin(key, command, background=False)
            elif key in self._pids:
                hasten(*self._pids[key])
            task = self._tasks[key]
            try:
                branch = await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled():  # too many others are wanted
                    return None
                raise
            except NotWarmError as problem:
                _log.info("%s starts without imports ahead: %s", command.argv[0], problem)
                return None
            if branch.gone or await asyncio.to_thread(_is_outdated, branch):
                self._drop(key)
                continue
            self._tasks[key] = self._tasks.pop(key)  # the last one was used last
            return branch if _fits(branch, command) else None
        return None

    async def close(self) -> None:
        """End all branches."""
        tasks = [*self._tasks.values(), *self._dropped]
        self._tasks.clear()
        await asyncio.gather(*(_end(task) for task in tasks), return_exceptions=True)
        await asyncio.gather(*self._dropped.values(), return_exceptions=True)

    def _modules(self, command: Command) -> tuple[str, ...]:
        return tuple(module for module in command.preload if module not in self._bad)

    def _begin(self, key: _Key, command: Command, *, background: bool) -> None:
        for old in list(self._tasks)[: len(self._tasks) - MOST + 1]:
            self._drop(old)
        self._tasks[key] = task = asyncio.create_task(self._make(key, command, background))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may be asked for never

    def _drop(self, key: _Key) -> None:
        """Forget a branch. It ends when its last worker has ended."""
        task = self._tasks.pop(key)
        self._pids.pop(key, None)
        closing = self._dropped[task] = asyncio.create_task(_end(task, when_idle=True))
        closing.add_done_callback(lambda _: self._dropped.pop(task, None))

    async def _make(self, key: _Key, command: Command, background: bool) -> WarmParent:
        for _ in range(_TRIES):
            modules = self._modules(command)
            if not modules:
                break
            branch = await self._fork(key, command, modules, background)
            if not branch.bad:
                return branch
            self._bad |= branch.bad
            _log.info("not imported ahead: %s", "; ".join(f"{name}: {why}" for name, why in branch.bad.items()))
            await branch.close()
        raise NotWarmError("none of its modules can be imported ahead")

    async def _fork(self, key: _Key, command: Command, modules: tuple[str, ...], background: bool) -> WarmParent:
        parent = await self._parent_of(command)
        folder = Path(tempfile.mkdtemp(prefix="bftrainer-", dir=self._folder))
        path = folder / "socket"
        connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        connected = asyncio.get_running_loop().create_future()

        def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if connected.done():
                writer.close()
            else:
                connected.set_result((reader, writer))

        server: asyncio.Server | None = None
        process: Process | None = None
        try:
            server = await asyncio.start_unix_server(take, path, limit=1 << 22)
            process = await parent.start(_program(command, path, modules, background))
            self._pids[key] = process.pid, parent.process.pid
            ended = asyncio.ensure_future(process.wait())
            either: list[asyncio.Future[Any]] = [connected, ended]
            await asyncio.wait(either, timeout=_CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if not connected.done():
                raise NotWarmError("the branch of the warm parent did not begin")
            return await WarmParent.connected(process, *connected.result())
        except BaseException:
            if process is not None:
                process.kill_group()
            raise
        finally:
            if server is not None:
                server.close()
            # At once: a launcher that is killed leaves nothing behind then.
            shutil.rmtree(folder, ignore_errors=True)


def _key(command: Command) -> _Key:
    return what_loading_reads(command), folder_of(command.argv, command.cwd), command.preload


def _program(command: Command, path: Path, modules: tuple[str, ...], background: bool) -> Command:
    argv = ("-m", "bftrainer.processes.ahead.branch", str(path), folder_of(command.argv, command.cwd), *modules)
    env = {name: value for name, value in command.env.items() if name not in _OF_WORKERS}
    return replace(command, argv=argv, env=env, output=None, background=background, cores=(), preload=())


def _fits(branch: WarmParent, command: Command) -> bool:
    """Whether the imports would have read the same in the command's environment."""
    different = [name for name, value in branch.reads.items() if command.env.get(name) != value]
    if different:
        _log.info("%s starts without imports ahead: they have read another %s", command.argv[0], different[0])
    return not different


def _is_outdated(branch: WarmParent) -> bool:
    """Whether a file of the user's own that was imported has changed since."""
    return any(stamp(path) != known for path, known in branch.files.items())


async def _end(task: asyncio.Task[WarmParent], *, when_idle: bool = False) -> None:
    """End a branch with its workers, or after the last of them has ended."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, NotWarmError):
        branch = await task
        await (branch.close_when_idle() if when_idle else branch.close())
