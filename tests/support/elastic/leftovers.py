"""Finds what a job has left on the machine: processes, descriptors, threads, files.

Everything is started with a mark in its environment and a folder of its own for temporary files, so that what others do
on the machine is not taken for ours.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

MARK = "BFTRAINER_TEST_MARK"
PATIENCE_S = 10.0
"""How long what was told to end may take to be gone."""


class Leftovers:
    """What this process is answerable for. Make it before the first worker is started."""

    def __init__(self, temporary: Path) -> None:
        temporary.mkdir(parents=True)
        self._temporary = temporary
        self._mark = f"{os.getpid()}-{time.time_ns()}"
        os.environ[MARK] = self._mark
        # Torch makes a folder for its compiler there that it never removes.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(temporary.with_name("inductor"))
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)

    @property
    def mark(self) -> str:
        """What stands in the environment of all that was started."""
        return self._mark

    def find(self, pids: set[int]) -> list[str]:
        """What is there beyond the warm parent, after a while. `pids` are the workers that were."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self._look(pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _look(self, pids: set[int]) -> list[str]:
        parents = _parents()
        ours = set(marked(self._mark)) | _descendants(os.getpid(), parents)
        warm = {pid for pid in ours if parents.get(pid) == os.getpid()}
        found = [f"process {pid}: {_command(pid)}" for pid in sorted(ours - warm)]
        if len(warm) > 1:
            found.append(f"processes {sorted(warm)}: {[_command(pid) for pid in sorted(warm)]}")
        found += [f"file {path}" for path in self._temporary.iterdir()]
        names = {str(pid) for pid in pids}
        memory = Path("/dev/shm")
        shared = memory.iterdir() if memory.exists() else ()
        return found + [f"shared memory {path}" for path in shared if names & set(path.name.split("_"))]


def marked(mark: str) -> list[int]:
    """All processes that were started with this mark, or by such a process."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def held(pid: int) -> dict[str, int]:
    """How many descriptors and threads a process has."""
    kinds = {"descriptors": "fd", "threads": "task"}
    return {name: len(list(Path(f"/proc/{pid}/{kind}").iterdir())) for name, kind in kinds.items()}


def children(pid: int) -> list[int]:
    """The processes that a process has started itself."""
    return sorted(child for child, parent in _parents().items() if parent == pid)


def _parents() -> dict[int, int]:
    found = {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit():
                found[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def _descendants(pid: int, parents: dict[int, int]) -> set[int]:
    found: set[int] = set()
    newest = {pid}
    while newest:
        newest = {child for child, parent in parents.items() if parent in newest} - found
        found |= newest
    return found


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "gone"
