"""Forker, the warm parent process: imports torch once and then forks workers that need not.

`warm.py` starts it by its `main`. Commands and signals come in as lines of JSON over a socket; process ids and exit
statuses go out. The forker has one thread, runs no torch operation and never uses a GPU, so a forked process is as good
as a fresh interpreter. A process that has done the imports itself can fork a forker with `fork_forker`.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import io
import json
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, Protocol

from bftrainer.processes import exits, start_up, strays, unguided, variables
from bftrainer.processes.launch import (
    Command,
    die_with_parent,
    end_group,
    go_to_background,
    keep_to_cores,
    open_output,
    wait_for_end,
)


def main() -> None:
    """Run the warm parent: import, then fork until the manager ends. In a forked child: run the script, then return."""
    _, descriptor, *preload = sys.argv
    manager = socket.socket(fileno=int(descriptor))
    manager.set_inheritable(False)
    serve_forks(manager, preload)


def fork_forker(preload: Sequence[str] = ()) -> tuple[int, socket.socket]:
    """Fork a warm parent from this process, which has imported what its workers need.

    Return its id and the socket to it.

    Call it in the main program, before it has started a thread, opened a descriptor or set a signal handler. In the
    forked workers the call does not return: it raises the exception that ends them, and no caller may catch that.
    """
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # otherwise the children print the buffered output again
    caller = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # as in `_Forker._fork`
        pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    die_with_parent(caller)
    os.setsid()
    ours.close()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if not sys.flags.safe_path:
        sys.path.pop(0)  # the folder of the caller's own script
    serve_forks(theirs, preload)
    raise SystemExit


class ImportsAhead(Protocol):
    """Imports for the scripts of one kind, ahead of them: see `ahead/branch.py`."""

    def do(self, modules: Sequence[str]) -> dict[str, Any]:
        """Import the modules. Return what the manager is told."""

    def begin(self, command: Command) -> None:
        """Take up a forked worker, whose script runs next."""


def serve_forks(manager: socket.socket, preload: Sequence[str], ahead: ImportsAhead | None = None) -> None:
    """Fork until the manager ends, then end. In each forked child: run its script, then return."""
    forked = _Forker(manager, preload, ahead).serve()
    if forked is None:
        os._exit(0)  # exit handlers of imported modules belong to the children
    _become(forked)
    inherited = frozenset(sys.modules)
    start_up.begin()
    if ahead is not None:
        ahead.begin(forked)
    unguided.watch()
    status = 0
    try:
        run_as_main(forked.argv)
    except SystemExit as leaving:
        if not isinstance(leaving.code, int | None):
            raise  # words, which the interpreter prints
        status = leaving.code or 0
    exits.end_forked(status & 0xFF, inherited)


class _Forker:
    """State of the warm parent."""

    def __init__(self, manager: socket.socket, preload: Sequence[str], ahead: ImportsAhead | None) -> None:
        self._manager = manager
        self._ahead = ahead
        self._preload = preload
        self._pids: dict[int, int] = {}
        self._marks: dict[int, str] = {}
        self._adopted: dict[int, set[int]] = {}
        """Processes that lost their parent, each with the workers that may have started the process."""
        self._own: set[int] = set()
        """Processes that the preloaded modules have started."""
        self._adopts = False
        """Whether what workers leave behind becomes a child of this process."""
        self._pid = os.getpid()
        self._parent = os.getppid()
        self._woken, self._waker = socket.socketpair()
        self._rest = b""
        self._ending = False

    def serve(self) -> Command | None:
        """Fork the processes that the manager requests. Return the command in each forked child, None at the end."""
        os.environ.setdefault(*variables.TORCH_LOG_LEVEL)
        if os.environ.get(variables.OWNER):
            _cache_at_home()
        gc.disable()  # the imports make half a million objects that stay: looking for garbage among them takes long
        importing = start_up.now()
        told = self._import_all()
        start_up.imported(importing, start_up.now())
        if "bad" in told:
            self._tell(**told)
            return None
        for end in (self._woken, self._waker):
            end.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._stop)
        self._own = set(strays.children())
        self._adopts = strays.become_reaper()
        # From here on there are children to end first, so the manager's death must not kill this process.
        die_with_parent(os.getppid(), signal.SIGTERM)
        gc.freeze()  # so that the children's garbage collection leaves shared pages alone
        gc.enable()
        self._tell(**told, cores=True)  # commands may have `cores`: older forkers do not know it
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
        if self._may_have_strays():
            strays.end_trees(strays.children())
        return None

    def _import_all(self) -> dict[str, Any]:
        if self._ahead is not None:
            return {"problems": [], **self._ahead.do(self._preload)}
        return {"problems": [problem for module in self._preload if (problem := _import(module))]}

    def _receive(self) -> list[Any]:
        received = b""
        with suppress(ConnectionError):
            received = self._manager.recv(1 << 20)
        self._ending = self._ending or not received
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def _stop(self, *_: object) -> None:
        # Some batch systems signal all processes of a job. While the manager lives, it decides what ends when.
        self._ending = self._ending or os.getppid() != self._parent

    def _obey(self, message: Mapping[str, Any]) -> Command | None:
        if "start" in message:
            mark = self._marks[message["start"]] = strays.new_mark()
            command = Command(**message["command"])
            return self._fork(message["start"], replace(command, env={**command.env, strays.MARK: mark}))
        pid = self._pids.get(message["to"])
        if pid is not None:
            self._signal(pid, message["signal"], message["group"])
        return None

    def _fork(self, number: int, command: Command) -> Command | None:
        # No signal may reach the child while it has this process's handlers: the signal would be lost.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():
                # The warning is about threads of idle BLAS pools, which can handle forks.
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
            if group:  # the new process does not lead its group yet, and is alone
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)

    def _reap(self, options: int) -> None:
        for number, pid in list(self._pids.items()):
            if wait_for_end(pid, options):
                end_group(pid)
                _, status = os.waitpid(pid, 0)
                del self._pids[number]
                mark = self._marks.pop(number)
                if self._may_have_strays():
                    strays.end_marked(mark)
                    self._end_adopted(number)
                self._tell(exited=number, status=os.waitstatus_to_exitcode(status))
        for pid in self._orphans():
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    self._adopted.pop(pid, None)

    def _may_have_strays(self) -> bool:
        return not self._adopts or strays.any_child()

    def _orphans(self) -> list[int]:
        """Return the children that this process has adopted."""
        if not self._may_have_strays():
            return []
        workers = self._own.union(self._pids.values())
        return [pid for pid in strays.children() if pid not in workers]

    def _end_adopted(self, ended: int) -> None:
        """End processes that a worker has left behind and that do not carry its mark.

        With several workers it is not known which one started such a process: it ends with the last worker that may
        have.
        """
        for pid in self._orphans():
            self._adopted.setdefault(pid, {ended, *self._pids})
        for suspects in self._adopted.values():
            suspects.discard(ended)
        ownerless = [pid for pid, suspects in self._adopted.items() if not suspects]
        strays.end_trees(ownerless)
        self._adopted = {pid: suspects for pid, suspects in self._adopted.items() if suspects}

    def _tell(self, **message: Any) -> None:
        with suppress(OSError):  # the manager is gone, which the loop will notice
            self._manager.sendall(json.dumps(message).encode() + b"\n")


def _cache_at_home() -> None:
    """Have torch make its folder of compiled code in the home of this process's account, and not in /tmp.

    That is for imports of this process. Each worker has the variable of its own command.
    """
    base = Path(os.environ.get("HOME", "")) / ".bftrainer"
    if variables.INDUCTOR_CACHE in os.environ or not base.is_absolute():
        return
    folder = base / "compiled" / "parent"
    with suppress(OSError):  # there is no home: torch then takes /tmp
        base.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[variables.INDUCTOR_CACHE] = str(folder)


def _import(module: str) -> str | None:
    """Import a module. Return what went wrong, if anything."""
    try:
        importlib.import_module(module)
    except Exception as problem:
        return f"{module}: {type(problem).__name__}: {problem}"[:1000]
    return None


def _become(command: Command) -> None:
    """Turn this forked process into what a fresh interpreter started by the command would be."""
    if command.cores:
        keep_to_cores(command.cores)
    env = dict(command.env)
    if "LC_CTYPE" in os.environ:  # Python may have set it itself, as in a fresh start
        env.setdefault("LC_CTYPE", os.environ["LC_CTYPE"])
    os.environ.clear()
    os.environ.update(env)
    if command.background:
        go_to_background()
    time.tzset()
    os.chdir(command.cwd)
    output = open_output(command)
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # If the parent was not started unbuffered, line buffering is as near as a fork can get.
        sys.stdout.reconfigure(line_buffering=os.isatty(1) or bool(env.get("PYTHONUNBUFFERED")))
    sys.orig_argv = [sys.executable, *command.argv]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        # torch seeds its CPU generator at random and those of the GPUs with a constant: leave the latter alone.
        sys.modules["torch"].default_generator.seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "multiprocessing.resource_tracker" in sys.modules:
        # A tracker that a preloaded module started belongs to the parent: each child needs its own.
        tracker = sys.modules["multiprocessing.resource_tracker"]._resource_tracker
        tracker._fd = tracker._pid = None


def run_as_main(argv: tuple[str, ...]) -> None:
    """Run a script, or `-m` and a module, as the interpreter does.

    The script sees itself as `__main__`, with its folder first on the path, and a traceback shows no frame of the
    caller.
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
    except SystemExit as leaving:
        exits.left_with(leaving.code)  # `raise SystemExit(3)` and `exit(3)` do not go through `sys.exit`
        raise
    except BaseException as problem:
        trace = problem.__traceback__
        while trace is not None and trace.tb_frame.f_globals is globals():
            trace = trace.tb_next
        sys.excepthook(type(problem), problem.with_traceback(trace), trace)
        # The interpreter still has to end as after an error, but must not print it again.
        sys.excepthook = lambda *_: None
        raise
