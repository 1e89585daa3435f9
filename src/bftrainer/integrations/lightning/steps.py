"""Steps of an elastic Lightning training: computes this rank's parts of the batches of a step until the step counts.

Lightning asks for a batch, computes it and steps the optimizer. It gets the first of this rank's parts of the batch,
and where it computes the batch, all parts are computed. If a peer is lost, the batches of the step are taken again,
shared out over the remaining ranks, and computed again right there: Lightning counts each step once.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bftrainer.elastic import Run
from bftrainer.elastic.torch.gradients.step_exchange import Numbers
from bftrainer.elastic.torch.prepare.epoch_loader import LoadedBatch
from bftrainer.elastic.torch.prepare.framework import FrameworkLoop, StepOutcome
from bftrainer.elastic.torch.prepare.seeds import seed_all
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.integrations.lightning.logged import LogCall, StepValues, calls_of_all, loss_of_all
from bftrainer.integrations.lightning.metric_states import RefusedMetrics, StepMetrics

Makes = Callable[..., Any]
"""Makes Lightning's closure for a batch: training_step, zero_grad and backward."""
Advances = Callable[[Mapping[str, Any]], None]
"""Runs training_step with manual optimization, given the arguments for it."""


class StepBatch:
    """One of the batches that make a step: this rank's parts of it."""

    def __init__(self, parts: list[LoadedBatch]) -> None:
        self.parts = parts
        self.inputs: dict[int, Any] = {}
        """Parts by number, as `training_step` gets them: on the device."""
        self.arguments: dict[str, Any] = {}
        """What Lightning calls `training_step` with."""
        self.calls: list[LogCall] = []
        """Values logged for it, if this rank has all of it."""

    def take_again(self, parts: list[LoadedBatch]) -> None:
        """Replace the parts, because a peer was lost."""
        self.parts, self.inputs, self.calls = parts, {}, []


class StepClosure:
    """Closure for an optimizer that computes all parts of a batch, in place of Lightning's own."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute
        self._result: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the batch, and return its loss."""
        self._result = self._compute()
        return self._result.loss

    def consume_result(self) -> Any:
        """Return the result of the computation, once."""
        if self._result is None:
            raise InputError("optimizer_step() must call optimizer.step(closure=optimizer_closure) for each batch")
        result, self._result = self._result, None
        return result


