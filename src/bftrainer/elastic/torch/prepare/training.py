"""Prepared training: what a script's own `loss.backward()` and `optimizer.step()` do on many ranks.

After a backward pass the gradients are summed over the ranks, so that whatever the script then does with them (clip,
unscale, log) it does with those of the whole batch. `optimizer.step()` applies and commits. If a peer is lost, the
step does not count: the script's further calls for this batch do nothing, and its loader gives the batch again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from torch import Tensor
from torch.optim import Optimizer

from bftrainer.elastic.torch.gradients.loss_reduction import SumWatch
from bftrainer.elastic.torch.gradients.optimizers import params_of
from bftrainer.elastic.torch.gradients.riders import StepTotals
from bftrainer.elastic.torch.gradients.step_exchange import StepExchange
from bftrainer.elastic.torch.group.group import GroupBroken
from bftrainer.elastic.torch.member import TrainingMember
from bftrainer.elastic.torch.prepare.handed_batch import HandedBatch
from bftrainer.elastic.torch.prepare.pass_gradients import PassGradients
from bftrainer.elastic.torch.prepare.pass_loss import PassLoss
from bftrainer.elastic.torch.prepare.pass_pattern import PassPattern, refuse_accumulation
from bftrainer.elastic.torch.prepare.saving import Saves
from bftrainer.elastic.torch.present_batch import PresentBatch
from bftrainer.errors import InputError

_CHANGED = (
    "the gradients were changed before they were summed over all ranks, when each rank has only its part of them. Call "
    "optimizer.synchronize() before the line that changes them"
)


class PreparedTraining:
    """Backward passes and steps of one rank's script."""

    def __init__(self, member: TrainingMember, batch: PresentBatch, saves: Saves) -> None:
        self.accumulate: int | None = None
        """Number of batches per step, if the script said so."""
        self.refuse_accumulation: Callable[[], NoReturn] = refuse_accumulation
        """Raises the error for a script that adds up gradients when its batches come in parts."""
        self.exchange: StepExchange | None = None
        """Numbers that all ranks get along with the gradients of the present step."""
        self._saves = saves
        self.pattern = PassPattern()
        """What was learned of the script's passes. Part of the state, because all ranks must expect the same."""
        self.splits = False
        """Whether some rank's share of a batch comes in several parts."""
        self._member = member
        self._optimizers = member.stepper.optimizers
        self._batch = batch
        self._grads = PassGradients()
        self.loss = PassLoss()
        """The loss of the present step, for reports."""
        self._sum_watch = SumWatch()
        self.present: HandedBatch | None = None
        """The batch that the next backward passes are for, if the caller says so; else the first one without a pass."""
        self._handed: list[HandedBatch] = []
        self._passes = 0  # backward passes since the last step; with several optimizers, of this batch
        self._parts = 0  # steps for this batch, if there are several optimizers
        self._total: StepTotals | None = None
        self._others_changed = False  # buffers that are copied from rank 0 have changed in this step
        self._lost = False  # a peer was lost: calls for this batch do nothing
        self.steps = 0
        """Calls of `optimizer.step()` that were answered, whether they changed anything or not."""
        self.all_passes = 0
        """Backward passes for batches, of all steps."""
        self._counts: list[int] = []  # gradients that had arrived before the present pass, by optimizer
        self._stepped = True  # the script called optimizer.step() since it received the last batch

    # The loop over the loader.

    @property
    def handed(self) -> list[HandedBatch]:
        """Batches that the script has received and no step has used."""
        return self._handed

    @property
    def is_at_boundary(self) -> bool:
        """Whether all that the script received is used, so that the group may change now."""
        return not self._handed

    @property
    def awaits_step(self) -> bool:
        """Whether a peer was lost while the script adds up gradients, and it has not stepped since.

        It counts its batches from step to step, so those of this step come again only after its step.
        """
        return self._lost and not self._stepped

    def hand(self, batch: HandedBatch) -> None:
        """Note that the script receives a batch."""
        if self.splits and self.accumulate is None and not self._stepped:
            self.refuse_accumulation()
        if self._is_grouped and self._handed and self._is_complete():
            raise InputError(
                f"elastic.prepare() was given accumulate={self.accumulate}, but the script did not call "
                f"optimizer.step() after {len(self._handed)} batches"
            )
        self._add(batch)

    def hand_part(self, batch: HandedBatch) -> None:
        """Note that the script receives one of the parts into which it divides a step itself."""
        if batch.micro == 0:
            self._handed = []
        self.splits = True
        self._add(batch)

    def _add(self, batch: HandedBatch) -> None:
        self._grads.end_standing_in()
        self._handed.append(batch)
        self._stepped = False
        self._batch.step = batch.step
        self._member.gradients.whole.weight = 1.0

    def take_again(self) -> None:
        """Forget that the step was lost, because the caller takes its batches again by itself."""
        self._lost, self._stepped = False, True

    def hand_for_nothing(self) -> None:
        """Note that the script receives a batch whose gradient must not count."""
        self._lost, self._stepped = True, False

    def end_batch(self) -> None:
        """Complete a batch for which the script stepped several optimizers, because it asks for the next one."""
        self._lost = self.awaits_step
        if not self._parts:
            return
        progress = self._member.progress
        progress.cursor, progress.part = self._handed[-1].step.stop, 0
        self.pattern.batch_ended(self._passes)
        self._begin_anew()

    def end_epoch(self) -> None:
        """Check that every batch of the epoch was used."""
        computed = [batch for batch in self._handed if batch.passes]
        if computed:
            raise InputError(
                f"optimizer.step() was not called after the last {len(computed)} batches of the epoch. Step there too, "
                "for example: if (i + 1) % 4 == 0 or i + 1 == len(loader):"
            )
        self.leave()

    def leave(self) -> None:
        """Forget batches that the script left by `break`, or that were given for nothing."""
        if self._handed or self._lost:
            self._member.buffers.take_back()
        self._begin_anew()
        self._lost = False
        self._grads.forget(self._optimizers)

    # Backward passes.

    def leaves_pass_out(self) -> bool:
        """Return whether the batch comes again. Its weights are gone, so its gradient cannot be computed."""
        if self._lost:
            self.all_passes += 1
            self._grads.stand_in(self._optimizers)
        return self._lost

    def pass_begins(self, root: Tensor | None) -> float | None:
        """Prepare the gradients for a backward pass, and return its weight. None if no batch is being computed."""
        if not self._handed:
            return None
        batch = self.present or next((batch for batch in self._handed if not batch.passes), self._handed[-1])
        optimizers = self._optimizers
        several = self._is_several
        self._look_for_changes()
        self._grads.show()
        self._grads.put_aside(optimizers)
        batch.passes += 1
        self._passes += 1
        self.all_passes += 1
        self._sum_watch.look(root, batch.samples, alone=self._member.membership is None)
        self.loss.add(root, batch)
        if several:
            self._counts = [self._arrivals(optimizer) for optimizer in optimizers]
        self._member.gradients.whole.active = not several and self._sums_now()
        return batch.weight

    def pass_ends(self) -> None:
        """Sum the gradients of a backward pass if a step may follow, or keep them until one does."""
        optimizers = self._optimizers
        if self._is_several:
            self._several_pass_ends()
        elif self._sums_now():
            self._sum(optimizers)
        elif self._is_grouped:
            self._grads.hide(optimizers)
        self._grads.note(optimizers)

    def _several_pass_ends(self) -> None:
        touched = [
            optimizer
            for optimizer, before in zip(self._optimizers, self._counts, strict=True)
            if self._arrivals(optimizer) != before
        ]
        if self._parts < self._member.progress.part:  # the step that follows was made before the batch came again
            self._grads.put_back(self._optimizers)
            return
        self._grads.put_back([optimizer for optimizer in self._optimizers if self._was_aside(optimizer, touched)])
        expected = [
            optimizer
            for number, optimizer in enumerate(self._optimizers)
            if any(optimizer is one for one in touched) and self.pattern.step_may_follow(self._passes, number)
        ]
        if expected:
            self._sum(expected)

    def _was_aside(self, optimizer: Optimizer, touched: list[Optimizer]) -> bool:
        return self._grads.is_put_aside(optimizer) and not any(optimizer is one for one in touched)

    def _sums_now(self) -> bool:
        """Return whether the only optimizer may be stepped after the present pass. All ranks decide the same."""
        if self._is_grouped:
            return self._is_complete()
        used = [batch for batch in self._handed if batch.passes]
        return self.pattern.single_step_follows(len(used), last=used[-1].ends_epoch)

    def _look_for_changes(self) -> None:
        """Refuse gradients that the script changed before they were summed; accept that it cleared them."""
        for optimizer in self._optimizers:
            if self._grads.is_changed(optimizer):
                raise InputError(_CHANGED)

    def _arrivals(self, optimizer: Optimizer) -> int:
        return self._member.gradients.whole.passes(params_of([optimizer]))

    def sum_numbers(self, numbers: Sequence[float]) -> list[float] | None:
        """Return the sums of some numbers over all ranks, before the step. None if a peer was lost."""
        sums = self._batch.sum_numbers(numbers, sum(batch.samples for batch in self._handed))
        if sums is None:
            self._lose()
        return sums

    # Steps.

    @property
    def is_lost(self) -> bool:
        """Whether a peer was lost, so that calls for the present batch do nothing."""
        return self._lost

    @property
    def is_summed(self) -> bool:
        """Whether the gradients of all optimizers are sums over all ranks, so that the step can be made."""
        return all(self._grads.is_global(optimizer) for optimizer in self._optimizers)

    @property
    def completes_step(self) -> bool:
        """Whether a step follows the newest batch: it is the last of those that are accumulated."""
        if not self._handed or not self._handed[-1].is_last:
            return False
        whole = sum(batch.is_last for batch in self._handed)
        return whole >= (self.accumulate or 1) or self._handed[-1].ends_epoch

    def holds_back(self) -> bool:
        """Return whether a step now would do nothing: the batch is lost, or not complete."""
        if self._lost:
            return True
        return bool(self._handed) and self._is_grouped and not self._is_complete()

    def synchronize(self, optimizer: Optimizer) -> None:
        """Sum the gradients of an optimizer over all ranks, if they are not yet. The script may then change them."""
        if self.holds_back() or self._grads.is_global(optimizer):
            return
        self._require_batch("optimizer.synchronize()")
        self._look_for_changes()
        self._sum([optimizer])

    def step(self, optimizer: Optimizer, *, apply: bool = True) -> None:
        """Apply the summed gradients and commit. Without `apply` only commit: the GradScaler left this step out."""
        self._stepped = True
        self.steps += 1
        if self.holds_back():
            if not self._lost and not self.splits:
                raise InputError(
                    f"elastic.prepare() was given accumulate={self.accumulate}, but the script called optimizer.step() "
                    f"after {len(self._handed)} batches"
                )
            return
        self._require_batch("optimizer.step()")
        self._refuse_skipped()
        member, progress, several = self._member, self._member.progress, self._is_several
        number, self._parts = self._parts, self._parts + several
        if several and number < progress.part:  # made before the batch came again
            self._batch.parts = self._parts
            member.buffers.take_back()
            member.together.step_is_over()
            return
        if not self._grads.is_global(optimizer):
            self._look_for_changes()
            if not self._sum([optimizer]):
                return
        assert self._total is not None
        if apply:
            member.stepper.step_only(progress.step, optimizer)
        handed, passes = self._handed, self._passes
        if several:
            self.pattern.part_stepped(passes, self._optimizers.index(optimizer))
            progress.part = number + 1
        else:
            if not self._is_grouped:
                used = sum(bool(batch.passes) for batch in handed)
                self.pattern.stepped(used, last=handed[-1].ends_epoch)
            progress.cursor, progress.part = handed[-1].step.stop, 0
        total = self.loss.total(self._total)
        member.buffers.commit(others=self._others_changed or member.world == 1)
        self._others_changed = False
        self._batch.commit(total, total.samples if number == 0 else 0, {})
        self.loss.begin()
        self._saves.step_is_made()
        if several:
            self._batch.parts, self._batch.step = self._parts, handed[-1].step
        else:
            self._begin_anew()

    def _sum(self, optimizers: list[Optimizer]) -> bool:
        """Sum the gradients of some optimizers over the ranks. Return False if a peer was lost."""
        gradients, several = self._member.gradients, self._is_several
        share = sum(batch.weight for batch in self._handed if batch.step is self._handed[-1].step)
        count, loss = self.loss.unsent()
        # Ranks may have different numbers of parts of a batch.
        passes = self._handed[-1].passes if self._is_grouped else self._passes
        place = (self._member.progress.step, passes, self._parts)
        try:
            if several:
                self._member.state.separate = True
                self._batch.agree_on(optimizers, self._passes)
        except GroupBroken as problem:
            self._batch.lose_step(problem, count)
            return self._lose()
        for number, optimizer in enumerate(optimizers):
            reducer = gradients.part([optimizer]) if several else gradients.whole
            first = number == 0
            own = (count, loss) if first else (0, None)
            total = self._batch.sum_up(reducer, share, *own, place=place, exchange=self.exchange)
            if total is None:
                return self._lose()
            if first:
                self.loss.sent(total)
            self._total = total
            self._others_changed |= total.buffers_changed
        self._grads.put_back(optimizers)
        return True

    def _lose(self) -> bool:
        self._lost = True
        stepped = self._stepped
        self._begin_anew()
        self._stepped = stepped
        self._grads.lose(self._optimizers)
        return False

    def _begin_anew(self) -> None:
        """Forget the batches that the script has received: they are used, or they come again."""
        self._handed = []
        self._passes = self._parts = 0
        self._total = self.exchange = None
        self._stepped = True
        self._batch.step, self._batch.parts = None, 0
        self.loss.begin()

    def _require_batch(self, call: str) -> None:
        if not self._handed:
            raise InputError(
                f"{call} was called without a batch: call it in a loop over the prepared loader, or over "
                "elastic.steps(n) if the script has its own data"
            )
        if not self._passes:
            raise InputError(f"{call} was called before loss.backward(); each step needs a backward pass")

    def _refuse_skipped(self) -> None:
        unused = sum(not batch.passes for batch in self._handed)
        if unused:
            raise InputError(
                f"optimizer.step() came after {len(self._handed)} batches, but only {len(self._handed) - unused} of "
                "them had a backward pass. A script that fetches batches ahead, or leaves some out, cannot be made "
                "elastic as it is: take each batch from the loader when it is computed, and leave samples out of the "
                "dataset"
            )

    @property
    def _is_several(self) -> bool:
        return len(self._optimizers) > 1

    @property
    def _is_grouped(self) -> bool:
        """Whether it is known how many batches make a step."""
        return (self.splits or self.accumulate is not None) and not self._is_several

    def _is_complete(self) -> bool:
        """Return whether the batches received so far make a step, and a backward pass was made for each."""
        whole = [batch for batch in self._handed if batch.is_last]
        done = sum(bool(batch.passes) for batch in whole)
        if not done:
            return False
        ended = whole[-1].ends_epoch and whole[-1] is self._handed[-1] and done == len(whole)
        return done >= (self.accumulate or 1) or ended
