"""Commands of the `script` pool start agents, and outlive the controller.

They run in their own session. The pool keeps one per node (an `ssh`, for example). A later controller finds it again by
process id and start time. A pidfd watches it, which works for children and for processes that an earlier controller
started.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bftrainer.errors import BFTrainerError
from bftrainer.processes.launch import end_group

_MOST_INPUT = 1 << 15
"""Bytes that a pipe certainly holds, so that writing to it never blocks."""


class RunningCommand:
    """A running command, the leader of its session. Call `release` when it is no longer of interest."""

    def __init__(self, pid: int, birth: str, descriptor: int) -> None:
        self.pid = pid
        self.birth = birth
        self._descriptor = descriptor

    @classmethod
    def start(cls, argv: Sequence[str], env: Mapping[str, str], text: str, output: Path) -> RunningCommand:
        """Start a command with `text` on its stdin and its output appended to a file."""
        block = text.encode()
        if len(block) > _MOST_INPUT:
            raise BFTrainerError(f"cannot hand {len(block)} bytes to {argv[0]}, at most {_MOST_INPUT}")
        reading, writing = os.pipe()
        try:
            os.write(writing, block)
            os.close(writing)
            writing = -1
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            files = [(os.POSIX_SPAWN_DUP2, reading, 0), (os.POSIX_SPAWN_OPEN, 1, str(output), flags, 0o600)]
            files.append((os.POSIX_SPAWN_DUP2, 1, 2))
            # Neither asyncio nor `subprocess`: they expect their children to end before they do.
            ignored = (signal.SIGPIPE, signal.SIGXFSZ)  # ignored by Python, and so by its children
            pid = os.posix_spawnp(
                argv[0], list(argv), dict(env), file_actions=files, setsid=True, setsigmask=(), setsigdef=ignored
            )
        except (OSError, ValueError) as problem:
            raise BFTrainerError(f"cannot start {argv[0]}: {problem}") from None
        finally:
            os.close(reading)
            if writing >= 0:
                os.close(writing)
        return cls(pid, _birth(pid) or "", os.pidfd_open(pid))  # a child keeps its id until it is reaped

    @classmethod
    def find(cls, pid: int, birth: str) -> RunningCommand | None:
        """Return the command that was started as process `pid` at `birth`, if it still runs."""
        if pid <= 0 or not birth:
            return None
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return None
        if _birth(pid) == birth:
            return cls(pid, birth, descriptor)
        os.close(descriptor)
        return None

    def watch(self, ended: Callable[[int | None], None]) -> None:
        """Call `ended` once when the command ends, with its exit status if that can be known."""

        def look() -> None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            ended(self._reap())

        asyncio.get_running_loop().add_reader(self._descriptor, look)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Signal the command and its process group, unless it has ended."""
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._descriptor, 0)
            os.killpg(self.pid, signum)

    def release(self) -> None:
        """Stop watching the command; it goes on."""
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _reap(self) -> int | None:
        with suppress(ChildProcessError):  # a child of an earlier controller, which another process reaps
            os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED | os.WNOWAIT)
            end_group(self.pid)
            _, status = os.waitpid(self.pid, 0)
            return os.waitstatus_to_exitcode(status)
        return None


def _birth(pid: int) -> str | None:
    """Return a text that distinguishes a process from all others with the same id, before or later."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] not in "ZX":
            return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{fields[19]}"
    return None
