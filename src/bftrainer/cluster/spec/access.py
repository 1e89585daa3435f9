"""The access check refuses a trainer whose files the controller's account may not read.

Trainers run under the account of the controller. A script in a home that only its owner may enter (mode 0700) would be
queued, given nodes, and fail there. The controller looks before it accepts the trainer, in a thread: a file system
that hangs delays the one request only. A path that does not exist here is not refused: nodes may have other disks.
"""

from __future__ import annotations

import asyncio
import os
import pwd
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.errors import BFTrainerError, InputError

_MOST_THREADS = 4
_TIMEOUT_S = 10.0


class AccessCheck:
    """Checks the paths of submitted trainers, a few at a time."""

    def __init__(self, timeout_s: float = _TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="access")

    async def check(self, spec: TrainerSpec) -> None:
        """Raise `InputError` if this account may not use a path of the spec."""
        check = asyncio.get_running_loop().run_in_executor(self._threads, check_access, spec)
        try:
            async with asyncio.timeout(self._timeout_s):
                await check
        except TimeoutError:
            where = spec.cwd or spec.script
            raise BFTrainerError(
                f"{where}: the file system did not answer the controller within {self._timeout_s:g} s; try again later"
            ) from None


def check_access(spec: TrainerSpec) -> None:
    """Raise `InputError` for the first path of a spec that this account may not use. Waits for the file system."""
    if spec.cwd:
        _check(Path(spec.cwd), os.X_OK, "work in the folder")
    if spec.module is None:
        _check(Path(spec.cwd, spec.script), os.R_OK, "read the script")
    if python := spec.python or spec.submitted_python:
        _check(Path(python), os.X_OK, "run the interpreter")


def _check(path: Path, mode: int, purpose: str) -> None:
    if not path.is_absolute() or os.access(path, mode):
        return
    for folder in reversed(path.parents):
        if not os.access(folder, os.F_OK):
            return  # not on this machine
        if not os.access(folder, os.X_OK):
            raise _refused(folder, "enter this folder", f"{purpose} {path}", "x")
    if os.access(path, os.F_OK):
        letter = "r" if mode == os.R_OK else "x"
        raise _refused(path, purpose.replace("the ", "this "), "", letter)


def _refused(path: Path, what: str, purpose: str, letter: str) -> InputError:
    account = _account()
    so = f", so it cannot {purpose}" if purpose else ""
    return InputError(
        f"{path}: the account that runs trainers ({account}) may not {what}{so}. Allow it with "
        f"`setfacl -m u:{account}:{letter} {path}` or `chmod o+{letter} {path}`, or use a place that it can read."
    )


def _account() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
