"""Snapshots: what a trainer resumes from when all of its workers are gone at once.

Rank 0 asks `due` at every step and now and then hands its state to `take`, which copies it and writes it behind the
training's back to a folder that all hosts share. Whoever comes next, at any world size, starts from `latest`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, cast

import torch

from bftrainer import __version__
from bftrainer.elastic.copying import copy_of
from bftrainer.errors import BFTrainerError, InputError

HEADER = 512
"""Bytes before the payload: one line of fixed width, because it is filled in after the payload was written."""

STALE_S = 3600.0
"""Age from which a temporary file of another host is taken for one of a process that is gone."""

_NAME = "bftrainer-snapshot "
_MAGIC = f"{_NAME}1 ".encode()
"""How every file begins; the number is the version of the format."""

_WIDTH = HEADER - len(_MAGIC) - 64 - len(" ") - len("\n")
"""What is left of the header for its JSON."""

_FILE = re.compile(r"snapshot-(\d{12})\.bft")
_TEMPORARY = re.compile(r"\.snapshot-\d{12}\.[0-9a-f]+\.(\d{1,9})@(.+)\.tmp")


class SnapshotWarning(UserWarning):
    """A snapshot had to be passed over."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A state to resume from, its tensors in CPU memory."""

    step: int
    path: Path
    state: dict[str, Any]


