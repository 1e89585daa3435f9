"""Present batch: the batch that the script has in hand, and the step or steps that it makes for it.

In a step the ranks sum their gradients, apply them and agree whether to rescale. A peer that is lost meanwhile shows as
a broken group. The step then counts only for ranks whose sum was complete; all ranks take over the state of the most
advanced one, and where that has no such step, the batch comes again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import SupportsFloat

import torch
from torch import Tensor
from torch.optim import Optimizer

from bftrainer.elastic.torch import arguments
from bftrainer.elastic.torch.data.batch_plan import Step
from bftrainer.elastic.torch.gradients.loss_reduction import SumWatch
from bftrainer.elastic.torch.gradients.optimizers import params_of
from bftrainer.elastic.torch.gradients.reducer import Reducer
from bftrainer.elastic.torch.gradients.riders import CHANGED, RIDERS, LateNumber, StepRiders, StepTotals
from bftrainer.elastic.torch.gradients.step_exchange import StepExchange
from bftrainer.elastic.torch.group.group import GroupBroken
from bftrainer.elastic.torch.meetings.digest import settings_of
from bftrainer.elastic.torch.member import TrainingMember
from bftrainer.elastic.torch.reports import ProgressReports
from bftrainer.errors import InputError

_OTHER_SETTINGS = (
    "the settings of the optimizers (learning rate, momentum, weight decay …) differ between this rank and rank 0: "
    "register the scheduler, and compute settings on all ranks from values that all have, such as run.progress.step or "
    "what run.evaluate(…) gave, not from a counter of your own"
)
_NO_RIDERS = torch.empty(0, dtype=torch.float64)
_OTHER_WAY = (
    "this rank and rank 0 made different numbers of backward passes, or have different settings of the optimizers "
    "(learning rate, momentum, weight decay …). All ranks must take the same way through the script: give the "
    "scheduler to elastic.prepare(), count by elastic.epochs(n) or elastic.steps(n), and give the names of variables "
    "that change to elastic.prepare(…, carry=…)"
)


class PresentBatch:
    """The batch that the script computes at present."""

    def __init__(self, member: TrainingMember, reports: ProgressReports) -> None:
        self.step: Step | None = None
        """The step that the batch belongs to, until it is made."""
        self.micro = 0
        """Number of the batch among those of its step (`max_batch`)."""
        self.parts = 0
        """Calls of `run.step(optimizer=…)` for this batch."""
        self._void = False  # the batch will come again: further steps for it do not count
        self._taken_over = False  # the step lost here was complete on another rank, and is in the state
        self._waits = 0  # number of waits for the other ranks so far
        self._riders = StepRiders()
        self._sum_watch = SumWatch()
        self._member = member
        self._reports = reports

    @property
    def indices(self) -> tuple[int, ...]:
        """Dataset indices of the batch that count for this rank."""
        micro = self.step.micros[self.micro] if self.step is not None and self.step.micros else None
        return micro.indices if micro is not None and micro.samples else ()

    def at_boundary(self) -> None:
        """Forget the former batch: its steps are committed, or it comes again."""
        self._void, self.parts = False, 0

    def begin(self, step: Step, micro: int, weight: float) -> None:
        """Begin to compute a batch, whose gradient counts with `weight` in the sum."""
        self.step, self.micro = step, micro
        if micro == 0:
            self._riders.begin()
        send = self._is_last(step) and not self._member.state.separate
        self._member.gradients.begin(weight, first=micro == 0, send=send)

    def make_step(
        self,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        samples: int | None,
        loss: Tensor | float | None,
        metrics: dict[str, float],
    ) -> bool:
        """Make a step for this batch. See `Run.step`."""
        step, member = self.step, self._member
        if step is None and optimizer is not None and self._void:
            self.parts += 1
            member.buffers.take_back()
            member.stepper.clear()  # a peer was lost: the whole batch comes again
            return False
        if step is None:
            raise InputError(
                "run.step() must be called once after each batch of run.batches() or in run.steps(); to step several "
                "optimizers in turn, name one each time: run.step(optimizer=…)"
            )
        arguments.check_step(loss, samples)
        metrics = arguments.metric_values(metrics)
        count = step.micros[self.micro].samples if step.micros else (samples if samples is not None else 1)
        self._sum_watch.look(loss, count, alone=member.membership is None)
        if not self._void and not member.state.separate:
            member.gradients.check()
        if optimizer is not None:
            return self._make_part(member.stepper.chosen(optimizer), step, count, loss, metrics)
        if self.parts:
            raise InputError("run.step() was called with `optimizer` before in this batch: give it in each call")
        member.gradients.refuse_mixed_losses()
        self.step = None
        if metrics:
            self._reports.note(metrics)
        if not self._is_last(step):
            self._riders.add(count, loss)
            return False
        total = self.sum_up(member.gradients.whole, _share_of(step, member.world), count, loss)
        if total is None:
            return self._taken_over
        member.stepper.apply(member.progress.step)
        member.progress.cursor, member.progress.part = step.stop, 0
        self.commit(total, total.samples, metrics)
        return True

    def end_parts(self, stop: int) -> None:
        """Complete the batch if the script made its steps by `optimizer=`: there are no more of them."""
        if not self.parts:
            return
        progress = self._member.progress
        if self._void and self.parts == progress.part:
            self._member.state.put_right()  # the batch is done: this rank had only missed the last part
            self._void = False
        if not self._void:
            progress.cursor, progress.part = stop, 0
        self.step = None

    def _is_last(self, step: Step) -> bool:
        return not step.micros or self.micro == len(step.micros) - 1

    def _make_part(
        self,
        chosen: list[Optimizer],
        step: Step,
        count: int,
        loss: Tensor | float | None,
        metrics: dict[str, float],
    ) -> bool:
        """Make one of several steps for one batch, each for different optimizers."""
        if len(step.micros) > 1:
            raise InputError("run.step(optimizer=…) cannot be combined with `max_batch`: use a smaller batch")
        member = self._member
        number, self.parts = self.parts, self.parts + 1
        if self._void or number < member.progress.part:  # these parts were done before the batch had to come again
            member.buffers.take_back()
            member.stepper.clear()
            member.together.step_is_over()
            return not self._void
        if not any(param.grad is not None for param in params_of(chosen)):
            raise InputError("run.step(optimizer=…) found no gradient for it: call its loss.backward() before")
        try:
            if not member.state.separate:
                member.gradients.whole.complete()
            member.state.separate = True
            self.agree_on(chosen, number)
        except GroupBroken as problem:
            self.lose_step(problem, count)
            return self._taken_over
        total = self.sum_up(member.gradients.part(chosen), _share_of(step, member.world), count, loss)
        if total is None:
            return self._taken_over
        member.stepper.apply(member.progress.step, chosen)
        member.progress.part = number + 1
        self.commit(total, total.samples if number == 0 else 0, metrics)
        self.step = step
        return True

    def agree_on(self, chosen: list[Optimizer], number: int) -> None:
        """Refuse to step other optimizers than the other ranks do."""
        member = self._member
        mine = sum(1 << n for n, known in enumerate(member.stepper.optimizers) if known in chosen) + (number << 32)
        if member.world == 1:
            return
        row = [float(mine), float(mine if member.rank == 0 else 0)]
        with self._waiting():
            reducer = member.gradients.whole
            total, first = reducer.agree(torch.tensor(row, dtype=torch.float64, device=member.peers.wire)).tolist()
            member.peers.check_whole()
        if first != mine or total != mine * member.world:
            raise InputError(
                "the ranks step different optimizers in the same batch: run.step(optimizer=…) must be called for the "
                "same optimizers in the same order on all ranks. Decide by run.share(…) or run.progress, not by "
                "the loss or random numbers of one rank"
            )

    @property
    def taken_over(self) -> bool:
        """Whether the last step that was lost here was complete on another rank, and is in the state."""
        return self._taken_over

    def sum_numbers(self, numbers: Sequence[float], count: int) -> list[float] | None:
        """Return the sums of some numbers over all ranks, before the step of a batch with `count` samples is made.

        None if a peer was lost: the group is then re-formed already, and the batch comes again.
        """
        member = self._member
        if member.world == 1:
            return list(numbers)
        row = torch.tensor(numbers, dtype=torch.float64, device=member.peers.wire)
        with self._waiting():
            try:
                sums: list[float] = member.gradients.whole.agree(row).tolist()
                member.peers.check_whole()
            except GroupBroken as problem:
                self.lose_step(problem, count)
                return None
        return sums

    def sum_up(
        self,
        reducer: Reducer,
        share: float,
        count: int,
        loss: Tensor | float | None,
        *,
        place: tuple[int, ...] = (),
        exchange: StepExchange | None = None,
    ) -> StepTotals | None:
        """Sum the gradients and their riders. Return None if a peer was lost; the group is then re-formed already.

        `share` is this rank's part of the batch, by which averages weigh. `loss` is the mean over its `count` samples.
        `place` says where in the script this is, and must be the same on all ranks. With it, a step may need several
        sums, and the caller commits the buffers with the step. `exchange` gets the numbers of all ranks.
        """
        member, buffers = self._member, self._member.buffers
        together = member.world > 1
        if member.pacer is not None:
            member.pacer.hold(member.nodes)
        knows = member.peers.knows_of_newer
        if not together:
            return self._sum_up_alone(reducer, count, loss, knows=knows, commits=not place, exchange=exchange)
        settings = settings_of(member.stepper.optimizers, place)
        said = settings if member.rank == 0 else 0
        riders = self._riders.riders(count, loss, knows=knows, device=member.device, settings=said)
        if buffers:
            riders[CHANGED] = buffers.changed()
            riders = torch.cat([riders, buffers.riders(share, member.rank, member.device)])
        put_buffers, along = None, None
        if exchange is not None:
            along = torch.tensor(exchange.row, dtype=torch.float64, device=member.peers.wire)
        with self._waiting():
            try:
                sums = reducer.finish(riders, along)
                total = StepTotals.of(sums)
                member.peers.check_whole()
                if total.buffers_changed:
                    put_buffers = buffers.fetch(member.rank, member.peers, reducer.agree)
            except GroupBroken as problem:
                self.lose_step(problem, count)
                return None
        if settings and total.settings != settings:
            raise InputError(_OTHER_WAY if place else _OTHER_SETTINGS)
        if exchange is not None and along is not None:
            if not exchange.take(along.tolist(), lambda row: self.sum_numbers(row, count)):
                return None
            member.state.exchanged.made(member.progress.step + 1, exchange.numbers)
        member.last_save.at_rest = False
        if buffers:
            if put_buffers is not None:
                put_buffers()
            buffers.take(sums[RIDERS:])
        if not place:
            buffers.commit(others=total.buffers_changed)
        return total

    def _sum_up_alone(
        self,
        reducer: Reducer,
        count: int,
        loss: Tensor | float | None,
        *,
        knows: bool,
        commits: bool,
        exchange: StepExchange | None,
    ) -> StepTotals | None:
        """See `sum_up`, without other ranks: there is nothing to send, and nothing to wait for."""
        member = self._member
        total = self._riders.totals(count, loss, knows=knows)
        try:
            reducer.finish(_NO_RIDERS)
            member.peers.check_whole()
        except GroupBroken as problem:
            self.lose_step(problem, count)
            return None
        member.last_save.at_rest = False
        if exchange is not None:
            member.state.exchanged.made(member.progress.step + 1, exchange.numbers)
        if commits:
            member.buffers.commit(others=True)
        return total

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Let the peers know where this rank waits, for the message about ranks that never come."""
        self._waits += 1
        self._member.peers.waits_in = (self._member.progress.key(), self._waits)
        try:
            yield
        finally:
            self._member.peers.waits_in = None

    def lose_step(self, problem: GroupBroken, count: int) -> None:
        """Continue in the next group after a step that failed here because a peer was lost."""
        member = self._member
        before = member.progress.key()
        self.step, self._void = None, True
        member.buffers.take_back()
        member.state.take_batch_back()
        member.recover_inside(problem)  # "inside", because the script's code after the step runs next
        member.state.repeats_code()
        self._taken_over = member.progress.key() > before  # some rank's sum was complete
        member.together.step_is_over()
        if not self._taken_over:
            self._reports.redone += count + self._riders.samples

    def commit(self, total: StepTotals, samples: int, metrics: Mapping[str, float]) -> None:
        """Count a step whose gradient was applied. `samples` are those of all ranks."""
        member, progress = self._member, self._member.progress
        member.stepped()
        member.together.step_is_over()
        member.gradients.whole.forget_passes()
        progress.step += 1
        progress.samples += samples
        member.meter.stepped(samples)
        if samples:
            member.state.mean.add(total.loss, total.loss_samples, progress.epoch)
        noted: dict[str, SupportsFloat] = {**metrics}
        if total.loss is not None:
            noted["loss"] = LateNumber(total.loss) if isinstance(total.loss, Tensor) else total.loss
        self._reports.note(noted)
        member.agreed = total.all_know(member.world)


def _share_of(step: Step, world: int) -> float:
    """Return this rank's share of a step's samples; an equal one where the script chooses its data itself."""
    return sum(micro.weight for micro in step.micros) if step.micros else 1.0 / world
