"""How far a trainer is and how its changes of size went, by what its workers say.

`job.py` feeds it reports and formed generations; status, learning and the event log read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bftrainer.elastic.noted import At, Noted
from bftrainer.elastic.protocol import Report


@dataclass(frozen=True, slots=True)
class Rescale:
    """A change of a trainer's members that is complete."""

    generation: int
    world_before: int
    world: int
    pause_s: float
    form_s: float
    sync_s: float
    preempted: bool
    start_s: tuple[float, ...] = ()
    """How long newcomers took from their start to here."""

    @property
    def why(self) -> str:
        """In a word."""
        if self.world_before == 0:
            return "start"
        if self.preempted:
            return "preempt"
        return "grow" if self.world > self.world_before else "shrink" if self.world < self.world_before else "move"


@dataclass(slots=True)
class Progress:
    """How far the training is, by what its workers reported."""

    samples: int = 0
    total: int | None = None
    epoch: int = 0
    epochs: int | None = None
    step: int = 0
    generation: int = 0
    redone: int = 0
    rates: dict[int, float] = field(default_factory=dict)
    noted: Noted = field(default_factory=Noted)
    snapshot_step: int | None = None
    snapshot_every_s: float | None = None
    snapshot_stall_s: float | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """What the script reported last."""
        return self.noted.values

    def take(self, report: Report) -> None:
        """A member reported. Old news are ignored; of a member that is behind, all but what it alone may know.

        Rank 0 evaluates, and meanwhile the others are ahead of it.
        """
        if report.generation < max(self.generation, 1):
            return
        is_first = report.generation > self.generation
        if is_first:
            self.generation = report.generation
            # All were lost, and training went on from a snapshot; or the one that was ahead was lost.
            self.redone += max(self.samples - report.samples, 0)
            self.noted.forget_after(report.samples)
        self.noted.take(report.metrics, report.metrics_at, At(report.epoch, report.step, report.samples))
        if report.snapshot_every_s is not None:  # of the one that takes them
            self.snapshot_step = report.snapshot_step if report.snapshot_step is not None else self.snapshot_step
            self.snapshot_every_s, self.snapshot_stall_s = report.snapshot_every_s, report.snapshot_stall_s
        if report.samples < self.samples and not is_first:
            return
        self.samples, self.step, self.epoch = report.samples, report.step, report.epoch
        self.total = report.total if report.total is not None else self.total
        self.epochs = report.epochs if report.epochs is not None else self.epochs
        self.rates = {int(world): rate for world, rate in report.rates.items()}
