"""A `Launcher` that forks workers in milliseconds from a parent that has imported torch already.

The manager's side is `WarmLauncher`; the other side, `main`, runs in the warm parent. They speak lines of JSON over a
socket pair: commands and signals go there, process ids and exit statuses come back. The warm parent has one thread,
runs no torch operation and never touches a GPU, so that what it forks is as good as a fresh interpreter.
"""

from __future__ import annotations

import asyncio
import builtins
import gc
import importlib
import io
import json
import logging
import os
import random
import runpy
import select
import signal
import socket
import sys
import time
import types
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.machinery import SourceFileLoader
from pathlib import Path
from signal import SIGKILL
from typing import Any

from bftrainer.elastic.processes import (
    ColdLauncher,
    ColdProcess,
    Command,
    Process,
    die_with_parent,
    end_group,
    go_to_background,
    open_output,
    spawn,
    wait_for_end,
)
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

_MAIN = "import sys; sys.flags.safe_path or sys.path.pop(0); from bftrainer.elastic.warm import main; main()"
"""Not `-m`, which would put the working directory first on the path of the imports."""


PRELOAD = ("torch", "bftrainer.elastic.adapter")


class WarmLauncher:
    """Forks Python scripts from a warm parent; starts everything else, and all if that fails, as `ColdLauncher` does.

    The parent is started with the first command. `preload` names the modules it imports.
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
            self._parents[key] = asyncio.create_task(_Parent.ready(command, self._python, self._preload))
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
    async def ready(cls, command: Command, python: str, preload: tuple[str, ...]) -> _Parent:
        """Start one, and wait until it has done its imports."""
        ours, theirs = socket.socketpair()
        with theirs:
            argv = (python, "-c", _MAIN, str(theirs.fileno()), *preload)
            process = spawn(Command(argv, command.env, command.cwd, None, python=False), python, (theirs.fileno(),))
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
            started.cancel()  # whoever was cancelled cannot end it any more
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


def main() -> None:
    """The warm parent: import, then fork until the manager goes. In the forked child: run the script, then return."""
    _, descriptor, *preload = sys.argv
    manager = socket.socket(fileno=int(descriptor))
    manager.set_inheritable(False)
    forked = _Forker(manager, preload).serve()
    if forked is None:
        os._exit(0)  # exit handlers of what was imported belong to the children
    _become(forked)
    run_as_main(forked.argv)


class _Forker:
    """What the warm parent knows."""

    def __init__(self, manager: socket.socket, preload: list[str]) -> None:
        self._manager = manager
        self._preload = preload
        self._pids: dict[int, int] = {}
        self._pid = os.getpid()
        self._woken, self._waker = socket.socketpair()
        self._rest = b""
        self._ending = False

    def serve(self) -> Command | None:
        """Fork what the manager asks for. Returns the command in each forked child, None at the end."""
        problems = [problem for module in self._preload if (problem := _import(module))]
        for end in (self._woken, self._waker):
            end.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._stop)
        # From here on there are children to end first, so the manager's death no longer kills.
        die_with_parent(os.getppid(), signal.SIGTERM)
        gc.collect()
        gc.freeze()  # so that the children's collections leave the shared pages alone
        self._tell(problems=problems)
        polling = select.poll()
        polling.register(self._manager, select.POLLIN)
        polling.register(self._woken, select.POLLIN)
        while not self._ending:
            ready = {descriptor for descriptor, _ in polling.poll()}
            if self._woken.fileno() in ready:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
                self._reap(os.WNOHANG)
            if self._manager.fileno() in ready:
                for message in self._receive():
                    command = self._obey(message)
                    if command is not None:
                        return command
        for pid in self._pids.values():
            self._signal(pid, signal.SIGKILL, group=True)
        self._reap(0)
        return None

    def _receive(self) -> list[Any]:
        received = b""
        with suppress(ConnectionError):
            received = self._manager.recv(1 << 20)
        self._ending = self._ending or not received
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def _stop(self, *_: object) -> None:
        self._ending = True

    def _obey(self, message: Mapping[str, Any]) -> Command | None:
        if "start" in message:
            return self._fork(message["start"], Command(**message["command"]))
        pid = self._pids.get(message["to"])
        if pid is not None:
            self._signal(pid, message["signal"], message["group"])
        return None

    def _fork(self, number: int, command: Command) -> Command | None:
        # No signal may reach the child while it has this process's handlers: it would be lost.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():
                # The threads it warns of are those of idle BLAS pools, which know about forks.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as problem:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._tell(failed=number, why=f"cannot fork: {problem}")
            return None
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._pids[number] = pid
            self._tell(started=number, pid=pid)
            return None
        die_with_parent(self._pid)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for end in (self._manager, self._woken, self._waker):
            end.close()
        for signum in signal.valid_signals():
            if callable(signal.getsignal(signum)) and signal.getsignal(signum) is not signal.default_int_handler:
                signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return command

    def _signal(self, pid: int, signum: int, group: bool) -> None:
        try:
            (os.killpg if group else os.kill)(pid, signum)
        except ProcessLookupError:
            if group:  # so young that it does not lead its group yet, and is alone
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)

    def _reap(self, options: int) -> None:
        for number, pid in list(self._pids.items()):
            if wait_for_end(pid, options):
                end_group(pid)
                _, status = os.waitpid(pid, 0)
                del self._pids[number]
                self._tell(exited=number, status=os.waitstatus_to_exitcode(status))

    def _tell(self, **message: Any) -> None:
        with suppress(OSError):  # the manager is gone, which the loop will see
            self._manager.sendall(json.dumps(message).encode() + b"\n")


def _import(module: str) -> str | None:
    """Import a module; what went wrong, if anything."""
    try:
        importlib.import_module(module)
    except Exception as problem:
        return f"{module}: {type(problem).__name__}: {problem}"[:1000]
    return None


def _become(command: Command) -> None:
    """Make this forked process what a fresh interpreter started by the command would be."""
    if command.background:
        go_to_background()
    env = dict(command.env)
    if "LC_CTYPE" in os.environ:  # Python itself may have set it, as it would in a fresh start
        env.setdefault("LC_CTYPE", os.environ["LC_CTYPE"])
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    os.chdir(command.cwd)
    output = open_output(command)
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=os.isatty(1))
    sys.orig_argv = [sys.executable, *command.argv]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        # Its own generator for the CPU starts anywhere, those of the GPUs at a constant: leave them alone.
        sys.modules["torch"].default_generator.seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "multiprocessing.resource_tracker" in sys.modules:
        # A tracker that a preloaded module started is the parent's: each child needs its own.
        tracker = sys.modules["multiprocessing.resource_tracker"]._resource_tracker
        tracker._fd = tracker._pid = None


def run_as_main(argv: tuple[str, ...]) -> None:
    """Run a script, or `-m` and a module, as the interpreter does: it sees itself as `__main__`, with its folder first
    on the path, and an error shows no trace of the caller.
    """
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module
    folder = Path.cwd() if argv[0] == "-m" else Path(os.path.realpath(argv[0])).parent
    if not sys.flags.safe_path:
        sys.path.insert(0, str(folder))
    try:
        if argv[0] == "-m":
            sys.argv = ["-m", *argv[2:]]
            runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
        else:
            sys.argv = list(argv)
            path = str(Path.cwd() / argv[0])
            loader = SourceFileLoader("__main__", path)
            module.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
            exec(loader.source_to_code(loader.get_data(path), path), module.__dict__)  # noqa: S102 - that is the task
    except SystemExit:
        raise
    except BaseException as problem:
        trace = problem.__traceback__
        while trace is not None and trace.tb_frame.f_globals is globals():
            trace = trace.tb_next
        sys.excepthook(type(problem), problem.with_traceback(trace), trace)
        # The interpreter still has to end as it does after an error, but has nothing more to say about it.
        sys.excepthook = lambda *_: None
        raise
