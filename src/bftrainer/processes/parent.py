"""Warm parent: the manager's end of one process that forks workers.

`WarmLauncher` makes warm parents and `ahead.branches` makes branches of them; `forker.py` is what runs in them. Lines
of JSON go over a socket: commands and signals to the parent, process ids and exit statuses back.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from signal import SIGKILL
from typing import Any, cast

from bftrainer.errors import BFTrainerError
from bftrainer.processes import variables
from bftrainer.processes.launch import ColdProcess, Command, Process, RunAs, open_output, spawn
from bftrainer.util.text import printable_line

READY_S = 120.0
"""Seconds that the imports may take before workers are started without them."""

PATIENCE_S = 10.0
"""Seconds that a parent has to end its children and itself."""
LAST_WORDS_S = 2.0
"""Seconds to read what a parent that has ended has still sent. Another process may hold its end of the socket open."""

READ_AT_LOAD = (
    *("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_"),
    *("TORCH_", "PYTORCH_"),
)
"""Variables that programs and libraries read when they are loaded, such as OMP_NUM_THREADS. After a fork it is too late
to change them, so a command that differs in one of them gets another parent."""

_MOST_SAID = 300
"""Characters of what a parent says that are logged: it may run under another account than the one that logs."""

_log = logging.getLogger(__name__)

_MAIN = "import sys; sys.flags.safe_path or sys.path.pop(0); from bftrainer.processes.forker import main; main()"
"""Program of the warm parent. `-m` would put the working directory first on the path of the imports."""


class NotWarmError(BFTrainerError):
    """The command cannot be started by a warm parent."""


def what_loading_reads(command: Command) -> tuple[str, ...]:
    """Return what distinguishes the warm parents that commands need."""
    env = command.env
    key = [f"{name}={env[name]}" for name in sorted(env) if name.startswith(READ_AT_LOAD)]
    folders = env["PYTHONPATH"].split(os.pathsep) if env.get("PYTHONPATH") else []
    return (*key, command.cwd) if any(not os.path.isabs(folder) for folder in folders) else tuple(key)  # noqa: PTH117


class WarmParent:
    """The manager's end of one warm parent."""

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self.gone = False
        self.reads: Mapping[str, str | None] = {}
        """Of a branch: the environment variables that its imports have read."""
        self.files: Mapping[str, list[int]] = {}
        """Of a branch: the files of the user's own that it has imported, each with its `stamp`."""
        self.bad: dict[str, str] = {}
        """Of a branch: a module that cannot be imported ahead, and why. The branch then ends."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._reader = reader
        self._writer = writer
        self._starting: dict[int, asyncio.Future[WarmProcess]] = {}
        self._running: dict[int, WarmProcess] = {}
        self._number = 0
        self._knows_cores = False
        self._is_ready: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def spawned(
        cls, command: Command, python: str, preload: tuple[str, ...], run_as: RunAs | None = None
    ) -> WarmParent:
        """Start a warm parent and wait until it has done its imports."""
        ours, theirs = socket.socketpair()
        with theirs:
            argv = (python, "-c", _MAIN, str(theirs.fileno()), *preload)
            # What it forks gets the command's environment, but shows its parent's in /proc.
            whole = Command(argv, variables.inherited(command.env), command.cwd, None, python=False)
            process = spawn(whole, python, (theirs.fileno(),), run_as)
        return await cls.ready(process, ours)

    @classmethod
    async def ready(cls, process: ColdProcess, ours: socket.socket) -> WarmParent:
        """Return the warm parent at the other end of a socket, once it has done its imports."""
        try:
            streams = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            process.kill_group()
            ours.close()
            raise
        return await cls.connected(process, *streams)

    @classmethod
    async def connected(
        cls, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> WarmParent:
        """Return the warm parent at the other end of two streams, once it has done its imports."""
        parent = cls(process, reader, writer)
        try:
            async with asyncio.timeout(READY_S):
                problems = await parent._is_ready
        except BaseException as failure:
            process.kill_group()
            await parent.close()
            if isinstance(failure, TimeoutError):
                raise NotWarmError(f"it was not ready after {READY_S:g} s") from None
            raise
        if problems:
            said = printable_line("; ".join(str(problem) for problem in problems), _MOST_SAID)
            _log.warning("the warm parent continues without a module: %s", said)
        return parent

    async def start(self, command: Command) -> WarmProcess:
        """Fork a process."""
        output = open_output(command)  # raises an error if the file cannot be written
        if output is not None:
            os.close(output)
        if self.gone:
            raise NotWarmError("it has just ended")
        self._number += 1
        started: asyncio.Future[WarmProcess] = asyncio.get_running_loop().create_future()
        self._starting[self._number] = started
        self._idle.clear()
        fields = {**asdict(command), "env": dict(command.env)}
        del fields["preload"]  # the imports are done
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

    async def close(self, patience_s: float = PATIENCE_S) -> None:
        """End the parent. It ends its children first and reports how they ended; after `patience_s` it is killed."""
        with suppress(OSError):
            self._writer.write_eof()
        try:
            async with asyncio.timeout(patience_s):
                await asyncio.shield(self._reading)
        except TimeoutError:
            self.process.kill_group()
        await self.process.wait()
        await self._reading

    async def close_when_idle(self) -> None:
        """End the parent when its last child has ended."""
        await self._idle.wait()
        await self.close()

    def _look_whether_idle(self) -> None:
        if self._running or self._starting:
            self._idle.clear()
        else:
            self._idle.set()

    async def _read(self) -> None:
        listening, ending = asyncio.create_task(self._listen()), asyncio.create_task(self.process.wait())
        await asyncio.wait((listening, ending), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((listening,), timeout=LAST_WORDS_S)
        listening.cancel()
        ending.cancel()
        self.gone = True
        # Its children die with the parent, but not before it: until it has ended they may be alive.
        self.process.kill_group()
        await self.process.wait()
        self._writer.transport.abort()  # `close` would wait for a reader that may never read
        if not self._is_ready.done():
            self._is_ready.set_exception(NotWarmError("it ended during its imports"))
            self._is_ready.exception()  # marks the error as seen: no task may be waiting any more
        for started in self._starting.values():
            if not started.done():
                started.set_exception(NotWarmError("it ended"))
        for process in self._running.values():
            process.exited.set_result(-signal.SIGKILL)
        self._starting.clear()
        self._running.clear()
        self._idle.set()

    async def _listen(self) -> None:
        """Handle what the parent says, until it ends or says what cannot be: it may run under another account."""
        try:
            while line := await self._reader.readline():
                self._handle(json.loads(line))
                self._look_whether_idle()
        except OSError:
            pass  # it has ended
        except Exception as problem:
            _log.warning("the warm parent %d said nonsense and is ended: %s", self.process.pid, repr(problem)[:200])

    def _handle(self, message: Any) -> None:
        """Handle a message. Those about unknown processes are ignored; a malformed one raises `ValueError`."""
        match message:
            case {"bad": str(module), "problem": str(problem)}:
                self.bad = {printable_line(module, _MOST_SAID): printable_line(problem, _MOST_SAID)}
                if not self._is_ready.done():
                    self._is_ready.set_result([])
            case {"problems": list(problems)}:
                reads, files = message.get("reads", {}), message.get("files", {})
                if not (isinstance(reads, dict) and isinstance(files, dict)):
                    raise ValueError(message)
                self._knows_cores, self.reads, self.files = "cores" in message, reads, files
                if not self._is_ready.done():
                    self._is_ready.set_result(problems)
            case {"started": int(number), "pid": int(pid)}:
                if (started := self._starting.pop(number, None)) is not None:
                    process = self._running[number] = WarmProcess(self, number, pid)
                    if started.done():
                        process.kill_group()
                    else:
                        started.set_result(process)
            case {"failed": int(number), "why": str(why)}:
                started = self._starting.pop(number, None)
                if started is not None and not started.done():
                    started.set_exception(NotWarmError(printable_line(why, _MOST_SAID)))
            case {"exited": int(number), "status": int(status)}:
                if (running := self._running.pop(number, None)) is not None:
                    running.exited.set_result(status)
            case {"bad": _} | {"problems": _} | {"started": _} | {"failed": _} | {"exited": _}:
                raise ValueError(message)


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


def adopt(pid: int) -> ColdProcess:
    """Return a child of this process that no `Popen` started."""
    return ColdProcess(cast("subprocess.Popen[bytes]", _Fork(pid)))


class WarmProcess:
    """A child of a warm parent. Only the parent knows whether the process id is still valid. See `Process`."""

    def __init__(self, parent: WarmParent, number: int, pid: int) -> None:
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
