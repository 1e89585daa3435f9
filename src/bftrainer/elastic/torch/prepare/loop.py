"""Loop over a prepared loader: gives a script its batches, as often as the script's own loop asks for them.

A script counts its epochs itself, so the n-th loop over the loader is epoch n. On a worker that joins later, the loops
of epochs that are over are empty. Between two batches the group may change only when every batch that the script has
received was used in a step: a script may add up the gradients of several batches before it steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from bftrainer.elastic.torch.data.batch_plan import BatchPlan, Step
from bftrainer.elastic.torch.data.batches import Batches
from bftrainer.elastic.torch.loop import TrainingLoop
from bftrainer.elastic.torch.member import TrainingMember
from bftrainer.elastic.torch.prepare.carried import CarriedVariables
from bftrainer.elastic.torch.prepare.epoch_loader import EpochLoader, following
from bftrainer.elastic.torch.prepare.handed_batch import HandedBatch
from bftrainer.elastic.torch.prepare.saving import Saves
from bftrainer.elastic.torch.prepare.seeds import seed_all
from bftrainer.elastic.torch.prepare.training import PreparedTraining
from bftrainer.elastic.torch.reports import ProgressReports
from bftrainer.errors import InputError


class PreparedLoop:
    """Loops of one rank's script over its prepared loader."""

    def __init__(
        self,
        member: TrainingMember,
        loop: TrainingLoop,
        reports: ProgressReports,
        training: PreparedTraining,
        saves: Saves,
        carried: CarriedVariables,
    ) -> None:
        self._saves = saves
        self._carried = carried
        self._member = member
        self._loop = loop
        # A file that the lost main rank should have written is there before the state says that it is.
        loop.before_rest = saves.take_over
        self._reports = reports
        self._training = training
        self._begun = 0  # loops over the loader so far
        self._epoch: int | None = None  # the epoch whose loop is under way
        self._epochs_begun = 0  # how often the script had begun an epoch when that loop began
        self._repeats = False  # the last loop that the script began is of an epoch that was over
        self.keeps_values = False
        """Whether the script has values of its own in the state: it may decide by them when it ends."""
        self._given: dict[int, int] = {}  # batches given in the loop under way, by id of its plan
        self.looks_again = False
        """Whether every loop of an epoch that is over gives one batch, and not only the first one."""

    def batches(self, batches: Batches) -> Iterator[Any]:
        """Iterate over this rank's batches of the script's next epoch. `Batches` calls it."""
        member, training, plan = self._member, self._training, batches.plan
        self._carried.refuse_hidden(sys._getframe())
        member.join()
        # The script may need a batch, though none is left.
        looks = self.looks_again or not (self._begun or self._loop.counts_epochs)
        epoch = self._next_epoch()
        if epoch is None and not looks:
            return
        if epoch is None:
            yield from self._one_look(batches)
            return
        loader = EpochLoader(member, training, batches, epoch)
        self._reports.batches_are(plan)
        expected, given, passes = len(batches), 0, training.all_passes
        batch: Any = None
        try:
            while True:
                training.end_batch()
                if training.awaits_step:
                    given += 1
                    self._given[id(plan)] = given
                    yield batch  # for nothing: it is not known which one the script expects
                    continue
                if training.is_at_boundary:
                    if not self._loop.between(epoch):
                        # The others are in a later epoch, and so is the state received from them.
                        self._repeats = not (self._loop.counts_epochs or member.progress.over)
                        if looks and not given:
                            yield self._look(batches)
                            training.leave()
                        return
                    self._check_carried()
                    self._saves.take_over()
                    loader.at_boundary()
                loaded = loader.next()
                if loaded is None:
                    if looks and not given:
                        yield self._look(batches)
                        training.leave()
                    training.end_epoch()
                    self._loop.batches_end(epoch)
                    return
                given += 1
                self._given[id(plan)] = given
                batch = loaded.data
                yield batch
        except GeneratorExit:  # a `break`
            training.end_batch()
            training.leave()
            if training.all_passes == passes:  # the script only wanted to look at a batch
                self._begun, self._epoch = self._begun - (not self._loop.counts_epochs), None
            else:
                self._loop.batches_are_left(epoch, counted=given == expected, plan=plan)
            raise
        finally:
            self._given.pop(id(plan), None)

    def _one_look(self, batches: Batches) -> Iterator[Any]:
        """Give one batch in an epoch that is over, for a script that looks at a batch before it trains."""
        passes = self._training.all_passes
        try:
            yield self._look(batches)
        except GeneratorExit:
            self._begun -= self._training.all_passes == passes
            raise
        finally:
            self._training.leave()

    def _look(self, batches: Batches) -> Any:
        """Return a batch whose gradient does not count."""
        member = self._member
        loader = member.loaders.of(batches.dataset, batches.plan, batches.loading)
        loader.begin(0, 0, member.rank, member.world)
        loaded = loader.next()
        self._training.hand_for_nothing()
        return loaded[2] if loaded is not None else None

    def length(self, plan: BatchPlan) -> int:
        """Return the batches of a whole epoch; within a loop, those given and still to come in it.

        Both differ on a rank that began within the epoch, or whose batches come again: its script counts those it got.
        """
        member, given = self._member, self._given.get(id(plan))
        if given is None:
            return plan.batches_in_epoch(member.rank, member.world)
        cursor, part = following(self._training.handed, member.progress.cursor)
        return given + plan.batches_from(cursor, member.rank, member.world) - part

    @property
    def begun(self) -> int:
        """Loops over the loader that the script has begun."""
        return self._begun

    @property
    def repeats_epochs(self) -> bool:
        """Whether the script runs code of epochs that were over before this worker came."""
        return 0 < self._begun <= self._member.progress.epoch and not self._training.steps

    def steps(self, count: int) -> Iterator[int]:
        """Iterate over the numbers of the steps still to be made, out of `count`, for a script with its own data."""
        member, training = self._member, self._training
        if self._epoch is not None or self._loop.counts_epochs:
            raise InputError("elastic.steps() counts all steps of a training: do not loop over a prepared loader too")
        if member.stepper.scales_lr:
            raise InputError("`lr_scaling` needs a prepared loader: in elastic.steps() the batch is not known")
        self._carried.refuse_hidden(sys._getframe())
        member.join()
        while True:
            training.end_batch()
            if not training.is_at_boundary:
                raise InputError("optimizer.step() must be called in each of elastic.steps(); it was not in the last")
            self._loop.between(member.progress.epoch)
            self._check_carried()
            training.splits = False
            number = member.progress.cursor
            if number >= count or member.progress.over:
                break
            step = Step(number, number + 1, ())
            training.hand(HandedBatch(step, 0, 1.0 / member.world, 1, True, False, total=member.world))
            yield number
        self._loop.finish()

    def micro_steps(self, count: int, seed: int) -> Iterator[int]:
        """Iterate over this rank's share of `count` micro-steps, by whose number the loss of each is divided.

        Random numbers are seeded anew for each, by its number: whichever rank computes it, it draws the same data.
        """
        member, training = self._member, self._training
        if not training.handed or training.handed[-1].step.micros:
            raise InputError("elastic.micro_steps() must be used within a loop over elastic.steps()")
        step = training.handed[-1].step
        own = range(member.rank, count, member.world) or range(count)[:1]
        weight = 1.0 if member.rank < count else 0.0  # with more ranks than micro-steps, some compute one for nothing
        for number, micro_step in enumerate(own):
            last = number == len(own) - 1
            training.hand_part(HandedBatch(step, number, weight, int(weight), last, False, total=count))
            seed_all(seed, step.start, micro_step)
            yield micro_step
        seed_all(seed, step.start, count)

    def _check_carried(self) -> None:
        """Refuse values that could not be sent. With other ranks they are read between two batches anyway."""
        if self._member.world == 1:
            self._carried.state_dict()

    def _next_epoch(self) -> int | None:
        """Return the epoch of the loop that begins. None if it was over before this worker came."""
        progress = self._member.progress
        if self._loop.counts_epochs:  # the script loops over elastic.epochs(n)
            if self._epoch == progress.epoch and self._epochs_begun == self._loop.epochs_begun:
                raise InputError(
                    f"the prepared loader was looped over a second time in epoch {self._epoch}; there is one loop per "
                    "epoch. Evaluate under torch.no_grad(), or on a loader of its own"
                )
            self._epoch, self._epochs_begun = progress.epoch, self._loop.epochs_begun
            return self._epoch
        number, self._begun = self._begun, self._begun + 1
        if number and self._carried.names:
            raise InputError(
                "`carry` needs a loop over elastic.epochs(n), but this script counts its epochs itself: a node that "
                "joins later would run the code of all epochs that are over on the carried values. Write "
                "`for epoch in elastic.epochs(n):`"
            )
        entered = self.enter(number)
        self._repeats = not (entered or self._member.progress.over)
        return number if entered else None

    def refuse_end_in_repeat(self) -> None:
        """Refuse the end of a script that keeps values and ends in an epoch that was over before this worker came.

        Its code of that epoch has decided by values of the present one, for example to stop early.
        """
        if self.keeps_values and self._repeats:
            raise InputError(
                f"the script ended in epoch {self._begun - 1}, but epoch {self._member.progress.epoch} is in progress: "
                "this node joined later, or resumed the training, and ran the code of epochs that are over on values "
                "of the present one. Write `for epoch in elastic.epochs(n):`, which begins in the right epoch"
            )

    def enter(self, epoch: int) -> bool:
        """Go on to an epoch, by its number. Return False if it was over before this worker came."""
        member = self._member
        if epoch and member.progress.epoch == epoch - 1:
            self._loop.complete_batches()
        if epoch and member.progress.epoch == epoch - 1:
            member.state.put_right()
            member.progress.epoch, member.progress.cursor, member.progress.part = epoch, 0, 0
        if epoch < member.progress.epoch or member.progress.over:
            # The script runs code of epochs that are over. Its effect is in the state already.
            member.state.repeats_code()
            return False
        self._loop.begin_epoch()
        self._epoch = epoch
        return True
