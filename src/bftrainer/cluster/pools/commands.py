"""Commands that outlive the controller: started in a session of their own, found again by process id and birth.

The `script` pool keeps one for each node (an `ssh`, say) and watches it through a file descriptor of the process, which
works for children and for those of an earlier controller alike.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bftrainer.elastic.processes import end_group
from bftrainer.errors import BFTrainerError

_MOST_INPUT = 1 << 15
"""A pipe holds at least so much, so that writing to it never waits."""


class RunningCommand:
    """A command that runs, the leader of its session. `release` it when it is no longer of interest."""

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
            # Neither asyncio nor `subprocess`: their children must end before they do.
            ignored = (signal.SIGPIPE, signal.SIGXFSZ)  # by Python, and so by what it starts
            pid = os.posix_spawnp(
                argv[0], list(argv), dict(env), file_actions=files, setsid=True, setsigmask=(), setsigdef=ignored
            )
        except (OSError, ValueError) as problem:
            raise BFTrainerError(f"cannot start {argv[0]}: {problem}") from None
        finally:
            os.close(reading)
            if writing >= 0:
                os.close(writing)
        return cls(pid, _birth(pid) or "", os.pidfd_open(pid))  # a child that is not reaped yet keeps its id

    @classmethod
    def find(cls, pid: int, birth: str) -> RunningCommand | None:
        """The command that was started as process `pid` then, if it still runs."""
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
        """Call `ended` once when it has, with its exit status where that can be known."""

        def look() -> None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            ended(self._reap())

        asyncio.get_running_loop().add_reader(self._descriptor, look)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Signal it and all that it has started in its group, unless it has ended."""
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._descriptor, 0)
            os.killpg(self.pid, signum)

    def release(self) -> None:
        """Watch it no more; it goes on."""
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _reap(self) -> int | None:
        with suppress(ChildProcessError):  # one of an earlier controller's, which somebody else reaps
            os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED | os.WNOWAIT)
            end_group(self.pid)
            _, status = os.waitpid(self.pid, 0)
            return os.waitstatus_to_exitcode(status)
        return None


def _birth(pid: int) -> str | None:
    """What tells a process from every other that has had, or will have, its id."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] not in "ZX":
            return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{fields[19]}"
    return None
