"""Accounting of what trainers gain and lose while the simulator's clock runs.

There are two ways to account for rescaling. `paper`, the authors': it costs rate·R samples at once. `stall`, what
really happens: nothing is produced for R seconds. A node that is given to a trainer computes nothing for the trainer's
`start_s` seconds, while the others go on; they pause when it is ready. When all nodes of a trainer that compute go, the
work since its last snapshot is lost. `replay.py` drives the accounting; `metrics.py` reads the totals.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal

from bftrainer.core.curve import Curve
from bftrainer.core.pool import Node
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
    """Samples per second once all of the trainer's nodes compute."""
    value: float = 0.0
    """Value per second once all of them compute."""
    held: frozenset[Node] = frozenset()
    """The trainer's nodes, for a trainer whose nodes take time to start."""
    starting: dict[Node, float] = field(default_factory=dict)
    """Nodes that do not compute yet, with the time from which on they do."""
    stalled_until: float = -math.inf
    stalled_by: Loss = "waiting"
    unsaved_s: float = 0.0
    """Seconds in which the trainer produced since its last snapshot."""
    unsaved: float = 0.0
    """Samples since the last snapshot."""
    unsaved_value: float = 0.0

    @property
    def computing(self) -> int:
        """Number of nodes that compute."""
        return self.nodes - len(self.starting)

    def rate_on(self, nodes: int) -> float:
        """Samples per second while only so many of the trainer's nodes compute."""
        return self.trainer.curve.rate(nodes) if nodes >= self.trainer.min_nodes else 0.0

    def value_on(self, nodes: int) -> float:
        """Value per second while only so many of the trainer's nodes compute."""
        return self.worth.rate(nodes) if nodes >= self.trainer.min_nodes else 0.0

    def finish_time(self, now: float) -> float:
        """The time at which the trainer will be done if nothing changes."""
        if self.rate <= 0:
            return math.inf
        left, begin = max(self.trainer.work - self.done, 0.0), max(now, self.stalled_until)
        for ready in sorted(set(self.starting.values())):
            rate = self.rate_on(self.nodes - sum(at >= ready for at in self.starting.values()))
            made = rate * max(ready - begin, 0.0)
            if made >= left:
                return begin + left / rate if left else begin
            left -= made
            begin = max(begin, ready + self.trainer.up_s)
        return begin + left / self.rate

    def is_done(self) -> bool:
        """Whether the trainer's work is done, up to the resolution of the clock.

        Seconds since 1970 have a resolution of a quarter of a microsecond: a trainer must not wait for less than that.
        """
        work = self.trainer.work
        return math.isfinite(work) and work - self.done <= max(1e-9 * work, self.rate * CLOCK_S)


def copied(job: SimulatedTrainer) -> SimulatedTrainer:
    """A copy that can be simulated further on its own."""
    return replace(job, starting=dict(job.starting))


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
        """Let a job run from `since` to `now`. Nodes that become ready meanwhile are joined by the others."""
        while job.starting and (ready := min(job.starting.values())) <= now:
            self._run(job, since, ready)
            since, first = max(since, ready), not job.computing
            job.starting = {node: at for node, at in job.starting.items() if at > ready}
            if self.accounting == "stall":
                self._stall(job, ready + job.trainer.up_s, "waiting" if first else "rescale")
        self._run(job, since, now)

    def _run(self, job: SimulatedTrainer, since: float, now: float) -> None:
        """Let a job run while the nodes that compute stay the same."""
        if job.rate <= 0 or now <= since:
            return
        rate, value = job.rate, job.value
        begin = since
        if job.stalled_until > since:
            begin = min(job.stalled_until, now)
            self._lose(job, begin - since, job.stalled_by)
        seconds = now - begin
        if job.starting:
            rate, value = job.rate_on(job.computing), job.value_on(job.computing)
            self.lost["waiting"] += (job.rate - rate) * seconds
            self.lost_value["waiting"] += (job.value - value) * seconds
        left = job.trainer.work - job.done
        if rate * seconds > left:
            # Samples beyond a trainer's work are of no use: the trainer waits until the clock notices that it is done.
            useful = max(left, 0.0) / rate
            self.lost["waiting"] += rate * (seconds - useful)
            self.lost_value["waiting"] += value * (seconds - useful)
            seconds = useful
        made = rate * seconds
        job.done += made
        self.outcome += made
        self.value += value * seconds
        if self.snapshot_every_s and rate > 0:
            self._unsaved(job, seconds, rate, value)

    def finished(self, job: SimulatedTrainer) -> None:
        """Record that a job is done: the rest that the clock could not resolve counts as made."""
        left = job.trainer.work - job.done
        job.done += left
        self.outcome += left
        if job.rate > 0:
            self.value += left / job.rate * job.value

    def preempted(self, job: SimulatedTrainer, now: float, gone: Collection[Node], left: Collection[Node]) -> None:
        """Record that a job lost the nodes `gone` and continues with those `left`, if any.

        If no node is left that computed, none has the training state, so the work since the last snapshot is lost,
        unless the job is done.
        """
        computed = sum(node not in job.starting for node in gone)
        if computed == job.computing and not job.is_done():
            self._lose_unsaved(job)
        if self.accounting == "paper" and computed:
            self._charge(job, job.trainer.down_s, "preemption")
        self._resize(job, left)
        if self.accounting == "stall" and left and computed:
            self._stall(job, now + job.trainer.down_s, "preemption")

    def rescaled(self, job: SimulatedTrainer, now: float, nodes: Collection[Node]) -> None:
        """Record that a decision gave a job other nodes."""
        before, computed = job.nodes, job.computing
        if len(nodes) == before:
            return
        grows, start_s = len(nodes) > before, job.trainer.start_s
        new = [node for node in nodes if node not in job.held] if grows and start_s else []
        seconds = job.trainer.up_s if grows else job.trainer.down_s
        if self.accounting == "paper":
            self._charge(job, seconds, "rescale")
        self._resize(job, nodes)
        job.starting |= dict.fromkeys(new, now + start_s)
        # A job that grows pauses when its new nodes are ready; one that gives up nodes that did not compute, never.
        if self.accounting == "stall" and nodes and not new and (grows or job.computing < computed):
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

    def _unsaved(self, job: SimulatedTrainer, seconds: float, rate: float, value: float) -> None:
        """Count what a job produced in `seconds`, and take the snapshots that are due meanwhile."""
        total = job.unsaved_s + seconds
        if total >= self.snapshot_every_s:
            # The rest since the last snapshot lies within these seconds, in which the rate did not change.
            rest = total % self.snapshot_every_s
            job.unsaved_s, job.unsaved, job.unsaved_value = rest, rate * rest, value * rest
        else:
            job.unsaved_s = total
            job.unsaved += rate * seconds
            job.unsaved_value += value * seconds

    def _lose_unsaved(self, job: SimulatedTrainer) -> None:
        job.done -= job.unsaved
        self.outcome -= job.unsaved
        self.value -= job.unsaved_value
        self.lost["preemption"] += job.unsaved
        self.lost_value["preemption"] += job.unsaved_value

    def _resize(self, job: SimulatedTrainer, nodes: Collection[Node]) -> None:
        if not nodes:  # a trainer that stops in order takes a snapshot
            job.unsaved_s = job.unsaved = job.unsaved_value = 0.0
        job.nodes = len(nodes)
        if job.trainer.start_s:
            job.held = frozenset(nodes)
            job.starting = {node: at for node, at in job.starting.items() if node in job.held}
        job.rate = job.trainer.curve.rate(job.nodes)
        job.value = job.rate if job.worth is job.trainer.curve else job.worth.rate(job.nodes)
