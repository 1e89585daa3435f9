"""Warm launcher: forks workers in milliseconds from a parent process, which has already imported torch.

This module is the manager's side, `WarmLauncher`; the other side, `forker.main`, runs in the warm parent. They exchange
lines of JSON over a socket pair: commands and signals go to the parent, process ids and exit statuses come back.
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

from bftrainer.errors import BFTrainerError
from bftrainer.processes.launch import ColdLauncher, ColdProcess, Command, Process, open_output, spawn

READY_S = 120.0
"""Seconds that the imports may take before workers are started without them."""

PARENTS = 4
"""Maximum number of warm parents. Each holds its imports in memory, and commands rarely need different parents."""

READ_AT_LOAD = (
    *("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_"),
    *("TORCH_", "PYTORCH_"),
)
"""Variables that programs and libraries read when they are loaded, such as OMP_NUM_THREADS. After a fork it is too late
to change them, so a command that differs in one of them gets another parent."""

_log = logging.getLogger(__name__)

_MAIN = "import sys; sys.flags.safe_path or sys.path.pop(0); from bftrainer.processes.forker import main; main()"
"""Program of the warm parent. `-m` would put the working directory first on the path of the imports."""


PRELOAD = ("torch", "torch._dynamo", "bftrainer.elastic.torch.run")


class WarmLauncher:
    """Forks Python scripts from a warm parent.

    Everything else, or if that fails everything, starts as in `ColdLauncher`.

    The parent is started with the first command, or by `prepare`. `preload` names the modules that it imports.
    """

    def __init__(self, python: str = sys.executable, preload: tuple[str, ...] = PRELOAD) -> None:
        self._python = python
        self._preload = preload
        self._cold = ColdLauncher(python)
        self._parents: dict[tuple[str, ...], asyncio.Task[_Parent]] = {}

    async def start(self, command: Command) -> Process:
        """See `ProcessLauncher`."""
        if command.python and _is_plain(command):
            try:
                parent = await self._parent(command)
                return await parent.start(command)
            except _NotWarmError as problem:
                _log.warning("%s starts without the warm parent: %s", command.argv[0], problem)
        return await self._cold.start(command)

    def prepare(self, environment: Mapping[str, str], inherited: tuple[int, socket.socket] | None = None) -> None:
        """Start a parent for commands with this environment before the first command comes.

        `inherited` is a parent that `forker.fork_forker` returned, for this launcher's interpreter. When it ends, the
        next command gets a new parent as usual.
        """
        command = Command((), environment, os.getcwd(), None)  # noqa: PTH109
        key = _what_loading_reads(command)
        if key not in self._parents:
            self._parents[key] = asyncio.create_task(self._first_parent(command, inherited))

    async def close(self) -> None:
        """See `ProcessLauncher`."""
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
        """Return the warm parent for a command, once it is ready."""
        key = _what_loading_reads(command)
        for known, task in list(self._parents.items()):
            # A parent that never got ready stays, with its error: the next one would fail too.
            if task.done() and task.exception() is None and task.result().gone:
                del self._parents[known]
        if key not in self._parents:
            if len(self._parents) >= PARENTS:
                raise _NotWarmError(f"there are {PARENTS} with other settings")
            self._parents[key] = asyncio.create_task(_Parent.spawned(command, self._python, self._preload))
        return await asyncio.shield(self._parents[key])


class _NotWarmError(BFTrainerError):
    """The command cannot be started by a warm parent."""


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
        self._knows_cores = False
        self._is_ready: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def spawned(cls, command: Command, python: str, preload: tuple[str, ...]) -> _Parent:
        """Start a warm parent and wait until it has done its imports."""
        ours, theirs = socket.socketpair()
        with theirs:
            argv = (python, "-c", _MAIN, str(theirs.fileno()), *preload)
            process = spawn(Command(argv, command.env, command.cwd, None, python=False), python, (theirs.fileno(),))
        return await cls.ready(process, ours)

    @classmethod
    async def ready(cls, process: ColdProcess, ours: socket.socket) -> _Parent:
        """Return the warm parent at the other end of a socket, once it has done its imports."""
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
            _log.warning("the warm parent continues without a module: %s", problem)
        return parent

    async def start(self, command: Command) -> WarmProcess:
        """Fork a process."""
        output = open_output(command)  # raises an error if the file cannot be written
        if output is not None:
            os.close(output)
        if self.gone:
            raise _NotWarmError("it has just ended")
        self._number += 1
        started: asyncio.Future[WarmProcess] = asyncio.get_running_loop().create_future()
        self._starting[self._number] = started
        fields = {**asdict(command), "env": dict(command.env)}
        if not self._knows_cores:
            del fields["cores"]  # the BFTrainer of that interpreter is of a version without it
        self.send(start=self._number, command=fields)
        try:
            return await started
        except asyncio.CancelledError:
            # The cancelled caller cannot end the process any more.
            if not started.cancel() and not started.cancelled() and started.exception() is None:
                started.result().kill_group()
            raise

    def send(self, **message: Any) -> None:
        """Send a message, unless the parent is gone."""
        if not self.gone:
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def close(self) -> None:
        """End the parent. It ends its children first and reports how they ended."""
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
        # Its children die with the parent, but not before it: until it has ended they may be alive.
        self.process.kill_group()
        await self.process.wait()
        self._writer.close()
        if not self._is_ready.done():
            self._is_ready.set_exception(_NotWarmError("it ended during its imports"))
            self._is_ready.exception()  # marks the error as seen: no task may be waiting any more
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
                self._knows_cores = "cores" in message
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
    """A child of this process that no `Popen` started: the part of `Popen` that `ColdProcess` needs."""

    pid: int
    returncode: int | None = None

    def wait(self) -> int:
        """Reap the child and return its exit status."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _adopt(pid: int) -> ColdProcess:
    return ColdProcess(cast("subprocess.Popen[bytes]", _Fork(pid)))


class WarmProcess:
    """A child of a warm parent. Only the parent knows whether the process id is still valid. See `Process`."""

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
