"""Loader of one epoch: gives this rank's batches from wherever the training is, also after the group has changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bftrainer.elastic.torch.data.batch_plan import BatchPlan, Step
from bftrainer.elastic.torch.data.batches import Batches
from bftrainer.elastic.torch.member import TrainingMember
from bftrainer.elastic.torch.prepare.handed_batch import HandedBatch
from bftrainer.elastic.torch.prepare.training import PreparedTraining


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """A batch, or a part of one, with its place in the epoch."""

    data: Any
    handed: HandedBatch


class EpochLoader:
    """Batches of one rank in one epoch. What it gives is handed to the `training`."""

    def __init__(self, member: TrainingMember, training: PreparedTraining, batches: Batches, epoch: int) -> None:
        self._member = member
        self._training = training
        self._plan = batches.plan
        self._epoch = epoch
        self._at: tuple[int, int, int] | None = None  # where the loader is: generation, cursor, part
        member.together.compare_data(batches.plan.signature, epoch)
        self._loader = member.loaders.of(batches.dataset, batches.plan, batches.loading)
        if not batches.persistent:
            self._loader.close()

    def at_boundary(self) -> None:
        """Follow a change of the group: all batches given so far are used."""
        member, plan = self._member, self._plan
        member.together.loop_begins()
        self._training.splits = _splits(plan, member.world)
        batch_size = plan.global_batch_size(member.world)
        member.stepper.batch_is(member.progress.step, batch_size, plan.global_batch_size(1))

    def next(self) -> LoadedBatch | None:
        """Return the next batch; None when the epoch has no more."""
        member = self._member
        here = (member.meter.generation, *following(self._training.handed, member.progress.cursor))
        if here != self._at:
            self._loader.begin(self._epoch, here[1], member.rank, member.world)
        loaded = self._loader.next()
        if loaded is None:
            return None
        step, micro, data = loaded
        handed = _handed(self._plan, step, micro, member.world)
        self._training.hand(handed)
        self._at = (here[0], *following([handed], 0))
        return LoadedBatch(data, handed)


def following(handed: list[HandedBatch], cursor: int) -> tuple[int, int]:
    """Return the cursor and the part that come after what the script has received."""
    if not handed:
        return cursor, 0
    last = handed[-1]
    return (last.step.stop, 0) if last.is_last else (last.step.start, last.micro + 1)


def _splits(plan: BatchPlan, world: int) -> bool:
    """Return whether some rank's share of a full batch is larger than what one rank computes at a time."""
    return plan.max_batch is not None and -(-plan.global_batch_size(world) // world) > plan.max_batch


def _handed(plan: BatchPlan, step: Step, micro: int, world: int) -> HandedBatch:
    part = step.micros[micro]
    is_last = micro == len(step.micros) - 1
    return HandedBatch(
        step=step,
        micro=micro,
        weight=part.weight,
        samples=part.samples,
        is_last=is_last,
        ends_epoch=is_last and plan.is_over(step.stop, world),
        total=step.stop - step.start,
    )
