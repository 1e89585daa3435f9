"""Runs a command with a time-out and bounded output: `run` waits for it, `run_async` leaves the event loop free.

The command has a session of its own, so that everything it started is killed with it if it fails to end. Pools, the
recorder of traces and the questions to Slurm run their commands by this module.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from bftrainer.errors import BFTrainerError
from bftrainer.processes import variables
from bftrainer.processes.launch import dying_with

MOST_INPUT = 1 << 15
"""The most bytes of stdin: a pipe holds them, so nobody has to wait for the command to read."""
MOST_BYTES = 1 << 24
"""The most output that is accepted, unless the caller says otherwise."""
_KILLED_S = 2.0
"""Seconds to wait for the notice that a killed command has ended."""
_MOST_ERRORS = 1 << 16
"""Bytes of stderr that are kept."""


class CommandError(BFTrainerError):
    """A command did not do what it should."""


class CommandNotStartedError(CommandError):
    """A command could not be started."""

    def __init__(self, program: str, reason: str) -> None:
        super().__init__(f"cannot run {program}: {reason}")
        self.reason = reason


class CommandTimeoutError(CommandError):
    """A command did not end in time, and was killed."""


class CommandOutputError(CommandError):
    """A command printed too much, and was killed."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The exit status and the output of a command."""

    status: int
    out: bytes
    err: bytes
    """The beginning of its stderr."""

    @property
    def failure(self) -> str:
        """How it failed."""
        status = self.status
        return f"it failed with exit status {status}" if status > 0 else f"signal {-status} ended it"

    @property
    def complaints(self) -> list[str]:
        """The lines on stderr that are not blank, each cut to 200 characters."""
        lines = (line.strip() for line in self.err.decode(errors="replace").splitlines())
        return [line[:200] for line in lines if line]


def run(
    argv: Sequence[str],
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    most: int = MOST_BYTES,
    until_closed: bool = True,
) -> CommandResult:
    """Run a command and return its result, whatever its exit status. `env`: ours without secrets, if not given.

    With `until_closed`, processes that the command left behind count as part of it while they keep its stdout open.
    """
    command = _BoundedCommand(argv, env, most)
    deadline = time.monotonic() + timeout_s
    try:
        with selectors.DefaultSelector() as selector:
            for descriptor in command.open:
                selector.register(descriptor, selectors.EVENT_READ)
            while not command.is_over(until_closed):
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    if not command.read(key.fd):
                        selector.unregister(key.fd)
                if time.monotonic() >= deadline and not command.is_over(until_closed):
                    raise CommandTimeoutError(f"it did not end within {timeout_s:g} s")
        return command.result()
    except BaseException:
        command.kill()
        raise
    finally:
        command.close()


async def run_async(
    argv: Sequence[str],
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    most: int = MOST_BYTES,
    stdin: bytes = b"",
) -> CommandResult:
    """Run a command and return its result, as `run` does. The command dies with this process.

    It reads `stdin`, at most `MOST_INPUT` bytes.
    """
    if shutil.which(argv[0]) is None:
        raise CommandNotStartedError(argv[0], "there is no such program")
    command = _BoundedCommand(dying_with(os.getpid(), argv), env, most, stdin)
    loop = asyncio.get_running_loop()
    over, exited = loop.create_future(), asyncio.Event()

    def ready(descriptor: int) -> None:
        try:
            if not command.read(descriptor):
                loop.remove_reader(descriptor)
        except CommandOutputError as problem:
            loop.remove_reader(descriptor)
            if not over.done():
                over.set_exception(problem)
        if command.exited:
            exited.set()
        if command.is_over(until_closed=True) and not over.done():
            over.set_result(None)

    watched = tuple(command.open)
    for descriptor in watched:
        loop.add_reader(descriptor, ready, descriptor)
    try:
        async with asyncio.timeout(timeout_s):
            await over
        return command.result()
    except BaseException as failure:
        command.kill()
        with suppress(TimeoutError):  # a command of another user, as by sudo, cannot be killed
            async with asyncio.timeout(_KILLED_S):
                await exited.wait()
        if isinstance(failure, TimeoutError):
            raise CommandTimeoutError(f"it did not end within {timeout_s:g} s") from None
        raise
    finally:
        # All of them, also those that `result` found closed: the loop would never tell of their numbers again.
        for descriptor in watched:
            loop.remove_reader(descriptor)
        command.close()


