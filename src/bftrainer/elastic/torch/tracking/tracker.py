"""`Tracker`: what `run.tracker` returns. Every rank may call it; the main rank writes, and one run has all values.

A value is written once per name and step, in rising steps. Steps that are made again, because training went back to a
snapshot, are not written again: the values of the first time stay. The same rule serves all three trackers. TensorBoard
could replace them instead (`purge_step`), but it would drop everything from that step on, also metrics that are not
logged again. No step is left out when rank 0 is killed after it made a step and before it logged it: the other ranks
keep the values of the present step, and the next rank 0 writes its own.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bftrainer.elastic import protocol
from bftrainer.elastic.torch.data.batch_plan import whole_number
from bftrainer.elastic.torch.tracking.journal import FOLDER, LoggedValues, TrackerJournal, find_run
from bftrainer.elastic.torch.tracking.writers import Opening, TrackerWriter, check_kind, opener
from bftrainer.errors import BFTrainerError, InputError

RETRY_S = 60.0
"""How long a tracker that failed during the training is left alone."""
_LOADED = time.time()


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker asks a run, each time that it is called."""

    has_begun: Callable[[], bool]
    """Whether this rank has joined the training. Before that, every rank takes itself for the main one."""
    is_main: Callable[[], bool]
    step: Callable[[], int]
    folder: Callable[[], Path]
    has_resumed: Callable[[], bool]
    """Whether this rank has resumed the training from a snapshot, so that it was begun earlier."""


@dataclass(frozen=True, slots=True)
class _HeldValues:
    """Values that a script logged on this rank, and that may not be written yet."""

    progress: int
    """The training's committed steps at that time."""
    step: int
    time: float
    values: Mapping[str, object]