class Snapshots:
    """The snapshots of one trainer in `folder`, written by one process at a time and from one of its threads.

    A write that fails never stops training: `error` says why the last one failed (None once one succeeds), and
    `on_error` is called in the writing thread, once per reason.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every_s: float = 60.0,
        keep: int = 3,
        clock: Callable[[], float] = time.monotonic,
        on_error: Callable[[str], None] | None = None,
    ) -> None:
        if not every_s > 0:
            raise InputError(f"`every_s` must be more than 0 seconds, but got {every_s}")
        if keep < 1:
            raise InputError(f"`keep` must be at least 1 snapshot, but got {keep}")
        self.folder = Path(folder)
        self.every_s = every_s
        self.keep = keep
        self.on_error = on_error or _print_line
        self.error: str | None = None
        self._clock = clock
        self._begun = clock()
        self._busy = False
        self._thread: threading.Thread | None = None
        self._last: tuple[int, float] | None = None  # step, and when its state was copied
        self._told: set[str] = set()

    def due(self) -> bool:
        """Whether it is time for the next one. Cheap enough to be asked at every step."""
        return not self._busy and self._clock() - self._begun >= self.every_s

    def last_was(self, age_s: float) -> None:
        """The last one was taken so long ago, perhaps by another process."""
        self._begun = self._clock() - max(0.0, age_s)

    def take(self, step: int, state: Mapping[str, Any]) -> bool:
        """Copy `state` and write it in the background; False, and nothing done, while another is being written."""
        _check_step(step)
        if self._busy:
            return False
        self._begun = begun = self._clock()
        thread = threading.Thread(
            target=self._write_behind, args=(step, begun, copy_of(state)), name="bftrainer-snapshot", daemon=True
        )
        self._busy, self._thread = True, thread
        try:
            thread.start()
        except RuntimeError as problem:  # the limit on processes of the host, which also counts threads
            self._busy, self._thread = False, None
            self._tell(self._failed(_reason(problem)))
            return False
        return True

    def take_now(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy and write `state` before returning, after the one being written, if any."""
        _check_step(step)
        self.close()
        self._begun = begun = self._clock()
        problem = self._write(step, begun, copy_of(state))
        if problem is not None:
            raise BFTrainerError(problem)

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait for the one being written; whether none is left."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    @property
    def last_step(self) -> int | None:
        """The step of the last one that this process wrote."""
        return None if self._last is None else self._last[0]

    def last_age_s(self) -> float | None:
        """How much training would be lost now: seconds since the state of `last_step` was copied."""
        return None if self._last is None else self._clock() - self._last[1]

    def latest(self) -> Snapshot | None:
        """The newest whole snapshot; a SnapshotWarning for each one passed over."""
        tried: set[Path] = set()
        while True:
            try:
                found = _found(self.folder)
            except FileNotFoundError:
                return None
            except OSError as problem:
                # To begin from nothing beside snapshots that are only out of reach would lose them.
                raise BFTrainerError(
                    f"{self.folder}: the snapshots cannot be listed ({_reason(problem)}); "
                    "make the folder readable, or name another one to start afresh"
                ) from None
            for step, path in reversed(found):
                if path in tried:
                    continue
                tried.add(path)
                try:
                    return Snapshot(step, path, _load(path, step))
                except Exception as problem:
                    reason, gone = _reason(problem), _is_gone(problem)
                if gone:
                    reason = "vanished before it could be read"
                warnings.warn(f"{path}: this snapshot is skipped: {reason}", SnapshotWarning, stacklevel=2)
                if gone:
                    break  # most likely pruned after newer ones were written: look again
            else:
                return None

    def _write_behind(self, step: int, begun: float, state: dict[str, Any]) -> None:
        try:
            problem = self._write(step, begun, state)
            if problem is not None:
                self._tell(problem)
        finally:
            self._busy = False

    def _write(self, step: int, begun: float, state: dict[str, Any]) -> str | None:
        """Write one whole or not at all. What went wrong is returned and not raised: a traceback would hold `state`."""
        name = f"snapshot-{step:012d}"
        beside = self.folder / f".{name}.{secrets.token_hex(4)}.{os.getpid()}@{socket.gethostname()}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()  # first, as what dead processes left may be what fills the disk
            try:
                _save(beside, step, state)
                beside.replace(self.folder / f"{name}.bft")
            except BaseException:
                with contextlib.suppress(OSError):
                    beside.unlink()
                raise
            _sync_folder(self.folder)
        except Exception as problem:
            return self._failed(_reason(problem))
        self._last = (step, begun)
        self.error = None
        self._prune(step)
        return None

    def _sweep(self) -> None:
        """Delete the temporary files that nobody will finish."""
        for path in list(self.folder.iterdir()):
            if (match := _TEMPORARY.fullmatch(path.name)) and _is_stale(path, int(match[1]), match[2]):
                self._delete(path)

    def _prune(self, step: int) -> None:
        """Delete all but the last `keep` up to the one of `step`, which was just written.

        Those ahead of it are left alone: they are damaged, or a newer worker wrote them while this one was cut off.
        Counting them could delete every whole one there is.
        """
        try:
            found = [path for other, path in _found(self.folder) if other <= step]
        except OSError as problem:
            self._tell(f"{self.folder}: old snapshots cannot be listed ({_reason(problem)})")
            return
        for path in found[: -self.keep]:
            self._delete(path)

    def _delete(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as problem:
            self._tell(f"{self.folder}: old snapshots cannot be deleted and will fill the disk ({_reason(problem)})")

    def _failed(self, reason: str) -> str:
        self.error = (
            f"{self.folder}: a snapshot could not be written ({reason}); "
            "see that the folder can be written to and that its disk has room"
        )
        return self.error

    def _tell(self, problem: str) -> None:
        if problem not in self._told:
            self._told.add(problem)
            self.on_error(problem)


def _print_line(message: str) -> None:
    print(f"bftrainer: {message}", file=sys.stderr, flush=True)


def _check_step(step: int) -> None:
    if type(step) is not int or not 0 <= step < 10**12:
        raise InputError(f"`step` must be a whole number from 0 to 999999999999, but got {step!r}")


def _reason(problem: Exception) -> str:
    """Why, in one line and without what differs from try to try (names of temporary files)."""
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    line = next(iter(str(problem).splitlines()), "")
    return line if isinstance(problem, BFTrainerError) else f"{type(problem).__name__}: {line}"


def _is_gone(problem: Exception) -> bool:
    return isinstance(problem, OSError) and problem.errno in (errno.ENOENT, errno.ESTALE)


def _found(folder: Path) -> list[tuple[int, Path]]:
    """The snapshots in `folder` by step, whole or not."""
    return sorted((int(match[1]), path) for path in folder.iterdir() if (match := _FILE.fullmatch(path.name)))


def _is_stale(path: Path, pid: int, host: str) -> bool:
    # A process number means something on its own host only.
    if host == socket.gethostname():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # somebody else's, so alive
            pass
    try:
        return time.time() - path.stat().st_mtime > STALE_S
    except OSError:
        return False


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a crash of the host, on file systems that can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


# The file: a header of fixed width, then what `torch.save` makes of the state. The header holds the length and checksum
# of the payload and begins with a checksum of itself, so that no byte of the file can be lost or change unnoticed.


class _Sink:
    """Passes on what `torch.save` writes and keeps its length and checksum.

    It swallows errors and leaves them in `problem`: raised through torch's zip writer they come out as another error.
    """

    def __init__(self, out: IO[bytes]) -> None:
        self.out = out
        self.length = 0
        self.digest = hashlib.sha256()
        self.problem: tuple[int, str] | None = None

    def write(self, data: memoryview) -> int:
        if self.problem is None:
            try:
                self.out.write(data)
            except OSError as problem:
                self.problem = (problem.errno or errno.EIO, problem.strerror or str(problem))
            self.digest.update(data)
            self.length += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing to do: the file is flushed once its header is filled in."""


def _save(path: Path, step: int, state: dict[str, Any]) -> None:
    with path.open("xb") as out:
        out.write(bytes(HEADER))
        sink = _Sink(out)
        torch.save(state, cast("IO[bytes]", sink))
        if sink.problem is not None:
            raise OSError(*sink.problem)
        out.seek(0)
        out.write(_header(step, sink.length, sink.digest.hexdigest()))
        out.flush()
        os.fsync(out.fileno())


def _header(step: int, length: int, digest: str) -> bytes:
    written = datetime.now(UTC).isoformat(timespec="seconds")
    meta = {"step": step, "length": length, "sha256": digest, "written": written, "bftrainer": __version__}
    text = json.dumps(meta).encode().ljust(_WIDTH)
    assert len(text) == _WIDTH
    return _sealed(text)


def _sealed(text: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(text).hexdigest().encode() + b" " + text + b"\n"


def _load(path: Path, step: int) -> dict[str, Any]:
    """The state in the file, or an error that says what is wrong with it."""
    with path.open("rb") as source:
        head = source.read(HEADER)
        if len(head) < HEADER:
            raise InputError(f"it is cut short: {len(head)} bytes, less than its header")
        if not head.startswith(_MAGIC):
            if head.startswith(_NAME.encode()):
                raise InputError(f"its format {head[len(_NAME) :].split()[0]!r} is not one that {__version__} knows")
            raise InputError("it does not begin like a snapshot")
        text = head[-1 - _WIDTH : -1]
        if head != _sealed(text):
            raise InputError("its header is damaged")
        meta = json.loads(text)
        if meta["step"] != step:
            raise InputError(f"it holds step {meta['step']}, not what its name says")
        length = os.fstat(source.fileno()).st_size - HEADER
        if length != meta["length"]:
            raise InputError(f"it has {length} bytes of state where {meta['length']} were written")
        if hashlib.file_digest(source, "sha256").hexdigest() != meta["sha256"]:
            raise InputError("its checksum is wrong: the state in it is damaged")
        source.seek(HEADER)
        try:
            return cast("dict[str, Any]", torch.load(source, weights_only=True, map_location="cpu"))
        except Exception as problem:  # the file is whole, so another version of torch wrote it, or memory is short
            lines = str(problem).splitlines() or [""]
            line = next((line for line in lines if "Unpickler error" in line), lines[0]).strip()
            raise InputError(f"torch {torch.__version__} cannot load it ({type(problem).__name__}: {line})") from None