class _BoundedCommand:
    """A command, the descriptors that tell of it, and its output so far."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None, most: int, stdin: bytes = b"") -> None:
        given = _filled_pipe(stdin) if stdin else None
        try:
            self._process = subprocess.Popen(  # noqa: S603 - no shell; the callers choose what is run
                list(argv),
                stdin=subprocess.DEVNULL if given is None else given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env=variables.inherited(os.environ) if env is None else env,
            )
        except (OSError, ValueError) as problem:
            raise CommandNotStartedError(argv[0], getattr(problem, "strerror", None) or str(problem)) from None
        finally:
            if given is not None:
                os.close(given)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._out, self._err = self._process.stdout.fileno(), self._process.stderr.fileno()
        try:
            self._exit, self._waiting = _exit_notice(self._process.pid)
        except (OSError, RuntimeError) as problem:  # no descriptor, or no thread, is left
            self.kill()
            self._process.communicate()
            raise CommandNotStartedError(argv[0], getattr(problem, "strerror", None) or str(problem)) from None
        self.open = {self._out, self._err, self._exit}
        """The descriptors that may have news: pipes until they are closed, and one that is readable at the end."""
        self._kept = {self._out: bytearray(), self._err: bytearray()}
        self._most = most
        for pipe in (self._out, self._err):
            os.set_blocking(pipe, False)

    @property
    def exited(self) -> bool:
        """Whether the command itself has ended; processes that it started may go on."""
        return self._exit not in self.open

    def is_over(self, until_closed: bool) -> bool:
        """Return whether there is nothing to wait for."""
        return self.exited and not (until_closed and self._out in self.open)

    def read(self, descriptor: int) -> bool:
        """Take the news of a descriptor. Returns whether more may come. Raises `CommandOutputError`."""
        block = b""
        if descriptor != self._exit:
            try:
                block = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return True
        if not block:
            self.open.discard(descriptor)
            return False
        kept = self._kept[descriptor]
        if descriptor == self._err:
            kept += block[: _MOST_ERRORS - len(kept)]
        elif len(kept) + len(block) > self._most:
            raise CommandOutputError(f"it prints more than {self._most >> 20} MiB")
        else:
            kept += block
        return True

    def result(self) -> CommandResult:
        """Return the result, with all output that has arrived."""
        for pipe in (self._out, self._err):
            before = -1
            while pipe in self.open and len(self._kept[pipe]) > before:
                before = len(self._kept[pipe])
                self.read(pipe)
        return CommandResult(self._process.wait(), bytes(self._kept[self._out]), bytes(self._kept[self._err]))

    def kill(self) -> None:
        """Kill the command and all in its session, unless it has been reaped."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # it may run as another user, by sudo
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Reap the command, which has ended or was killed, and close everything."""
        if self._waiting is not None:
            self._waiting.join()  # before the command is reaped: its number may then be another's
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        os.close(self._exit)


def _filled_pipe(content: bytes) -> int:
    """Return the reading end of a pipe that has this content and nothing more."""
    if len(content) > MOST_INPUT:
        raise CommandOutputError(f"it would read more than {MOST_INPUT >> 10} KiB")
    reader, writer = os.pipe()
    try:
        os.write(writer, content)
    finally:
        os.close(writer)
    return reader


def _exit_notice(pid: int) -> tuple[int, threading.Thread | None]:
    """Return a descriptor that becomes readable when a child process ends, and the thread that sees to it, if any."""
    with suppress(AttributeError, OSError):  # an old kernel, or a container that forbids the call
        return os.pidfd_open(pid), None
    reader, writer = os.pipe()

    def wait() -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(writer)

    waiting = threading.Thread(target=wait, name=f"end of {pid}", daemon=True)
    waiting.start()
    return reader, waiting