class Tracker:
    """A run of TensorBoard, W&B or MLflow that is the same for all ranks, now and later. Made by `run.tracker`."""

    def __init__(
        self,
        kind: str,
        options: Mapping[str, Any],
        run: TrackedRun,
        open_writer: Callable[[Opening], TrackerWriter],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.kind = kind
        self.options = dict(options)
        self._run = run
        self._open_writer = open_writer
        self._clock = clock
        self._writer: TrackerWriter | None = None
        self._journal: TrackerJournal | None = None
        self._id = ""
        self._failed_at: float | None = None
        self._complete = False
        self._held: list[_HeldValues] = []
        self._pid = os.getpid()

    def log(self, values: Mapping[str, float | Tensor], step: int | None = None) -> None:
        """Write values by name for a step. Call it on every rank; only the main rank writes.

        `step` is by default the number of committed steps, `run.progress.step`. A value of a name that was written for
        this step or a later one is left out. If the tracker fails during the training, the training goes on: a message
        on stderr says so, and the tracker is tried again after a minute.
        """
        if not self._run.has_begun():
            raise InputError("tracker.log() must be called in the training: inside run.epochs or run.steps, or after")
        named = _by_name(values)
        if step is not None:
            step = whole_number("step", step, 0)
        progress = self._run.step()
        held = _HeldValues(progress, progress if step is None else step, self._clock(), _detached(named))
        if not self._run.is_main():
            # Rank 0 logs what belongs to a step before it makes the next one.
            self._held = [*(other for other in self._held if other.progress >= progress - 1), held]
            self.close()
            return
        self._held.append(held)
        self._write_held()

    def finish(self) -> None:
        """Mark the run as complete. Call it on every rank, after the last value. A later value opens the run again."""
        if self._run.has_begun() and self._run.is_main() and not self._complete:
            self._write_held()
            if not self._read_journal().is_empty:  # all of it may be from a process that was killed
                self._attempt(lambda: self._opened().finish(), "the run is not marked as complete")
            self._writer, self._complete = None, True
        self.close()

    def close(self) -> None:
        """Stop writing on this rank. The run is not complete: this rank, or another one, may go on with it."""
        writer, self._writer = self._writer, None
        if writer is not None:
            self._attempt(writer.close, "its last values may be missing until the run is opened again")
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _write_held(self) -> None:
        """Write the values that this rank holds, unless they are written already."""
        held, self._held = self._held, []
        for one in held:
            self._write(one)

    def _write(self, held: _HeldValues) -> None:
        journal = self._read_journal()
        named = {name: value for name, value in held.values.items() if held.step > journal.last_step(name)}
        new = {name: _number(name, value) for name, value in named.items()}
        if not new or (self._failed_at is not None and self._clock() - self._failed_at < RETRY_S):
            return
        logged = LoggedValues(held.step, held.time, new)

        def write() -> None:
            self._opened().write(logged)
            journal.append(logged)

        self._complete = False
        self._attempt(write, f"nothing is written to it for {RETRY_S:g} s, then it is tried again")

    def _read_journal(self) -> TrackerJournal:
        if self._journal is None:
            folder, owner = self._run.folder() / FOLDER, os.environ.get(protocol.SNAPSHOT_OWNER, "")
            # Under a controller a training has a name of its own. Otherwise it is that of the manager or the process.
            training = owner or os.environ.get(protocol.CHANNEL, "") or f"process {os.getpid()} of {_LOADED:.6f}"
            record = f"{self.kind}-{owner.rpartition('/')[2]}.json" if owner else f"{self.kind}.json"
            continues = not owner and self._run.has_resumed()
            try:
                self._id = find_run(
                    folder / record, training, os.environ.get(protocol.TRAINER, ""), continues=continues
                ).id
                self._journal = TrackerJournal(folder / f"{self.kind}-{self._id}.jsonl")
            except OSError as problem:
                raise BFTrainerError(
                    f"the tracker's files in {folder} cannot be written: {problem.strerror or problem}"
                ) from None
        return self._journal

    def _opened(self) -> TrackerWriter:
        if self._writer is None:
            name = os.environ.get(protocol.TRAINER, "")
            opening = Opening(self._id, name, self._run.folder(), self._read_journal(), self.options)
            self._writer = self._open_writer(opening)
            # Registered after what the tracker's package has registered, and so called before it.
            atexit.unregister(self._at_exit)
            atexit.register(self._at_exit)
        return self._writer

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:  # not in a process that the script has forked
            self.close()

    def _attempt(self, action: Callable[[], None], otherwise: str) -> None:
        """Do something with the tracker. Its failure ends the script only if nothing was ever written.

        Later failures are told on stderr, and `otherwise` says what follows from them.
        """
        try:
            action()
        except Exception as problem:
            what = f"the tracker {self.kind} failed: {type(problem).__name__}: {problem}"
            self._writer = None
            if self._journal is None or self._journal.is_empty:
                raise BFTrainerError(what) from problem
            self._failed_at = self._clock()
            print(f"bftrainer: {what}; {otherwise}", file=sys.stderr, flush=True)
        else:
            self._failed_at = None


class Trackers:
    """The trackers of a run by kind."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._made: dict[str, Tracker] = {}

    def get(self, kind: str, options: Mapping[str, Any]) -> Tracker:
        """Return the tracker of a kind. It is made by the first call; later calls must have the same options."""
        kind = check_kind(kind, options)
        if kind not in self._made:
            self._made[kind] = Tracker(kind, options, self._run, opener(kind))
        elif self._made[kind].options != dict(options):
            raise InputError(
                f"run.tracker({kind!r}) was called before with other options: a training has one run per tracker, so "
                "keep the object that the first call returned"
            )
        return self._made[kind]


def _by_name(values: object) -> Mapping[str, object]:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise InputError(f"tracker.log() needs numbers by name, such as {{'loss': 0.5}}, but got {values!r:.80}")
    return values


def _detached(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values without the graphs of their gradients. They stay tensors: a GPU may still compute them."""
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}


def _number(name: str, value: object) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)  # type: ignore[arg-type] # a number, or a tensor or array of one
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"tracker.log() takes numbers, but {name!r} is of type {type(value).__name__}: {value!r:.80}"
        ) from None
