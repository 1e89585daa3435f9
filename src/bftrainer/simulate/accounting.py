"""What trainers gain and lose while the simulator's clock runs.

Two ways to account for rescaling. `paper`, the authors': it costs rate·R samples at once. `stall`, what really happens:
nothing is produced for R seconds. `replay.py` drives it; `metrics.py` reads the totals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from bftrainer.core.curve import Curve
from bftrainer.core.trainer import Trainer

Accounting = Literal["paper", "stall"]
Loss = Literal["preemption", "rescale", "waiting"]
"""Why samples were not produced: nodes taken away; growing and shrinking; starting up, or holding nodes when done."""


CLOCK_S = 1e-6


@dataclass(slots=True)
class Job:
    """A trainer while it is simulated."""

    trainer: Trainer
    worth: Curve
    """What a second on n nodes is worth by the objective: the rate itself, or the rate in another unit."""
    admitted_at: float
    done: float = 0.0
    nodes: int = 0
    rate: float = 0.0
    value: float = 0.0
    """The worth of a second on the nodes it has."""
    stalled_until: float = -math.inf
    stalled_by: Loss = "waiting"

    def finish_time(self, now: float) -> float:
        """When it will be done if nothing changes."""
        if self.rate <= 0:
            return math.inf
        return max(now, self.stalled_until) + max(self.trainer.work - self.done, 0.0) / self.rate

    def is_done(self) -> bool:
        """Whether its work is done, but for what the clock cannot resolve.

        Seconds since 1970 have a resolution of a quarter of a microsecond: a trainer must not wait for less than that.
        """
        left = self.trainer.work - self.done
        return left <= max(1e-9 * self.trainer.work, self.rate * CLOCK_S)


def _nothing() -> dict[Loss, float]:
    return {"preemption": 0.0, "rescale": 0.0, "waiting": 0.0}


@dataclass(slots=True)
class Books:
    """Samples produced and lost, over all trainers, and the same in the objective's unit."""

    accounting: Accounting
    outcome: float = 0.0
    lost: dict[Loss, float] = field(default_factory=_nothing)
    value: float = 0.0
    lost_value: dict[Loss, float] = field(default_factory=_nothing)

    def progress(self, job: Job, since: float, now: float) -> None:
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
            # What a trainer would make beyond its work is of no use: it waits to be noticed.
            useful = max(left, 0.0) / job.rate
            self._lose(job, seconds - useful, "waiting")
            seconds = useful
        made = job.rate * seconds
        job.done += made
        self.outcome += made
        self.value += job.value * seconds

    def finished(self, job: Job) -> None:
        """A job is done: what the clock could not resolve counts as made."""
        left = job.trainer.work - job.done
        job.done += left
        self.outcome += left
        if job.rate > 0:
            self.value += left / job.rate * job.value

    def preempted(self, job: Job, now: float, nodes_left: int) -> None:
        """A job lost nodes and goes on with those left, if any."""
        if self.accounting == "paper":
            self._charge(job, job.trainer.down_s, "preemption")
        self._resize(job, nodes_left)
        if self.accounting == "stall" and nodes_left:
            self._stall(job, now + job.trainer.down_s, "preemption")

    def rescaled(self, job: Job, now: float, nodes: int) -> None:
        """A decision gave a job another number of nodes."""
        before = job.nodes
        if nodes == before:
            return
        seconds = job.trainer.up_s if nodes > before else job.trainer.down_s
        if self.accounting == "paper":
            self._charge(job, seconds, "rescale")
        self._resize(job, nodes)
        if self.accounting == "stall" and nodes:
            self._stall(job, now + seconds, "rescale" if before else "waiting")

    def _lose(self, job: Job, seconds: float, why: Loss) -> None:
        self.lost[why] += job.rate * seconds
        self.lost_value[why] += job.value * seconds

    def _charge(self, job: Job, seconds: float, why: Loss) -> None:
        """The authors' rule: what a rescale costs is taken off what was made."""
        self._lose(job, seconds, why)
        job.done -= job.rate * seconds
        self.outcome -= job.rate * seconds
        self.value -= job.value * seconds

    def _stall(self, job: Job, until: float, why: Loss) -> None:
        # At one instant the longer stall is the one that counts.
        if until > job.stalled_until:
            job.stalled_until, job.stalled_by = until, why

    def _resize(self, job: Job, nodes: int) -> None:
        job.nodes = nodes
        job.rate = job.trainer.curve.rate(nodes)
        job.value = job.rate if job.worth is job.trainer.curve else job.worth.rate(nodes)
