"""Accounting of what trainers gain and lose while the simulator's clock runs.

There are two ways to account for rescaling. `paper`, the authors': it costs rate·R samples at once. `stall`, what
really happens: nothing is produced for R seconds. When all nodes of a trainer go, the work since its last snapshot is
lost. `replay.py` drives the accounting; `metrics.py` reads the totals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from bftrainer.core.curve import Curve
from bftrainer.core.trainer import Trainer

Accounting = Literal["paper", "stall"]
Loss = Literal["preemption", "rescale", "waiting"]
"""Why samples were not produced: loss of nodes; growing and shrinking; starting up, or holding nodes when done."""


CLOCK_S = 1e-6


@dataclass(slots=True)
class SimulatedTrainer:
    """State of a trainer while it is simulated."""

    trainer: Trainer
    worth: Curve
    """Value per second on n nodes by the objective: the rate itself, or the rate in another unit."""
    admitted_at: float
    done: float = 0.0
    nodes: int = 0
    rate: float = 0.0
    value: float = 0.0
    """Value per second on the trainer's current nodes."""
    stalled_until: float = -math.inf
    stalled_by: Loss = "waiting"
    unsaved_s: float = 0.0
    """Seconds in which the trainer produced since its last snapshot."""
    unsaved: float = 0.0
    """Samples since the last snapshot."""
    unsaved_value: float = 0.0

    def finish_time(self, now: float) -> float:
        """The time at which the trainer will be done if nothing changes."""
        if self.rate <= 0:
            return math.inf
        return max(now, self.stalled_until) + max(self.trainer.work - self.done, 0.0) / self.rate

    def is_done(self) -> bool:
        """Whether the trainer's work is done, up to the resolution of the clock.

        Seconds since 1970 have a resolution of a quarter of a microsecond: a trainer must not wait for less than that.
        """
        left = self.trainer.work - self.done
        return left <= max(1e-9 * self.trainer.work, self.rate * CLOCK_S)


def _nothing() -> dict[Loss, float]:
    return {"preemption": 0.0, "rescale": 0.0, "waiting": 0.0}


@dataclass(slots=True)
class Books:
    """Totals of samples produced and lost over all trainers, also in the objective's unit."""

    accounting: Accounting
    snapshot_every_s: float = 0.0
    """Seconds of production between two snapshots; 0: no work is lost when all nodes of a trainer go."""
    outcome: float = 0.0
    lost: dict[Loss, float] = field(default_factory=_nothing)
    value: float = 0.0
    lost_value: dict[Loss, float] = field(default_factory=_nothing)

    def progress(self, job: SimulatedTrainer, since: float, now: float) -> None:
        """Let a job run from `since` to `now`."""
        if job.rate <= 0 or now <= since:
            return
        begin = since
        if job.stalled_until > since:
            begin = min(job.stalled_until, now)
            self._lose(job, begin - since, job.stalled_by)
        seconds = now - begin
        left = job.trainer.work - job.done
        if job.rate * seconds > left:
            # Samples beyond a trainer's work are of no use: the trainer waits until the clock notices that it is done.
            useful = max(left, 0.0) / job.rate
            self._lose(job, seconds - useful, "waiting")
            seconds = useful
        made = job.rate * seconds
        job.done += made
        self.outcome += made
        self.value += job.value * seconds
        if self.snapshot_every_s:
            self._unsaved(job, seconds)

    def finished(self, job: SimulatedTrainer) -> None:
        """Record that a job is done: the rest that the clock could not resolve counts as made."""
        left = job.trainer.work - job.done
        job.done += left
        self.outcome += left
        if job.rate > 0:
            self.value += left / job.rate * job.value

    def preempted(self, job: SimulatedTrainer, now: float, nodes_left: int, *, all_gone: bool = False) -> None:
        """Record that a job lost nodes and continues with those left, if any.

        `all_gone`: no node is left that has the training state, so the work since the last snapshot is lost, unless
        the job is done.
        """
        if all_gone and not job.is_done():
            self._lose_unsaved(job)
        if self.accounting == "paper":
            self._charge(job, job.trainer.down_s, "preemption")
        self._resize(job, nodes_left)
        if self.accounting == "stall" and nodes_left:
            self._stall(job, now + job.trainer.down_s, "preemption")

    def rescaled(self, job: SimulatedTrainer, now: float, nodes: int) -> None:
        """Record that a decision gave a job another number of nodes."""
        before = job.nodes
        if nodes == before:
            return
        seconds = job.trainer.up_s if nodes > before else job.trainer.down_s
        if self.accounting == "paper":
            self._charge(job, seconds, "rescale")
        self._resize(job, nodes)
        if self.accounting == "stall" and nodes:
            self._stall(job, now + seconds, "rescale" if before else "waiting")

    def _lose(self, job: SimulatedTrainer, seconds: float, why: Loss) -> None:
        self.lost[why] += job.rate * seconds
        self.lost_value[why] += job.value * seconds

    def _charge(self, job: SimulatedTrainer, seconds: float, why: Loss) -> None:
        """Apply the authors' rule: the cost of a rescale is subtracted from the samples made."""
        self._lose(job, seconds, why)
        job.done -= job.rate * seconds
        self.outcome -= job.rate * seconds
        self.value -= job.value * seconds

    def _stall(self, job: SimulatedTrainer, until: float, why: Loss) -> None:
        # Of several stalls at one instant the longest counts.
        if until > job.stalled_until:
            job.stalled_until, job.stalled_by = until, why

    def _unsaved(self, job: SimulatedTrainer, seconds: float) -> None:
        """Count what a job produced in `seconds`, and take the snapshots that are due meanwhile."""
        total = job.unsaved_s + seconds
        if total >= self.snapshot_every_s:
            # The rest since the last snapshot lies within these seconds, in which the rate did not change.
            rest = total % self.snapshot_every_s
            job.unsaved_s, job.unsaved, job.unsaved_value = rest, job.rate * rest, job.value * rest
        else:
            job.unsaved_s = total
            job.unsaved += job.rate * seconds
            job.unsaved_value += job.value * seconds

    def _lose_unsaved(self, job: SimulatedTrainer) -> None:
        job.done -= job.unsaved
        self.outcome -= job.unsaved
        self.value -= job.unsaved_value
        self.lost["preemption"] += job.unsaved
        self.lost_value["preemption"] += job.unsaved_value

    def _resize(self, job: SimulatedTrainer, nodes: int) -> None:
        if not nodes:  # a trainer that stops in order takes a snapshot
            job.unsaved_s = job.unsaved = job.unsaved_value = 0.0
        job.nodes = nodes
        job.rate = job.trainer.curve.rate(nodes)
        job.value = job.rate if job.worth is job.trainer.curve else job.worth.rate(nodes)