class FitSteps:
    """Steps of one rank's Trainer. `on_change` is called whenever ranks may have changed."""

    def __init__(
        self,
        trainer: Any,
        run: Run,
        metrics: Mapping[str, Any],
        log: Callable[..., None],
        on_change: Callable[[], None],
    ) -> None:
        self.epoch = 0
        self.begins = True
        """Whether the batch that was taken last is the first of a step."""
        self.records_logs = False
        """Whether `training_step` runs, so that what it logs is passed to `logged`."""
        self.is_computing = False
        """Whether the batches of a step are being computed."""
        self._trainer = trainer
        self._run = run
        self._loop: FrameworkLoop = run.preparation.framework
        self._training = run.preparation.training
        self._metric_objects = metrics
        self._log = log
        self._on_change = on_change
        self._batches: list[StepBatch] = []  # of the present step
        self._given = 0  # of these, those that Lightning has asked for
        self._start = (0, 0)  # the epoch and the cursor before the step
        self._steps_before: dict[str, Any] = {}  # Lightning's count of steps, with manual optimization
        self._calls: list[LogCall] = []
        self._late: list[LogCall] = []  # values logged between training_step and the end of the step
        self._values = StepValues()
        self._metrics: StepMetrics | None = None
        self._numbers: list[Numbers] | None = None  # of all ranks
        self._attempts = 0  # times that the batches of the step were computed
        self._is_whole = True  # this rank computes all batches of the step, each at once

    # Batches.

    @property
    def is_between(self) -> bool:
        """Whether Lightning is between two batches of one step."""
        return self._given < len(self._batches)

    def take(self, number: int) -> Any:
        """Take the `number` batches of the next step, and return this rank's data of the first."""
        if not self._training.is_at_boundary:
            raise InputError(
                "optimizer_step() of the LightningModule did not call optimizer.step(closure=optimizer_closure). For "
                "a step after several batches use Trainer(accumulate_grad_batches=…)"
            )
        self._training.accumulate = number
        self._start = self._place()
        self._batches = [StepBatch(parts) for parts in self._taken(number)]
        self._given, self._attempts, self.begins = 0, 0, True
        return self.next()

    def take_one_more(self, accumulate: int | None) -> Any:
        """Take a batch for manual optimization. It belongs to the present step if that was not made yet."""
        self.begins = begins = self._training.is_at_boundary
        if not begins and self._training.splits and accumulate is None:
            raise InputError(
                "training_step did not step the optimizer after a batch. If it adds up the gradients of several "
                "batches, say how many: ElasticStrategy(accumulate=4)"
            )
        self._training.accumulate = accumulate
        if begins:
            self._start, self._batches, self._given, self._attempts = self._place(), [], 0, 0
        self._batches += [StepBatch(parts) for parts in self._taken(1)]
        return self.next()

    def next(self) -> Any:
        """Return this rank's data of the next batch of the step."""
        batch = self._batches[self._given]
        self._given += 1
        return batch.parts[0].data

    def _place(self) -> tuple[int, int]:
        return self._run.progress.epoch, self._run.progress.cursor

    def _taken(self, number: int) -> list[list[LoadedBatch]]:
        taken = self._loop.take(number)
        self._on_change()
        if not taken:
            raise BFTrainerError(f"the other ranks are in a later epoch than {self.epoch}, where this one is")
        seed_all(self._run.seed, *self._place())
        return taken

    def _take_again(self) -> None:
        for batch, parts in zip(self._batches, self._taken(len(self._batches)), strict=True):
            batch.take_again(parts)

    def forget(self) -> None:
        """Forget the batches of a step that Lightning has left, because the epoch ends."""
        self._batches, self._given, self._metrics, self.is_computing = [], 0, None, False

    # Automatic optimization.

    def closure(self, make: Makes, arguments: Mapping[str, Any], optimizer: Any, index: int) -> StepClosure:
        """Return the closure that computes the present batch, and makes the step after the last one."""
        self._has_arguments(arguments)
        return StepClosure(lambda: self._compute_automatic(lambda of: make(of, optimizer, index)))

    def _compute_automatic(self, make: Makes) -> Any:
        self.is_computing = True
        if self._given == 1:
            self._begin()
        result = self._compute(self._given - 1, make)
        if self.is_between:
            return result
        while self._loop.outcome() is StepOutcome.LOST:
            self._take_again()
            self._begin()
            for number in range(len(self._batches)):
                result = self._compute(number, make)
        self._on_change()  # another rank may have made the step, and this one may be the main rank now
        self._numbers = None if self._is_whole else self._loop.exchanged
        loss = loss_of_all(self._numbers, self._given - 1) if self._numbers is not None else None
        if loss is not None and not self._is_whole:
            result.loss = torch.tensor(loss, dtype=result.loss.dtype, device=result.loss.device)
        return result

    def _compute(self, number: int, make: Makes) -> Any:
        batch, result = self._batches[number], None
        for place, part in enumerate(batch.parts):
            seed_all(self._run.seed, self.epoch, part.handed.step.micros[part.handed.micro].indices[0])
            closure = make({**batch.arguments, "batch": self._inputs(batch, place)})
            if place or self._attempts > 1:
                closure._zero_grad_fn = None  # its hooks run once per step
            ends = place == len(batch.parts) - 1 and number == len(self._batches) - 1
            self._wrap_step(closure, number, part, ends=ends)
            with self._loop.computing(part):
                result = closure.closure()
        return result

    def _wrap_step(self, closure: Any, number: int, part: LoadedBatch, *, ends: bool) -> None:
        """Have a closure's training_step note what is logged, and exchange it with the other ranks at the end."""
        training_step = closure._step_fn

        def noted() -> Any:
            result = self._noted(training_step)
            self._part_is_computed(number, part, result.loss)
            if ends and not self._is_whole:  # the last backward pass follows, and sums the gradients
                self._loop.exchange(self._own_numbers())
            return result

        closure._step_fn = noted

    # Manual optimization.

    def advance(self, advance: Advances, arguments: Mapping[str, Any], progress: Any) -> None:
        """Run training_step for the present batch. `progress` is Lightning's count of steps."""
        self._has_arguments(arguments)
        self.is_computing = True
        if self._given == 1:
            self._steps_before = copy.deepcopy(progress.state_dict())
            self._begin()
        self._advance(self._given - 1, advance, progress)
        while self._training.is_lost and self._place() == self._start:
            self._take_again()
            progress.load_state_dict(copy.deepcopy(self._steps_before))
            self._begin()
            for number in range(len(self._batches)):
                self._advance(number, advance, progress)
        self._training.end_batch()
        if self.is_made and not self._is_whole:
            said = self._loop.of_all_ranks("the values logged in training_step", json.dumps(self._own_numbers()))
            self._numbers = [json.loads(row) for row in said]
            self._on_change()

    def _advance(self, number: int, advance: Advances, progress: Any) -> None:
        batch = self._batches[number]
        for place, part in enumerate(batch.parts):
            seed_all(self._run.seed, self.epoch, part.handed.step.micros[part.handed.micro].indices[0])
            arguments = {**batch.arguments, "batch": self._inputs(batch, place)}
            with self._loop.computing(part):
                self._noted(lambda given=arguments: advance(given))
            self._part_is_computed(number, part, None)

    # Logged values.

    def logged(self, call: LogCall) -> None:
        """Note a value that is logged while a step is computed."""
        (self._calls if self.records_logs else self._late).append(call)

    @property
    def is_made(self) -> bool:
        """Whether the present step is made, by this rank or by others while this one had lost it."""
        return self._training.is_at_boundary

    def settle(self) -> None:
        """Give Lightning the values that were logged, after a batch: those of training_step once the step is made."""
        self.is_computing = False
        results = self._trainer.fit_loop.epoch_loop._results
        if self.is_made:
            for batch, calls in zip(self._batches, self._calls_of_step(), strict=True):
                results.batch, results.batch_size = batch.arguments["batch"], None
                self._log_all(calls)
            self._metrics = None
        self._log_all(self._late)
        self._late = []

    def _log_all(self, calls: list[LogCall]) -> None:
        for call in calls:
            self._log(call.fx, call.name, call.value, **call.options)

    def _calls_of_step(self) -> list[list[LogCall]]:
        if self._is_whole:
            return [batch.calls for batch in self._batches]
        assert self._metrics is not None
        self._metrics.combine(self._numbers or (), len(self._batches))
        totals = [batch.parts[0].handed.total for batch in self._batches]
        strategy = self._trainer.strategy
        return calls_of_all(self._numbers or (), totals, self._trainer.lightning_module, strategy)

    def _begin(self) -> None:
        """Begin to compute the batches of a step, for the first time or again."""
        self._attempts += 1
        alone = self._run.world == 1 and all(len(batch.parts) == 1 for batch in self._batches)
        self._is_whole = alone and self._metrics is None
        self._values, self._numbers, self._late = StepValues(), None, []
        if self._metrics is None and not self._is_whole:
            self._metrics = StepMetrics(self._metric_objects)
        elif self._metrics is not None:
            self._metrics.begin_again()

    def _has_arguments(self, arguments: Mapping[str, Any]) -> None:
        batch = self._batches[self._given - 1]
        batch.arguments = dict(arguments)
        batch.inputs[0] = batch.arguments["batch"]

    def _noted(self, training_step: Callable[[], Any]) -> Any:
        self._calls, self._late, self.records_logs = [], [], True
        refused = RefusedMetrics(self._metric_objects)
        try:
            result = training_step()
        finally:
            self.records_logs = False
        refused.refuse_updated()
        return result

    def _part_is_computed(self, number: int, part: LoadedBatch, loss: Any) -> None:
        calls, self._calls = self._calls, []
        self._batches[number].calls = calls
        if not self._is_whole:
            assert self._metrics is not None
            self._values.add(number, part.handed, calls, loss)
            self._metrics.part_is_computed(number, counts=bool(part.handed.samples))

    def _own_numbers(self) -> dict[str, list[float]]:
        assert self._metrics is not None
        return self._values.numbers() | self._metrics.numbers()

    def _inputs(self, batch: StepBatch, place: int) -> Any:
        """Return a part as `training_step` gets it: converted, and moved to the device."""
        if place not in batch.inputs:
            trainer = self._trainer
            data = trainer.precision_plugin.convert_input(batch.parts[place].data)
            data = trainer.lightning_module._on_before_batch_transfer(data, dataloader_idx=0)
            batch.inputs[place] = trainer.strategy.batch_to_device(data, dataloader_idx=0)
        return batch.inputs[place]
