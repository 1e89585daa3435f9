"""Recorder for `bftrainer trace record`: polls a machine's nodes and writes down which are idle.

A source is a command to run and the format of its output; `poll` runs it once. The recorder polls on a fixed schedule
and appends to a journal (`bftrainer.traces.recorder.journal`), from which `bftrainer.traces.recorder.recording` makes
the trace.
"""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from bftrainer.errors import BFTrainerError, InputError
from bftrainer.processes.run import CommandError, CommandNotStartedError, CommandTimeoutError, run
from bftrainer.traces.recorder.journal import Entry, Journal
from bftrainer.traces.recorder.states import Form, NodeStates, read_lent, read_sinfo, read_states

INTERVAL_S = 10.0
"""Default time between polls (§2.1 of the paper)."""
TIMEOUT_S = 30.0
_MOST_BYTES = 1 << 28
"""The longest answer that is read."""
SINFO = ("sinfo", "-N", "-h", "-o", "%N %T")
"""Command for Slurm's nodes and their states; the `slurm` pool runs the same."""
SQUEUE = ("squeue", "-a", "-h", "--states=R,CG,S", "-o", "%P|%N")
"""Command for the partition and nodes of every job that holds nodes."""


class PollError(BFTrainerError):
    """Raised when a source could not be polled, or its output could not be read."""


@dataclass(frozen=True, slots=True)
class StateSource:
    """Source of node states: a command and the format of its output."""

    command: tuple[str, ...] | str
    """Command as words, run without a shell, or as a line for the shell."""
    form: Form = "auto"
    timeout_s: float = TIMEOUT_S
    idle_partition: str = ""
    """For Slurm: nodes with jobs of this partition only count as idle."""

    def __post_init__(self) -> None:
        if not self.command or (isinstance(self.command, str) and not self.command.strip()):
            raise InputError("a source needs a command to run, but got none; give the one that lists the nodes")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise InputError(f"a source's timeout must be a positive number of seconds, but got {self.timeout_s}")

    def __str__(self) -> str:
        return self.command if isinstance(self.command, str) else shlex.join(self.command)

    def identity(self) -> dict[str, object]:
        """What must stay the same to continue a journal: the command, its format and what counts as idle."""
        command = self.command if isinstance(self.command, str) else list(self.command)
        lent = {"idle_partition": self.idle_partition} if self.idle_partition else {}
        return {"command": command, "form": self.form, **lent}


def default_source(kind: str, command: str | None = None, idle_partition: str = "") -> StateSource:
    """The source for a scheduler, or for a user's `command` that prints idle nodes (or any format we read)."""
    if idle_partition and kind != "slurm":
        raise InputError(f"the source {kind!r} knows no partitions; leave out --idle-partition {idle_partition}")
    if kind == "script":
        if command is None:
            raise InputError("the source `script` needs a command that prints the idle nodes, but got none")
        return StateSource(command)
    if command is not None:
        raise InputError(f"the source {kind!r} has its own command; use the source `script` to run {command!r}")
    if kind == "slurm":
        return StateSource(SINFO, "sinfo", idle_partition=idle_partition)
    if kind == "pbs":
        return StateSource(("pbsnodes", "-a", "-F", "json"), "pbs-json")
    raise InputError(f"a source must be slurm, pbs or script, but got {kind!r}")


def poll(source: StateSource) -> NodeStates:
    """Poll `source` once. It answers within its timeout, or PollError says why not."""
    # A node that changes hands between the two answers, some milliseconds, may be seen wrongly until the next poll.
    jobs = _run(replace(source, command=SQUEUE)) if source.idle_partition else ""
    output = _run(source)
    try:
        if source.idle_partition:
            return read_sinfo(output, read_lent(jobs, source.idle_partition))
        return read_states(output, source.form)
    except InputError as error:
        raise PollError(f"{source}: {error}") from None


def steady_clock() -> Callable[[], float]:
    """A clock that starts at the time of day and then only goes forward, even if the system's clock is set.

    Otherwise, setting the clock during an idle period would make its length wrong by as much.
    """
    kind = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # counts a suspended machine's time as well
    offset = time.time() - time.clock_gettime(kind)
    return lambda: offset + time.clock_gettime(kind)


