"""Gradients of a training: select which are summed, by which reducer, and check them in each step.

`Run` uses it before each batch and in each step. It follows the script, which may unfreeze layers or add parameter
groups during training. It refuses gradients that would train one rank alone, or one network on the loss of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from bftrainer.elastic.torch.gradients.optimizers import Stepper, params_of
from bftrainer.elastic.torch.gradients.reducer import Reducer
from bftrainer.errors import InputError

_SEEN_ALONE = 100
"""Steps that a rank makes alone before it trusts the script not to change gradients. Seeing each arrive takes 2 to 3 %
of a short step."""


class Gradients:
    """Sums gradients over the ranks of the present group, for all optimizers together or for some of them."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._riders = 0
        self._whole: Reducer | None = None
        self._parts: dict[tuple[int, ...], Reducer] = {}  # for run.step(optimizer=…)
        self._trained: list[int] = []  # the parameters that `whole` sums, by id
        self._frozen: list[Tensor] = []  # parameters that `whole` leaves out
        self._accumulated: list[tuple[Tensor, Tensor, int]] = []
        self._alone = True
        self._steps_alone = 0
        self._check: Callable[[], None] = lambda: None
        self._wait: Callable[[dist.Work], object] = lambda work: work.wait()

    @property
    def whole(self) -> Reducer:
        """Reducer of all trained parameters."""
        assert self._whole is not None
        return self._whole

    def follow(self, riders: int | None = None) -> None:
        """Sum the gradients of the parameters that are trained now. `riders` numbers are sent with them."""
        self._riders = self._riders if riders is None else riders
        summed = set(self._trained)
        if self._whole is not None:
            self._whole.close()
        params = self._stepper.params
        trained = [param for param in params if param.requires_grad]
        self._frozen = [param for param in params if not param.requires_grad]
        self._trained = [id(param) for param in trained]
        for param in trained:
            if id(param) not in summed:
                param.grad = None  # left over from backward passes in which it was not trained
        self._whole = Reducer(trained, self._riders)
        self._parts = {}
        self._tell_group()

    @property
    def is_behind(self) -> bool:
        """Whether layers were unfrozen, or groups added to an optimizer, since `follow`."""
        return [id(param) for param in self._stepper.params if param.requires_grad] != self._trained

    def part(self, chosen: Sequence[Optimizer]) -> Reducer:
        """Return the reducer of all parameters of some optimizers, whether frozen at the moment or not."""
        key = tuple(id(optimizer) for optimizer in chosen)
        if key not in self._parts:
            self._parts[key] = Reducer(params_of(chosen), self._riders, eager=False)
            self._tell_group()
        self._parts[key].weight = self.whole.weight
        return self._parts[key]

    def group_is(self, *, alone: bool, check: Callable[[], None], wait: Callable[[dist.Work], object]) -> None:
        """Use another group: whether this rank is alone in it, and how to check the group and to wait in it."""
        self._alone, self._check, self._wait = alone, check, wait
        self._tell_group()

    def abandon(self) -> None:
        """Drop the present step: its group is broken."""
        for reducer in (self.whole, *self._parts.values()):
            reducer.abandon()

    def check(self) -> None:
        """Refuse gradients of parameters that are not summed, and gradients that the script has changed."""
        if any(param.grad is not None for param in self._frozen):
            raise InputError(
                "a parameter was unfrozen in the middle of a batch; set requires_grad between two batches, so that all "
                "ranks sum its gradient"
            )
        if self._accumulated and self.whole.has_lost(self._accumulated):
            raise InputError(
                "the gradients of earlier micro-batches (`max_batch`) were cleared: remove zero_grad(); run.step() "
                "clears the gradients after it has applied them"
            )
        if self.whole.arrived and (self.whole.is_changed() or self._stepper.is_unscaled):
            raise InputError(
                "the gradients were changed or cleared between loss.backward() and run.step(), when each rank has only "
                "its part of them. To clip them, use run.register(clip_norm=…); to scale or mask them, a hook "
                "(param.register_hook); remove zero_grad() and scaler.unscale_()"
            )

    def begin(self, weight: float, *, first: bool, send: bool) -> None:
        """Begin a batch whose gradient counts with `weight` in the sum.

        `first`: it is the first micro-batch of its step, so nothing is accumulated yet. `send`: it is the last one, so
        full buckets are sent during its backward pass.
        """
        reducer = self.whole
        reducer.forget_passes()
        plain = self._alone and first and send and len(self._stepper.optimizers) == 1
        self._steps_alone = self._steps_alone + 1 if plain else 0
        reducer.sees_arrivals(self._steps_alone <= _SEEN_ALONE)
        if not first and weight != reducer.weight:
            # Micro-batches of one share can differ by a sample: rescale the sum so far to the weight of the next one.
            reducer.rescale(reducer.weight / weight)
        self._accumulated = [] if first else reducer.accumulated()
        reducer.weight, reducer.active = weight, send

    def refuse_mixed_losses(self) -> None:
        """Refuse to train one network on the loss of another, as a single step for a whole GAN would."""
        if len(self._stepper.optimizers) < 2:
            return
        passes = [self.whole.passes(params_of([optimizer])) for optimizer in self._stepper.optimizers]
        if max(passes) > 1 and len(set(passes)) > 1:
            raise InputError(
                f"the registered optimizers got gradients from {', '.join(map(str, passes))} backward passes in this "
                "batch, so one of them would also train on the loss of another. Step each after its own loss: "
                "run.step(optimizer=…); to step them all on the sum of the losses, give all of them in a list"
            )

    def _tell_group(self) -> None:
        for reducer in (self._whole, *self._parts.values()):
            if reducer is not None:
                reducer.alone, reducer.check, reducer.wait = self._alone, self._check, self._wait
