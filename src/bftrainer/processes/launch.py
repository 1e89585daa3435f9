"""Process launching: a `ProcessLauncher` takes a `Command` and starts a `Process`.

The coordinator and the node agents use it. `ColdLauncher` starts a fresh program each time; `warm.py` forks one from a
parent that has already imported torch. Every started process leads a process group and dies with the process that
started it, even if that one is killed. Processes that it has left behind end with it (`strays.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from signal import SIGKILL
from typing import Any, Protocol

from bftrainer.errors import InputError
from bftrainer.processes import strays, variables


@dataclass(frozen=True, slots=True)
class Command:
    """A program to run: its arguments, environment, working directory and output file."""

    argv: tuple[str, ...]
    """A Python script (or `-m` and a module) with its arguments; with `python=False` any program."""
    env: Mapping[str, str]
    """The complete environment."""
    cwd: str
    output: str | None
    """The file that stdout and stderr are appended to; None: those of the caller."""
    python: bool = True
    background: bool = False
    """Start at idle CPU priority, if the process may leave it again by `foreground()`."""
    cores: tuple[int, ...] = ()
    """The CPU cores that the process may run on, as far as they exist; empty: those of the caller."""
    preload: tuple[str, ...] = ()
    """Modules that the script imports, so that a warm parent may import them ahead; see `ahead`."""


@dataclass(frozen=True, slots=True)
class RunAs:
    """The account that a process runs under from its first instruction on. Only root can start one for another."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


class Process(Protocol):
    """A started process, the leader of its own process group."""

    @property
    def pid(self) -> int:
        """Process id, which may belong to another process once this one has ended."""

    async def wait(self) -> int:
        """Return the exit status as `subprocess` does (negative: the signal). All processes it started are gone too."""

    def signal(self, signum: int) -> None:
        """Signal the process alone. Nothing happens once it has ended."""

    def kill_group(self, signum: int = SIGKILL) -> None:
        """Signal the process and all processes it started in its group. Nothing happens once it has ended."""


class ProcessLauncher(Protocol):
    """Starts processes and ends them."""

    async def start(self, command: Command) -> Process:
        """Start a process. Raises an `InputError` for a command that cannot be started."""

    async def close(self) -> None:
        """Kill all processes that still run and wait for them."""


class ColdLauncher:
    """Starts a fresh program each time.

    The thread that calls `start` must live as long as its processes: they die with that thread.
    """

    def __init__(self, python: str = sys.executable, run_as: RunAs | None = None) -> None:
        self._python = python
        self._run_as = run_as
        self._running: set[ColdProcess] = set()

    async def start(self, command: Command) -> Process:
        """See `ProcessLauncher`."""
        process = spawn(command, self._python, run_as=self._run_as)
        self._running.add(process)
        process.exited.add_done_callback(lambda _: self._running.discard(process))
        return process

    async def close(self) -> None:
        """See `ProcessLauncher`."""
        running = tuple(self._running)
        for process in running:
            process.kill_group()
        await asyncio.gather(*(process.wait() for process in running))


class ColdProcess:
    """A child of this process. See `Process`."""

    def __init__(self, popen: subprocess.Popen[bytes], mark: str = "") -> None:
        """`mark` is in the environment of the process and of all processes that it starts."""
        self._popen = popen
        self._mark = mark
        self._loop = asyncio.get_running_loop()
        # One lock for signalling and reaping the child, so that no signal reaches a process that got its id later.
        self._reaping = threading.Lock()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._watch, name=f"wait for {popen.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        """See `Process`."""
        return self._popen.pid

    async def wait(self) -> int:
        """See `Process`."""
        return await asyncio.shield(self.exited)

    def signal(self, signum: int) -> None:
        """See `Process`."""
        with self._reaping, suppress(ProcessLookupError):
            if self._popen.returncode is None:
                os.kill(self.pid, signum)

    def kill_group(self, signum: int = SIGKILL) -> None:
        """See `Process`."""
        with self._reaping, suppress(ProcessLookupError):
            if self._popen.returncode is None:
                os.killpg(self.pid, signum)

    def _watch(self) -> None:
        wait_for_end(self.pid)
        with self._reaping:
            end_group(self.pid)
            status = self._popen.wait()
        if self._mark:
            strays.end_marked(self._mark)
        with suppress(RuntimeError):  # the loop may be closed by now
            self._loop.call_soon_threadsafe(self._ended, status)

    def _ended(self, status: int) -> None:
        if not self.exited.done():
            self.exited.set_result(status)


def spawn(
    command: Command, python: str = sys.executable, keep: tuple[int, ...] = (), run_as: RunAs | None = None
) -> ColdProcess:
    """Start a child of the running loop's thread. It inherits the descriptors in `keep`."""
    account: dict[str, Any] = {}
    if run_as is not None:
        # Another account's processes must not write to this one's files: without a file of their own they are silent.
        account = {"user": run_as.uid, "group": run_as.gid, "extra_groups": list(run_as.groups), "umask": 0o022}
    argv = [python, *command.argv] if command.python else _resolved(command)
    output = open_output(command)
    mark = strays.new_mark()
    shown = subprocess.DEVNULL if output is None and run_as is not None else output
    try:
        popen = subprocess.Popen(  # noqa: S603 - running what the caller asks for is the purpose
            dying_with(os.getpid(), argv, command.background, command.cores),
            env={**command.env, strays.MARK: mark},
            cwd=command.cwd,
            stdin=subprocess.DEVNULL,
            stdout=shown,
            stderr=shown,
            start_new_session=True,
            pass_fds=keep,
            **account,
        )
    except (OSError, ValueError) as problem:
        raise InputError(f"cannot start {' '.join(command.argv)} in {command.cwd}: {problem}") from None
    finally:
        if output is not None:
            os.close(output)
    return ColdProcess(popen, mark)


