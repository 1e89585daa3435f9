"""Figures of the `slurm` pool: pilots by state, why pilots were cancelled or ended, and Slurm's answer times.

The pool and its `Slurm` count; `SlurmPool.figures` returns the figures for metrics and `status`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

CancelReason = Literal[
    "a job waits",
    "no demand",
    "node taken",
    "does not start",
    "paused",
    "cut off",
    "another pilot",
    "handed over",
    "account limit",
    "other address",
    "suspended",
    "overdue",
]
"""Why the pool cancelled a pilot. `overdue`: its agent did not join, or did not leave in time."""
EndReason = Literal["preempted", "given up", "time limit", "not wanted", "failed"]
"""Why a pilot ended. `failed`: it ended without being asked to."""


@dataclass(slots=True)
class AnswerTimes:
    """How long one of Slurm's commands took, since the controller started."""

    count: int = 0
    failures: int = 0
    """Answers that did not come, were refusals or could not be parsed; they are part of `count`."""
    total_s: float = 0.0
    last_s: float = 0.0
    longest_s: float = 0.0

    def add(self, took_s: float, *, failed: bool = False) -> None:
        """Count one call of the command."""
        self.count += 1
        self.failures += failed
        self.total_s += took_s
        self.last_s = took_s
        self.longest_s = max(self.longest_s, took_s)


@dataclass(frozen=True, slots=True)
class SlurmFigures:
    """The figures at one moment. All but `pilots` and `wanted` only grow."""

    pilots: Mapping[str, int]
    """Number of pilots by state: `running` and `waiting`."""
    wanted: int
    """Number of pilots that trainers could use now, with the warm reserve."""
    submitted: int
    refused: int
    cancelled: Mapping[CancelReason, int]
    ended: Mapping[EndReason, int]
    rounds: int
    """How often Slurm was asked for the state of nodes and jobs."""
    answers: Mapping[str, AnswerTimes]
    """Answer times by command: `sinfo`, `squeue`, `sbatch`, `scancel`."""


@dataclass(slots=True)
class PilotCounters:
    """Numbers of pilots since the controller started."""

    submitted: int = 0
    refused: int = 0
    """Submissions that failed."""
    cancelled: Counter[CancelReason] = field(default_factory=Counter)
    ended: Counter[EndReason] = field(default_factory=Counter)
    rounds: int = 0

    def figures(self, states: Collection[str], wanted: int, answers: Mapping[str, AnswerTimes]) -> SlurmFigures:
        """Return the figures of a pool that has pilots in these states."""
        pilots = {"running": 0, "waiting": 0, **Counter(states)}
        copies = {command: replace(times) for command, times in answers.items()}
        ended, cancelled = dict(self.ended), dict(self.cancelled)
        return SlurmFigures(pilots, wanted, self.submitted, self.refused, cancelled, ended, self.rounds, copies)
