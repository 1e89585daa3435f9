"""Steps of an elastic Trainer: takes this rank's parts of the batches of a step, and makes the step until it counts.

The Trainer asks for the batches of a step, computes them one by one and then steps the optimizer. In place of each
batch it gets a `Batch`: this rank's parts of it. When the last one is computed, the gradients are sums over all ranks.
If a peer is lost before, all parts are taken again, shared out over the remaining ranks, and computed anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from bftrainer.elastic.torch.prepare.epoch_loader import LoadedBatch
from bftrainer.elastic.torch.prepare.framework import FrameworkLoop, StepOutcome
from bftrainer.elastic.torch.prepare.seeds import seed_all

Counts = Callable[[list[Any]], tuple[list[Any], Any]]
"""Returns batches as the Trainer changes them, and the number of items in them; see `Trainer.get_batch_samples`."""
Computes = Callable[[Any, Any], Tensor]
"""Computes a part of a batch, given the number of items in all batches of the step; see `Trainer.training_step`."""


class Batch:
    """This rank's parts of one batch, in the place of the batch."""

    def __init__(self, *, is_last: bool) -> None:
        self.parts: list[LoadedBatch] = []
        self.data: list[Any] = []
        """The inputs of each part."""
        self.is_last = is_last
        """Whether the step is made after this batch."""


class TrainerSteps:
    """Steps of one rank's Trainer."""

    def __init__(self, trainer: Trainer, loop: FrameworkLoop, seed: int, on_change: Callable[[], None]) -> None:
        self.flos = 0.0
        """Floating-point operations of the present step, over all ranks."""
        self.tokens = 0
        """Input tokens of the present step, over all ranks, if the Trainer counts them."""
        self._trainer = trainer
        self._loop = loop
        self._seed = seed
        self._on_change = on_change  # called whenever ranks may have changed
        self._batches: list[Batch] = []
        self._items: Any = None  # as the Trainer counts them, over all ranks
        self._passed = False
        self._epoch = 0
        self._count: Counts | None = None
        self._counts_anything = True

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, or go on in it."""
        self._epoch = epoch
        self._counts_anything = _counts_anything(self._trainer)

    def take(self, number: int, count: Counts) -> tuple[list[Batch], Any]:
        """Take the `number` batches of the next step, and count the items in them over all ranks."""
        self._batches = [Batch(is_last=place == number - 1) for place in range(number)]
        self._count = count
        self._take_until_counted(StepOutcome.LOST)
        return self._batches, self._items

    def compute(self, batch: Batch, compute: Computes) -> Tensor:
        """Compute a batch. Return the loss of the whole step, over all ranks, after its last batch; 0 before."""
        self._compute([batch], compute)
        if batch.is_last:
            while not self._passed and (outcome := self._loop.outcome()) is not StepOutcome.MADE:
                self._take_until_counted(outcome)
                self._compute(self._batches, compute)
        loss = self._loop.loss if batch.is_last and not self._passed else None
        return torch.tensor(loss or 0.0, device=self._trainer.args.device)

    def _take_until_counted(self, outcome: StepOutcome) -> None:
        """Take the batches after a step was lost, or for the first time, until their items are counted."""
        while True:
            self._passed = outcome is StepOutcome.PASSED or not self._take()
            if self._passed:
                for batch in self._batches:
                    batch.parts, batch.data = [], []
            self._on_change()
            if self._passed or self._count_items():
                return
            outcome = self._loop.outcome()

    def _take(self) -> bool:
        """Take the batches. Return False if another rank has made the step."""
        seed_all(self._seed, self._epoch, self._trainer.state.global_step, self._trainer.args.process_index)
        taken = self._loop.take(len(self._batches))
        for batch, parts in zip(self._batches, taken, strict=False):
            batch.parts, batch.data = parts, [part.data for part in parts]
        return bool(taken)

    def _count_items(self) -> bool:
        """Count items, tokens and operations over all ranks. Return False if a peer was lost."""
        assert self._count is not None
        if not self._counts_anything:
            self._items, self.flos, self.tokens = None, 0.0, 0
            return True
        places = [(batch, place) for batch in self._batches for place in range(len(batch.parts))]
        real = [(batch, place) for batch, place in places if batch.parts[place].handed.samples]
        # A rank without a share of a batch computes some of its samples for nothing. They do not count.
        counted = real or places
        data, items = self._count([batch.data[place] for batch, place in counted])
        for (batch, place), inputs in zip(counted, data, strict=True):
            batch.data[place] = inputs
        own = [batch.data[place] for batch, place in real]
        numbers = [float(items) if items is not None and real else 0.0, self._operations(own), self._tokens(own)]
        sums = self._loop.sum(numbers)
        if sums is None:
            return False
        if items is not None:
            items = torch.tensor(sums[0], device=items.device) if isinstance(items, Tensor) else sums[0]
        self._items, self.flos, self.tokens = items, sums[1], round(sums[2])
        return True

    def _operations(self, own: Iterable[Any]) -> float:
        return float(sum(self._trainer.floating_point_ops(inputs) for inputs in own))

    def _tokens(self, own: Iterable[Any]) -> float:
        state = self._trainer.state
        before = state.num_input_tokens_seen
        for inputs in own:
            self._trainer._track_num_input_tokens(inputs)
        counted, state.num_input_tokens_seen = state.num_input_tokens_seen - before, before
        return float(counted)

    def _compute(self, batches: Iterable[Batch], compute: Computes) -> None:
        for batch in batches:
            for part, inputs in zip(batch.parts, batch.data, strict=True):
                indices = part.handed.step.micros[part.handed.micro].indices
                seed_all(self._seed, self._epoch, indices[0])
                with self._loop.computing(part):
                    compute(inputs, self._items_of(part))

    def _items_of(self, part: LoadedBatch) -> Any:
        """Return the items of all ranks times this part's share of its batch.

        The gradient of a part is weighted by its share. So means over each part come out as the mean over the batch,
        and sums that are divided by this number as the sum over all ranks, divided by the number of all items.
        """
        items, share = self._items, part.handed.weight
        if items is None or not share:
            return items
        if not isinstance(items, Tensor):
            return items * share
        doubles = any(param.dtype == torch.float64 for param in self._trainer.model.parameters())
        return torch.tensor(
            float(items) * share, dtype=torch.float64 if doubles else torch.float32, device=items.device
        )


def _counts_anything(trainer: Trainer) -> bool:
    """Return whether the ranks have something to count before a step. If not, they need not wait for each other there.

    It depends only on the class and its settings, which are the same on all ranks.
    """
    own = ("get_batch_samples", "_get_num_items_in_batch", "floating_point_ops", "_track_num_input_tokens")
    return (
        trainer.model_accepts_loss_kwargs
        or trainer.compute_loss_func is not None
        or trainer.args.include_num_input_tokens_seen != "no"
        or hasattr(trainer.model, "num_parameters")  # the Trainer computes floating-point operations from it
        or any(_is_overridden(trainer, name) for name in own)
    )


def _is_overridden(trainer: Trainer, name: str) -> bool:
    """Return whether a class other than `Trainer` defines a method, apart from the wrappers of `by_part`."""
    method = getattr(type(trainer), name, None)
    return method is not None and inspect.unwrap(method) is not getattr(Trainer, name, None)