def dying_with(parent: int, argv: Sequence[str], background: bool = False, cores: tuple[int, ...] = ()) -> list[str]:
    """Return the command line that runs `argv` so that it dies with its parent; 0 stands for any parent that starts it.

    It goes through a second program, because a `preexec_fn` could deadlock in a process with threads.
    """
    return [sys.executable, "-I", "-S", "-c", _stub(background, cores), str(parent), *argv]


def open_output(command: Command) -> int | None:
    """Return the descriptor of the file for the command's output."""
    if command.output is None:
        return None
    try:
        return os.open(Path(command.cwd, command.output), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as problem:
        raise InputError(f"cannot write the output of {' '.join(command.argv)}: {problem}") from None


def _resolved(command: Command) -> list[str]:
    program = command.argv[0]
    if os.sep in program:
        program = str(Path(command.cwd, program))
    path = shutil.which(program, path=command.env.get("PATH", os.defpath))
    if path is None:
        raise InputError(f"cannot start {' '.join(command.argv)}: there is no program {command.argv[0]}")
    return [path, *command.argv[1:]]


def wait_for_end(pid: int, options: int = 0) -> bool:
    """Wait until a child has ended, and leave it a zombie: its id is not reused until it is reaped."""
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | options) is not None
    return True


def end_group(pid: int) -> None:
    """Kill the processes that an ended, not yet reaped child has left in its group: a node is handed back empty."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that started it is gone; on other systems do nothing."""
    try:
        import ctypes

        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (ImportError, OSError, AttributeError):
        return
    prctl(1, int(signum), 0, 0, 0)  # PR_SET_PDEATHSIG
    if parent and os.getppid() != parent:  # the parent was gone before
        os._exit(128 + signum)


def keep_to_cores(cores: tuple[int, ...]) -> None:
    """Let this thread, and what it starts, run only on these CPU cores. Does nothing if none of them may be used."""
    # A start never fails because of this. Python does not know the call on every system.
    with suppress(OSError, ValueError, OverflowError, AttributeError):
        os.sched_setaffinity(0, cores)  # the kernel ignores cores that do not exist, unless there is no other


def go_to_background() -> None:
    """Put this thread, and what it starts, at idle CPU priority, unless it could not come back from there.

    Does nothing where whoever runs this process has chosen that priority: `foreground` then leaves it there.
    """

    def probe() -> None:
        # Whether a thread may come back depends on capabilities, limits and namespaces. Only the kernel knows, and it
        # keeps priorities by thread: a thread that is about to end can try.
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            allowed.append(True)

    allowed: list[bool] = []
    if hasattr(os, "SCHED_IDLE") and os.sched_getscheduler(0) != os.SCHED_IDLE:
        thread = threading.Thread(target=probe)
        thread.start()
        thread.join()
    if allowed:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        os.environ["BFTRAINER_BACKGROUND"] = "1"  # `variables.BACKGROUND`; this code also runs without that module


def foreground() -> None:
    """Put this process, with all its threads, back to normal CPU priority if it was started in the background."""
    if not os.environ.pop(variables.BACKGROUND, ""):
        return
    tasks = Path("/proc/self/task")
    found_idle = True
    while found_idle:  # a thread at idle priority may start another one during a pass
        found_idle = False
        for tid in [int(task.name) for task in tasks.iterdir()]:
            with suppress(ProcessLookupError, PermissionError):  # we put no thread there that cannot come back
                if os.sched_getscheduler(tid) == os.SCHED_IDLE:
                    os.sched_setscheduler(tid, os.SCHED_OTHER, os.sched_param(0))
                    found_idle = True


def hasten(pid: int, parent: int) -> None:
    """Put a process that was started in the background back to normal CPU priority, if this process may do that.

    If its parent is at idle priority, whoever runs that has chosen it, also for what it starts.
    """
    with suppress(OSError, AttributeError):
        if os.sched_getscheduler(parent) != os.SCHED_IDLE:
            os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))


@cache
def _stub(background: bool, cores: tuple[int, ...]) -> str:
    """Return a program to run between fork and exec.

    It is made of the functions above, because importing them takes too long.
    """
    lines = ["import os, signal, sys, threading" if background else "import os, signal, sys"]
    lines += ["from contextlib import suppress", inspect.getsource(die_with_parent)]
    lines += [inspect.getsource(keep_to_cores), f"keep_to_cores({cores!r})"] if cores else []
    lines += [inspect.getsource(go_to_background), "go_to_background()"] if background else []
    lines += ["die_with_parent(int(sys.argv[1]))", "os.execvp(sys.argv[2], sys.argv[2:])"]
    return "\n".join(lines)
