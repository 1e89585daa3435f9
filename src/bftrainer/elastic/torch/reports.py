"""Progress reports of one rank: what its manager is told about steps, rates, metrics and snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import SupportsFloat

from bftrainer.elastic.metrics import Position
from bftrainer.elastic.protocol import Report
from bftrainer.elastic.torch.data.batch_plan import BatchPlan
from bftrainer.elastic.torch.member import TrainingMember
from bftrainer.elastic.torch.rates import Course


class ProgressReports:
    """Collects what a `Report` says beyond the member's own state, and writes the report."""

    def __init__(self, member: TrainingMember) -> None:
        self.epochs: int | None = None
        """Number of epochs of the training, if the script has said it."""
        self.redone = 0
        """Samples that this rank computed in vain because a step failed."""
        self._epochs_over = 0  # epochs whose batches are all done, on this rank
        self._course: tuple[Course, BatchPlan] | None = None
        self._member = member

    def note(self, metrics: Mapping[str, SupportsFloat]) -> None:
        """Note values for the present epoch and step. They are sent with the next report."""
        progress = self._member.progress
        self._member.metrics.note(dict(metrics), Position(self._epochs_done(), progress.step, progress.samples))

    def batches_are(self, plan: BatchPlan) -> None:
        """Take the size of the whole training from the plan of the present epoch."""
        if self.epochs is not None:
            self._course = Course(self.epochs, plan.length, plan.drop_last), plan

    def epoch_is_over(self, epoch: int) -> None:
        """Note that all batches of `epoch` are done on this rank: values reported now are those of the whole epoch."""
        self._epochs_over = epoch + 1
        self._member.metrics.epoch_is_over(epoch + 1, self._member.progress.step)

    def report(self) -> Report:
        """Write the report of this moment. Called in the thread that sends it."""
        member, state, meter = self._member, self._member.state, self._member.meter
        meter.look()
        progress = state.progress
        metrics, metrics_at = member.metrics.both()
        stay_windows, stay_rate, stay_scatter = meter.stay()
        interval = state.snapshot_interval if member.rank == 0 else None
        return Report(
            generation=meter.generation,
            step=progress.step,
            epoch=self._epochs_done(),
            samples=progress.samples,
            world=meter.nodes if state.has_state else 0,
            rates={str(nodes): round(rate, 3) for nodes, rate in meter.rates().items()},
            metrics=metrics,
            metrics_at=metrics_at,
            snapshot_step=state.snapshot_step,
            total=self._total(),
            epochs=self.epochs,
            redone=self.redone,
            windows=meter.windows(),
            stay_windows=stay_windows,
            stay_rate=float(f"{stay_rate:.6g}"),  # it may be far below one sample per second
            stay_scatter=round(stay_scatter, 9),
            snapshot_every_s=round(interval.interval_s, 3) if interval is not None else None,
            snapshot_stall_s=round(interval.stall_s, 6) if interval is not None else None,
        )

    def _epochs_done(self) -> int:
        """Return the completed epochs. A script may do more in an epoch after its last batch."""
        return max(self._member.progress.epoch, self._epochs_over)

    def _total(self) -> int | None:
        """Return the samples of the whole training, if known."""
        if self._course is None:
            return None
        course, plan = self._course
        progress, batch = self._member.progress, plan.global_batch_size(self._member.world)
        return course.total(progress.samples, progress.epoch, progress.cursor, batch)
