"""Training loop: gives a script its epochs, batches and steps, and completes the training.

The script's code runs between two `yield`s. Between two batches the loop has the group re-formed, newcomers served and
snapshots taken (`member.py`). At the ends of loops the ranks wait for each other and check that their states agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bftrainer.elastic.protocol import Done
from bftrainer.elastic.torch.data.batch_plan import BatchPlan, Step
from bftrainer.elastic.torch.data.batches import Batches
from bftrainer.elastic.torch.meetings.together import Note
from bftrainer.elastic.torch.member import TrainingMember
from bftrainer.elastic.torch.present_batch import PresentBatch
from bftrainer.elastic.torch.reports import ProgressReports
from bftrainer.errors import InputError

_END_OF_BATCHES = "the end of the batches"


class TrainingLoop:
    """Loops of one rank over epochs, batches and steps."""

    def __init__(self, member: TrainingMember, batch: PresentBatch, reports: ProgressReports) -> None:
        self._member = member
        self._batch = batch
        self._reports = reports
        self._finished = False
        self._looped: int | None = None  # the epoch whose batches have been looped over
        self._left_by_break = False  # the loop over batches; the next call completes it
        self._counted = False  # left after the expected number of batches, with samples left
        self.counts_epochs = False
        """Whether the script is in a loop over `epochs`."""
        self.before_rest: Callable[[], None] = lambda: None
        """Called between two batches, before the state is saved or sent."""
        self.epochs_begun = 0
        """How often the script was at the top of an epoch. The last epoch begins again if a peer is lost at its end."""

    @property
    def is_over(self) -> bool:
        """Whether this rank's part in the training has ended."""
        return self._finished or self._member.left

    def epochs(self, count: int, *, finishes: bool = True) -> Iterator[int]:
        """Iterate over the epochs still to be trained, out of `count`; then complete the training.

        Without `finishes` it is completed when the script ends, so that its code after the loop belongs to it.
        """
        member, state = self._member, self._member.state
        self._reports.epochs = count
        member.join()
        self.counts_epochs = True
        while member.progress.epoch < count and not member.progress.over:
            epoch = member.progress.epoch
            # The script's code after the last batch counts once, also on a rank that has received its effect.
            undo = member.registry.keep_untrained(member.stepper.optimizers) if member.progress.ended else None
            self.begin_epoch()
            yield epoch
            if member.progress.epoch == epoch:
                self.complete_batches()
            if member.progress.epoch == epoch:
                state.put_right()  # the script may have left the loop over batches early
                if undo is not None:
                    undo()
                if epoch + 1 == count and not member.unbroken_fence("the end of the last epoch"):
                    # A peer, perhaps rank 0, was lost during an evaluation: run the code after the last batch again.
                    member.progress.ended = True
                    continue
                if member.stepper.scheduler_every == "epoch":
                    member.stepper.schedule()
                progress = member.progress
                progress.epoch, progress.cursor, progress.part, progress.ended = epoch + 1, 0, 0, False
        if finishes:
            self.finish()

    def batches(self, batches: Batches) -> Iterator[Any]:
        """Iterate over this rank's batches of the present epoch. `Batches` calls it."""
        member, batch_in_hand = self._member, self._batch
        member.join()
        self.complete_batches()
        plan, epoch = batches.plan, member.progress.epoch
        if self._looped == epoch:
            raise InputError(
                f"run.batches() was looped over a second time in epoch {epoch}; there is one loop per epoch. Count "
                "epochs by `for epoch in run.epochs(n):`, evaluate on a DataLoader of your own, and join two training "
                "sets by torch.utils.data.ConcatDataset, or train on them in different epochs"
            )
        self._looped = epoch
        member.together.compare_data(plan.signature, epoch)
        loader = member.loaders.of(batches.dataset, plan, batches.loading)
        if not batches.persistent:
            loader.close()  # as in torch: workers see the dataset as it is when the epoch begins
        self._reports.batches_are(plan)
        given, expected = 0, len(batches)
        position: tuple[int, int] | None = None  # where the loader is: the generation and the cursor
        while self.between(epoch):
            member.together.loop_begins()
            generation, cursor = member.meter.generation, member.progress.cursor
            if (generation, cursor) != position:
                batch_size = plan.global_batch_size(member.world)
                member.stepper.batch_is(member.progress.step, batch_size, plan.global_batch_size(1))
                loader.begin(epoch, cursor, member.rank, member.world)
            loaded = loader.next()
            if loaded is None:
                self.batches_end(epoch)
                return
            step, micro, batch = loaded
            batch_in_hand.begin(step, micro, step.micros[micro].weight)
            last = micro == len(step.micros) - 1
            position = (generation, step.stop if last else cursor)
            given += 1
            try:
                yield batch
            except GeneratorExit:  # a `break`: the code after the loop must not be undone later
                batch_in_hand.end_parts(step.stop)
                self.batches_are_left(epoch, counted=given == expected, plan=plan)
                raise
            batch_in_hand.end_parts(step.stop)
            if batch_in_hand.step is not None:
                raise InputError("run.step() must be called after each batch; it was not after the last one")
        # The other ranks are in a later epoch, and so is the state received from them.

    def steps(self, count: int) -> Iterator[int]:
        """Iterate over the numbers of the steps still to be made, out of `count`; then complete the training."""
        member, batch_in_hand = self._member, self._batch
        if self._reports.epochs is not None:
            raise InputError(
                "run.steps() cannot be used within a loop over run.epochs(): it counts all steps of a training"
            )
        if member.stepper.scales_lr:
            raise InputError("`lr_scaling` needs run.batches(): in run.steps() the size of the batch is not known")
        member.join()
        while self.between(member.progress.epoch):
            number = member.progress.cursor
            if number >= count or member.progress.over:
                break
            batch_in_hand.begin(Step(number, number + 1, ()), 0, 1.0 / member.world)
            yield number
            batch_in_hand.end_parts(number + 1)
            if batch_in_hand.step is not None:
                raise InputError("run.step() must be called in each step; it was not in the last one")
        self.finish()

    def meet(self, call: str, offer: Callable[[], Any], note: Note | None = None) -> Any:
        """Meet the other ranks for a `call` of the script. Return what `offer` returns on the first rank.

        With a `note`, return what the first rank computes from the notes of all ranks.
        """
        if not self._member.joined:
            raise InputError(f"{call} must be called in a loop over run.epochs() or run.steps(), not before it")
        if self.is_over:
            raise InputError(f"the training is over, so {call} cannot reach the other ranks; call it in the last epoch")
        if self._batch.step is not None and not self._batch.parts:
            raise InputError(f"{call} must be called after run.step(), not between a batch and its step")
        self.complete_batches()
        return self._member.together.meet(call, offer, note)

    def complete_batches(self) -> None:
        """Complete a loop over batches that the script left by `break`."""
        if self._left_by_break:
            self._left_by_break = False
            if self._counted:
                raise InputError(
                    "the loop over the batches was left after as many batches as len() had said, but samples of the "
                    "epoch are left, since nodes came or went meanwhile: loop to the end, do not count batches"
                )
            self._member.fence(_END_OF_BATCHES)

    def finish(self) -> None:
        """Complete the training. See `Run.finish`."""
        member = self._member
        if self.is_over or not member.joined:
            return
        self._batch.step = None  # a `break` before the step skips that batch, on all ranks
        self.complete_batches()
        self.begin_epoch()
        member.progress.over = True
        member.give_owed()
        member.fence("the end of the training")
        member.state.put_right()
        # If rank 0 is lost during the save, the next rank 0 saves.
        member.together.meet("the last snapshot", lambda: member.state.save(last=True))
        member.give_owed()
        member.peers.part()  # rank 0 hosts data that the others still have to read
        self._finished = True
        member.loaders.close()
        member.flow.close()
        if member.membership is not None:
            member.membership.send(self._reports.report())
            member.membership.send(Done(member.progress.step))

    def begin_epoch(self) -> None:
        """Record that the script is at the top of an epoch."""
        self._member.together.epoch_begins()
        self.epochs_begun += 1
        self._looped, self._left_by_break = None, False

    def between(self, epoch: int) -> bool:
        """Go from one batch to the next.

        Return False if the state is that of a later epoch than `epoch`: the script has to get there first.
        """
        self._member.follow_generation()
        if self._member.progress.epoch != epoch:
            return False
        self._batch.at_boundary()
        self._member.state.put_right()
        self.before_rest()
        self._member.rest()
        return True

    def batches_end(self, epoch: int) -> None:
        """Wait for all ranks at the end of the batches of an epoch."""
        self._member.fence(_END_OF_BATCHES)
        self._batches_are_over(epoch)

    def batches_are_left(self, epoch: int, *, counted: bool, plan: BatchPlan) -> None:
        """Note that the script leaves the loop over batches by `break`. The next call completes it.

        `counted`: it leaves after as many batches as the epoch was expected to have.
        """
        self._counted = counted and self._has_more(plan)
        self._member.state.put_right()
        self._batches_are_over(epoch)
        self._left_by_break, self._batch.step = True, None

    def batches_were_taken(self, epoch: int) -> None:
        """Note that a framework needs no more batches of an epoch. The next call completes the loop over them.

        Effects of repeated code stay until that call: the framework's code in between is repeated too.
        """
        self._batches_are_over(epoch)
        self._left_by_break, self._counted, self._batch.step = True, False, None

    def _batches_are_over(self, epoch: int) -> None:
        self._member.last_save.at_rest = False
        self._reports.epoch_is_over(epoch)

    def _has_more(self, plan: BatchPlan) -> bool:
        """Return whether the step of the present batch was made and samples of the epoch are left."""
        member = self._member
        left = plan.step_at(member.progress.epoch, member.progress.cursor, member.rank, member.world)
        return self._batch.step is None and left is not None