class StopSignal(Protocol):
    """Signal that ends a recording; the recorder waits only on it. A `threading.Event`, in tests something faster."""

    def is_set(self) -> bool:
        """Whether to stop now."""
        ...

    def wait(self, timeout: float) -> bool:
        """Wait until the signal is set or `timeout` seconds have passed; returns whether it is set."""
        ...


@dataclass(frozen=True, slots=True)
class RecordingSummary:
    """Summary of one run of the recorder."""

    polls: int
    """Number of successful polls."""
    missed: int


@dataclass(frozen=True)
class Recorder:
    """Polls at every interval and journals the results. A failed poll is journalled too, and the next slot is tried."""

    poll: Callable[[], NodeStates]
    journal: Journal
    stop: StopSignal
    clock: Callable[[], float] = field(default_factory=steady_clock)
    watch: Callable[[Entry], None] = lambda entry: None
    """Called with each entry once it is on the disk."""

    def run(self, duration_s: float | None = None) -> RecordingSummary:
        """Record until told to stop, or until `duration_s` after the first poll."""
        if duration_s is not None and not duration_s > 0:
            raise InputError(f"the duration must be a positive number of seconds, but got {duration_s}")
        interval_s = self.journal.header.interval_s
        # The last slot is computed from its number, so that rounding does not lose the poll at the very end.
        last_slot = math.inf if duration_s is None else math.floor(duration_s / interval_s + 1e-6)
        begin = self.clock()
        slot = polls = missed = 0
        while slot <= last_slot and self._wait_until(begin + slot * interval_s):
            entry = self._poll_once()
            polls, missed = (polls + 1, missed) if entry.missed is None else (polls, missed + 1)
            slot = _next_slot(slot, begin, interval_s, self.clock())
        return RecordingSummary(polls, missed)

    def _poll_once(self) -> Entry:
        t = self.clock()
        try:
            states = self.poll()
        except BFTrainerError as error:
            entry = self.journal.missed(t, str(error))
        else:
            entry = self.journal.saw(t, states)
        self.watch(entry)
        return entry

    def _wait_until(self, time: float) -> bool:
        """Wait until `time`; returns False when told to stop instead."""
        while not self.stop.is_set():
            left = time - self.clock()
            if left <= 0:
                return True
            self.stop.wait(left)
        return False


def record(
    source: StateSource,
    path: str | Path,
    stop: StopSignal,
    *,
    interval_s: float = INTERVAL_S,
    duration_s: float | None = None,
    watch: Callable[[Entry], None] = lambda entry: None,
) -> RecordingSummary:
    """Record `source` into the journal at `path`, which is new or continued."""
    with Journal.open(path, source.identity(), interval_s) as journal:
        return Recorder(lambda: poll(source), journal, stop, watch=watch).run(duration_s)


def _next_slot(slot: int, begin: float, interval_s: float, now: float) -> int:
    """The first slot after `slot` that is in the future: a slow poll skips slots instead of bunching them."""
    ahead = max(slot + 1, math.floor((now - begin) / interval_s) + 1)
    return ahead if begin + ahead * interval_s > now else ahead + 1


def _run(source: StateSource) -> str:
    """The output of the command."""
    argv = ["/bin/sh", "-c", source.command] if isinstance(source.command, str) else list(source.command)
    try:
        result = run(argv, source.timeout_s, env=os.environ, most=_MOST_BYTES)
    except CommandNotStartedError as problem:
        raise PollError(f"{source}: cannot run it: {problem.reason}; is {argv[0]} installed and on the PATH?") from None
    except CommandTimeoutError:
        raise PollError(f"{source}: no answer within {source.timeout_s:g} s") from None
    except CommandError as problem:
        raise PollError(f"{source}: {problem}") from None
    if result.status != 0:
        lines = result.complaints
        raise PollError(f"{source}: {result.failure}: {lines[0] if lines else 'it printed nothing on stderr'}")
    return result.out.decode(errors="replace")
