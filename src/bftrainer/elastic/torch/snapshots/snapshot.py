"""Snapshots of a trainer: files to resume from, when all of its workers are lost at once.

Rank 0 calls `due` at every step and passes its state to `take` when one is due. `take` copies the state and writes it,
while training continues, to a folder that all hosts share. A worker that starts, at any world size, begins from
`latest`.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bftrainer.elastic.defaults import SNAPSHOT_EVERY_S
from bftrainer.elastic.leftovers import sweep, temporary_name
from bftrainer.elastic.snapshot_header import HEADER, Lineage, by_lineage
from bftrainer.elastic.torch.snapshots import snapshot_file
from bftrainer.elastic.torch.snapshots.lease import SnapshotLease, SupersededError
from bftrainer.elastic.torch.snapshots.snapshot_copy import Copier, Copy
from bftrainer.elastic.torch.snapshots.snapshot_file import Snapshot, file_name, reason
from bftrainer.elastic.torch.snapshots.snapshot_interval import SnapshotInterval
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.util.files import sync

__all__ = ["HEADER", "Snapshot", "SnapshotWarning", "Snapshots"]


class SnapshotWarning(UserWarning):
    """A snapshot was skipped."""


class Snapshots:
    """The snapshots of one trainer in `folder`, written by one process at a time and from one of its threads.

    A snapshot is taken every `every_s` seconds, or less often if it costs too much: see `SnapshotInterval`. A snapshot
    that fails never stops training. `error` says why the last one failed (None once one succeeds), and `on_error` is
    called once per reason, in the thread that noticed it. `owner` names the trainer, if there is a controller, and
    `start` is the number of its start: see `SnapshotLease`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every_s: float = SNAPSHOT_EVERY_S,
        keep: int = 3,
        clock: Callable[[], float] = time.monotonic,
        on_error: Callable[[str], None] | None = None,
        owner: str = "",
        start: int = 0,
    ) -> None:
        if keep < 1:
            raise InputError(f"`keep` must be at least 1 snapshot, but got {keep}")
        self.folder = Path(folder)
        self.lease = SnapshotLease(self.folder, owner, start=start)
        self.interval = SnapshotInterval(every_s)
        self.keep = keep
        self.on_error = on_error or _print_line
        self.error: str | None = None
        self._clock = clock
        self._begun = clock()
        self._copier = Copier()
        self._busy = False
        self._thread: threading.Thread | None = None
        self._last: tuple[int, float] | None = None  # the step, and when its state was copied
        self._told: set[str] = set()

    def due(self) -> bool:
        """Return whether it is time for the next snapshot. It is cheap enough to be called at every step."""
        return not self._busy and self._clock() - self._begun >= self.interval.interval_s

    def last_was(self, age_s: float) -> None:
        """Record that the last snapshot was taken `age_s` seconds ago, perhaps by another process."""
        self._begun = self._clock() - max(0.0, age_s)

    def take(self, step: int, state: Mapping[str, Any]) -> bool:
        """Copy `state` and write it in the background.

        Return False, and do nothing, while another one is being written.
        """
        return self._take(step, lambda: state)

    def _take(self, step: int, capture: Callable[[], Mapping[str, Any]]) -> bool:
        _check_step(step)
        if self._busy:
            return False
        self._begun = begun = self._clock()
        copy = self._copier.copy(capture())  # into the memory of the last copy, which is written by now
        stall_s = self._clock() - begun
        thread = threading.Thread(
            target=self._write_behind, args=(step, begun, stall_s, copy), name="bftrainer-snapshot", daemon=True
        )
        self._busy, self._thread = True, thread
        try:
            thread.start()
        except RuntimeError as problem:  # the host's limit on processes, which also counts threads
            self._busy, self._thread = False, None
            self._tell(self._failed(reason(problem)))
            return False
        return True

    def try_to_take(self, step: int, capture: Callable[[], Mapping[str, Any]]) -> bool:
        """Like `take`, with the state that `capture` returns. Any error is reported, and training continues."""
        try:
            return self._take(step, capture)
        except Exception as problem:
            self.error = f"training continues without a snapshot: {reason(problem)}"
            self._tell(self.error)
            return False

    def take_now(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy and write `state` before returning, after the snapshot that is being written, if any."""
        _check_step(step)
        self.close()
        self._begun = begun = self._clock()
        copy = self._copier.copy(state)
        copy.wait()
        began = self._clock()
        problem = self._write(step, begun, copy.state)
        if problem is not None:
            raise BFTrainerError(problem)
        self.interval.write_s = self._clock() - began

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait for the snapshot that is being written. Return whether none is left."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    @property
    def last_step(self) -> int | None:
        """The step of the last snapshot that this process wrote."""
        return None if self._last is None else self._last[0]

    def last_age_s(self) -> float | None:
        """Return the seconds since the state of `last_step` was copied: the training that would be lost now."""
        return None if self._last is None else self._clock() - self._last[1]

    def latest(self) -> Snapshot | None:
        """Return the newest complete snapshot of the newest lineage, with a SnapshotWarning for each one skipped."""
        tried: set[Path] = set()
        while True:
            try:
                found = by_lineage(self.folder)
            except FileNotFoundError:
                return None
            except OSError as problem:
                # Starting from nothing would lose snapshots that are only out of reach.
                raise BFTrainerError(
                    f"{self.folder}: the snapshots cannot be listed ({reason(problem)}); "
                    "make the folder readable, or name another one to start from the beginning"
                ) from None
            for _, step, path in reversed(found):
                if path in tried:
                    continue
                tried.add(path)
                try:
                    return snapshot_file.read(path, step)
                except Exception as problem:
                    gone = _is_gone(problem)
                    why = "vanished before it could be read" if gone else reason(problem)
                warnings.warn(f"{path}: this snapshot is skipped: {why}", SnapshotWarning, stacklevel=2)
                if gone:
                    break  # most likely deleted after newer ones were written: look again
            else:
                return None

    def _write_behind(self, step: int, begun: float, stall_s: float, copy: Copy) -> None:
        try:
            stall_s += copy.wait()
            began = self._clock()
            problem = self._write(step, begun, copy.state)
            if problem is not None:
                self._tell(problem)
            change = self.interval.cost(stall_s, self._clock() - began)
            if change is not None:
                _print_line(change)
        except Exception as error:  # most likely of the device: the training will get it too
            self._tell(self._failed(reason(error)))
        finally:
            self._busy = False

    def _write(self, step: int, begun: float, state: dict[str, Any]) -> str | None:
        """Write a snapshot completely or not at all. Return what went wrong, if anything."""
        beside = self.folder / temporary_name(step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Sweep first: files that dead processes left may be what fills the disk.
            sweep(self.folder, write_s=self.interval.write_s, delete=self._delete)
            lineage = self.lease.claim()
            try:
                snapshot_file.write(beside, step, state, lineage)
                self.lease.claim()  # again: a large state takes long to write
                beside.replace(self.folder / file_name(step))
            except BaseException:
                with contextlib.suppress(OSError):
                    beside.unlink()
                raise
            sync(self.folder)
        except SupersededError as problem:
            self.error = str(problem)
            return self.error
        except Exception as problem:
            return self._failed(reason(problem))
        self._last = (step, begun)
        self.error = None
        self._prune(lineage, step)
        return None

    def claim(self) -> None:
        """Keep workers that were cut off earlier from writing here, before their snapshots are read."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lease.claim()
        except (OSError, SupersededError):
            pass  # the first snapshot reports it

    def clean(self) -> None:
        """Delete the temporary files of all other processes: the training is complete, and no file is needed."""
        with contextlib.suppress(OSError, SupersededError):
            self.lease.claim()
            sweep(self.folder, ended=True, delete=self._delete)

    def _prune(self, lineage: Lineage, step: int) -> None:
        """Delete all but the last `keep` snapshots up to the one of `step`, which was just written.

        Later ones are left alone: they are damaged, or a newer worker wrote them while this one was cut off. Counting
        them could delete every complete one there is.
        """
        try:
            found = [path for *order, path in by_lineage(self.folder) if tuple(order) <= (lineage, step)]
        except OSError as problem:
            self._tell(f"{self.folder}: old snapshots cannot be listed ({reason(problem)})")
            return
        for path in found[: -self.keep]:
            self._delete(path)

    def _delete(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as problem:
            self._tell(f"{self.folder}: old snapshots cannot be deleted and will fill the disk ({reason(problem)})")

    def _failed(self, why: str) -> str:
        self.error = (
            f"{self.folder}: a snapshot could not be written ({why}); "
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


def _is_gone(problem: Exception) -> bool:
    return isinstance(problem, OSError) and problem.errno in (errno.ENOENT, errno.ESTALE)
