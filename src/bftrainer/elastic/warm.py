"""A `Launcher` that forks workers in milliseconds from a parent that has imported torch already.

This is the manager's side, `WarmLauncher`; the other side, `forker.main`, runs in the warm parent. They speak lines of
JSON over a socket pair: commands and signals go there, process ids and exit statuses come back.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any, cast

from bftrainer.elastic.processes import ColdLauncher, ColdProcess, Command, Process, open_output, spawn
from bftrainer.errors import BFTrainerError

READY_S = 120.0
"""How long the imports may take before workers are started without them."""

PARENTS = 4
"""Warm parents at a time. Each holds its imports in memory, and commands rarely differ in what makes a new one."""

READ_AT_LOAD = (
    *("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_"),
    *("TORCH_", "PYTORCH_"),
)
"""Variables that programs and libraries read when they are loaded (OMP_NUM_THREADS is one): too late after a fork. A
command that differs in one of them gets another parent."""

_log = logging.getLogger(__name__)

_MAIN = "import sys; sys.flags.safe_path or sys.path.pop(0); from bftrainer.elastic.forker import main; main()"
"""Not `-m`, which would put the working directory first on the path of the imports."""


PRELOAD = ("torch", "torch._dynamo", "bftrainer.elastic.adapter")


class WarmLauncher:
    """Forks Python scripts from a warm parent; starts everything else, and all if that fails, as `ColdLauncher` does.

    The parent is started with the first command, or by `prepare`. `preload` names the modules it imports.
    """

    def __init__(self, python: str = sys.executable, preload: tuple[str, ...] = PRELOAD) -> None:
        self._python = python
        self._preload = preload
        self._cold = ColdLauncher(python)
        self._parents: dict[tuple[str, ...], asyncio.Task[_Parent]] = {}

    async def start(self, command: Command) -> Process:
        """See `Launcher`."""
        if command.python and _is_plain(command):
            try:
                parent = await self._parent(command)
                return await parent.start(command)
            except _NotWarmError as problem:
                _log.warning("%s starts without the warm parent: %s", command.argv[0], problem)
        return await self._cold.start(command)

    def prepare(self, environment: Mapping[str, str], inherited: tuple[int, socket.socket] | None = None) -> None:
        """Have a parent for commands with such an environment before the first one comes.

        `inherited` is one that `forker.fork_forker` gave, for this launcher's interpreter. When it ends, the next
        command gets another parent, as ever.
        """
        command = Command((), environment, os.getcwd(), None)  # noqa: PTH109
        key = _what_loading_reads(command)
        if key not in self._parents:
            self._parents[key] = asyncio.create_task(self._first_parent(command, inherited))

    async def close(self) -> None:
        """See `Launcher`."""
        tasks = list(self._parents.values())
        self._parents.clear()
        for task in tasks:
            task.cancel()
        for parent in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(parent, _Parent):
                await parent.close()
        await self._cold.close()

    async def _first_parent(self, command: Command, inherited: tuple[int, socket.socket] | None) -> _Parent:
        if inherited is not None:
            pid, connection = inherited
            try:
                return await _Parent.ready(_adopt(pid), connection)
            except _NotWarmError as problem:
                _log.warning("a new warm parent replaces the inherited one: %s", problem)
        return await _Parent.spawned(command, self._python, self._preload)

    async def _parent(self, command: Command) -> _Parent:
        """The warm parent for a command, once it is ready."""
        key = _what_loading_reads(command)
        for known, task in list(self._parents.items()):
            # One that never got ready stays, and with it its error: the next would do no better.
            if task.done() and task.exception() is None and task.result().gone:
                del self._parents[known]
        if key not in self._parents:
            if len(self._parents) >= PARENTS:
                raise _NotWarmError(f"there are {PARENTS} with other settings")
            self._parents[key] = asyncio.create_task(_Parent.spawned(command, self._python, self._preload))
        return await asyncio.shield(self._parents[key])


class _NotWarmError(BFTrainerError):
    """The command must be started another way."""


def _is_plain(command: Command) -> bool:
    script = Path(command.cwd, command.argv[0])
    if command.argv[0] == "-m":
        return Path(command.cwd).is_dir()
    return script.is_file() and script.suffix not in (".zip", ".pyz", ".pyc")


def _what_loading_reads(command: Command) -> tuple[str, ...]:
    env = command.env
    key = [f"{name}={env[name]}" for name in sorted(env) if name.startswith(READ_AT_LOAD)]
    folders = env["PYTHONPATH"].split(os.pathsep) if env.get("PYTHONPATH") else []
    return (*key, command.cwd) if any(not os.path.isabs(folder) for folder in folders) else tuple(key)  # noqa: PTH117


class _Parent:
    """The manager's end of one warm parent."""

    def __init__(self, process: ColdProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self.gone = False
        self._reader = reader
        self._writer = writer
        self._starting: dict[int, asyncio.Future[WarmProcess]] = {}
        self._running: dict[int, WarmProcess] = {}
        self._number = 0
        self._is_ready: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def spawned(cls, command: Command, python: str, preload: tuple[str, ...]) -> _Parent:
        """Start one, and wait until it has done its imports."""
        ours, theirs = socket.socketpair()
        with theirs:
            argv = (python, "-c", _MAIN, str(theirs.fileno()), *preload)
            process = spawn(Command(argv, command.env, command.cwd, None, python=False), python, (theirs.fileno(),))
        return await cls.ready(process, ours)

    @classmethod
    async def ready(cls, process: ColdProcess, ours: socket.socket) -> _Parent:
        """The one at the other end of a socket, once it has done its imports."""
        try:
            parent = cls(process, *await asyncio.open_unix_connection(sock=ours))
        except BaseException:
            process.kill_group()
            ours.close()
            raise
        try:
            async with asyncio.timeout(READY_S):
                problems = await parent._is_ready
        except BaseException as failure:
            process.kill_group()
            await parent.close()
            if isinstance(failure, TimeoutError):
                raise _NotWarmError(f"it was not ready after {READY_S:g} s") from None
            raise
        for problem in problems:
            _log.warning("the warm parent goes on without a module: %s", problem)
        return parent

    async def start(self, command: Command) -> WarmProcess:
        """Fork a process."""
        output = open_output(command)  # says what is wrong with it, if anything is
        if output is not None:
            os.close(output)
        if self.gone:
            raise _NotWarmError("it has just ended")
        self._number += 1
        started: asyncio.Future[WarmProcess] = asyncio.get_running_loop().create_future()
        self._starting[self._number] = started
        self.send(start=self._number, command={**asdict(command), "env": dict(command.env)})
        try:
            return await started
        except asyncio.CancelledError:
            # Whoever was cancelled cannot end it any more.
            if not started.cancel() and not started.cancelled() and started.exception() is None:
                started.result().kill_group()
            raise

    def send(self, **message: Any) -> None:
        """Send a message, unless there is nobody to read it."""
        if not self.gone:
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def close(self) -> None:
        """End it; it ends its children first, and says how they ended."""
        with suppress(OSError):
            self._writer.write_eof()
        try:
            async with asyncio.timeout(10):
                await asyncio.shield(self._reading)
        except TimeoutError:
            self.process.kill_group()
        await self.process.wait()
        await self._reading

    async def _read(self) -> None:
        with suppress(OSError, ValueError):
            while line := await self._reader.readline():
                self._handle(json.loads(line))
        self.gone = True
        # Its children die with it, but not before it: until the kernel says it has ended they may be alive.
        self.process.kill_group()
        await self.process.wait()
        self._writer.close()
        if not self._is_ready.done():
            self._is_ready.set_exception(_NotWarmError("it ended during its imports"))
            self._is_ready.exception()  # nobody may be waiting any more
        for started in self._starting.values():
            if not started.done():
                started.set_exception(_NotWarmError("it ended"))
        for process in self._running.values():
            process.exited.set_result(-signal.SIGKILL)
        self._starting.clear()
        self._running.clear()

    def _handle(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"problems": problems}:
                if not self._is_ready.done():
                    self._is_ready.set_result(problems)
            case {"started": number, "pid": pid}:
                process = self._running[number] = WarmProcess(self, number, pid)
                started = self._starting.pop(number)
                if started.done():
                    process.kill_group()
                else:
                    started.set_result(process)
            case {"failed": number, "why": why}:
                started = self._starting.pop(number)
                if not started.done():
                    started.set_exception(_NotWarmError(why))
            case {"exited": number, "status": status}:
                self._running.pop(number).exited.set_result(status)


@dataclass(slots=True)
class _Fork:
    """A child of this process that no `Popen` has started: the part of it that `ColdProcess` needs."""

    pid: int
    returncode: int | None = None

    def wait(self) -> int:
        """Reap it."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _adopt(pid: int) -> ColdProcess:
    return ColdProcess(cast("subprocess.Popen[bytes]", _Fork(pid)))


class WarmProcess:
    """A child of a warm parent, which alone knows whether its id is still its own. See `Process`."""

    def __init__(self, parent: _Parent, number: int, pid: int) -> None:
        self.pid = pid
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._parent = parent
        self._number = number

    async def wait(self) -> int:
        """See `Process`."""
        return await asyncio.shield(self.exited)

    def signal(self, signum: int) -> None:
        """See `Process`."""
        self._parent.send(signal=int(signum), to=self._number, group=False)

    def kill_group(self, signum: int = SIGKILL) -> None:
        """See `Process`."""
        self._parent.send(signal=int(signum), to=self._number, group=True)
