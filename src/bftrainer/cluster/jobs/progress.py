"""Trainer progress holds the samples, epoch and metrics that a trainer's workers reported.

`elastic.py` passes in reports; status, learning and the event log read the result. `Rescale`, also defined here,
describes one complete change of a trainer's members.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bftrainer.cluster.jobs.extremes import MetricExtremes
from bftrainer.elastic.metrics import Position, ReportedMetrics
from bftrainer.elastic.protocol import Report


@dataclass(frozen=True, slots=True)
class Rescale:
    """A complete change of a trainer's members."""

    generation: int
    world_before: int
    world: int
    pause_s: float
    form_s: float
    sync_s: float
    preempted: bool
    start_s: tuple[float, ...] = ()
    """How many seconds each newcomer took from its start to the end of the rescale."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Parts of `pause_s` by name; empty if the workers do not say them."""

    @property
    def why(self) -> str:
        """The kind of change: start, preempt, grow, shrink or move."""
        if self.world_before == 0:
            return "start"
        if self.preempted:
            return "preempt"
        return "grow" if self.world > self.world_before else "shrink" if self.world < self.world_before else "move"


@dataclass(slots=True)
class TrainerProgress:
    """How far the training is, according to the workers' reports."""

    samples: int = 0
    total: int | None = None
    epoch: int = 0
    epochs: int | None = None
    step: int = 0
    generation: int = 0
    redone: int = 0
    rates: dict[int, float] = field(default_factory=dict)
    stay: tuple[int, int, float, float | None] = (0, 0, 0.0, None)
    """Nodes of the newest generation, how many windows were measured in it, their rate and their scatter."""
    reported: ReportedMetrics = field(default_factory=ReportedMetrics)
    extremes: MetricExtremes = field(default_factory=MetricExtremes)
    snapshot_step: int | None = None
    snapshot_every_s: float | None = None
    snapshot_stall_s: float | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that the script reported last."""
        return self.reported.values

    def take(self, report: Report) -> None:
        """Add a member's report.

        Reports of earlier generations are ignored. From a member that is behind the others, only metrics and snapshot
        data are taken, because it may be the only one that has them: while rank 0 evaluates, the others are ahead.
        """
        if report.generation < max(self.generation, 1):
            return
        is_first = report.generation > self.generation
        if is_first:
            self.generation = report.generation
            # All members were lost and training continued from a snapshot, or the member that was ahead was lost.
            self.redone += max(self.samples - report.samples, 0)
            self.reported.forget_after(report.samples)
        at = Position(report.epoch, report.step, report.samples)
        self.reported.take(report.metrics, report.metrics_at, at)
        self.extremes.note(report.metrics, report.metrics_at, at)
        if report.snapshot_every_s is not None:  # only the member that takes snapshots reports this
            self.snapshot_step = report.snapshot_step if report.snapshot_step is not None else self.snapshot_step
            self.snapshot_every_s, self.snapshot_stall_s = report.snapshot_every_s, report.snapshot_stall_s
        if report.samples < self.samples and not is_first:
            return
        self.samples, self.step, self.epoch = report.samples, report.step, report.epoch
        self.total = report.total if report.total is not None else self.total
        self.epochs = report.epochs if report.epochs is not None else self.epochs
        self.rates = {int(world): rate for world, rate in report.rates.items()}
        self.stay = (report.world, report.stay_windows, report.stay_rate, report.stay_scatter)
        if report.stay_scatter is None:  # the worker does not say it: it is of an earlier version
            self.stay = (report.world, report.windows, self.rates.get(report.world, 0.0), None)
