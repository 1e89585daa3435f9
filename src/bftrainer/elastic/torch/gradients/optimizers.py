"""Optimizers of a training: unscale, clip and apply the summed gradient at the current learning rate.

`Stepper` sorts the registered objects into optimizers, schedulers and a GradScaler. Only `run.step` may step the
optimizers: a call by the script would train this rank alone, so it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bftrainer.elastic.torch.gradients.lr_scaling import LearningRate, scaled
from bftrainer.errors import InputError


class Stepper:
    """Optimizers of a training with their schedulers, GradScaler, clipping and learning-rate scaling."""

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        self.scheduler_every: str | None = None
        self._schedulers: list[Any] = []
        self._scaler: Any = None
        self._clip_norm: float | None = None
        self._rule: str | Callable[[float], float] = "none"
        self._warmup_steps = 0
        self._base_batch: int | None = None
        self._lr: LearningRate | None = None
        self._lr_state: Mapping[str, Any] | None = None
        self._batch: int | None = None
        self._applying = False
        self.before_step: Callable[[Optimizer, Sequence[object], Mapping[str, object]], None] | None = None
        """Called before each step of an optimizer, with the arguments of the step. The gradients are complete."""

    def add(self, objects: Sequence[object]) -> None:
        """Add the optimizers, schedulers and GradScaler among `objects`; ignore all others."""
        for thing in objects:
            if isinstance(thing, Optimizer) and thing not in self.optimizers:
                self.optimizers.append(thing)
                thing.register_step_pre_hook(self._step_begins)
            elif isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
                self._schedulers.append(thing)
            elif isinstance(thing, torch.amp.GradScaler):
                self._scaler = thing

    def configure(
        self,
        *,
        scheduler_every: str | None,
        clip_norm: float | None,
        rule: str | Callable[[float], float],
        warmup_steps: int,
        base_batch: int | None,
    ) -> None:
        """Set the options for stepping; refuse invalid ones."""
        if scheduler_every not in (None, "step", "epoch"):
            raise InputError(f"`scheduler_every` must be 'step', 'epoch' or None, but got {scheduler_every!r}")
        if clip_norm is not None and not clip_norm > 0:
            raise InputError(f"`clip_norm` must be above 0, but got {clip_norm!r}")
        LearningRate(rule, base_batch=1 if base_batch is None else base_batch, warmup_steps=warmup_steps)
        self.scheduler_every, self._clip_norm = scheduler_every, clip_norm
        self._rule, self._warmup_steps, self._base_batch = rule, warmup_steps, base_batch

    @property
    def params(self) -> list[Tensor]:
        """All parameters of the optimizers."""
        return params_of(self.optimizers)

    def chosen(self, given: object) -> list[Optimizer]:
        """Return the registered optimizers that `run.step(optimizer=…)` names: one, or several in a list."""
        named = list(given) if isinstance(given, list | tuple) else [given]
        for optimizer in named:
            if not any(optimizer is known for known in self.optimizers):
                kind = type(optimizer).__name__
                raise InputError(f"`optimizer` must be a registered optimizer or a list of them, but got a {kind}")
        if not named:
            raise InputError("`optimizer` must be a registered optimizer or a list of them, but got an empty list")
        return [known for known in self.optimizers if any(known is optimizer for optimizer in named)]

    @property
    def scales_lr(self) -> bool:
        """Whether the learning rate follows the batch."""
        return self._rule != "none"

    @property
    def is_unscaled(self) -> bool:
        """Whether the script has called the GradScaler's `unscale_`, which leaves no trace in the gradients."""
        # Private to torch. If it is missing, torch raises its own error instead.
        states = getattr(self._scaler, "_per_optimizer_states", {})
        return any(getattr(state.get("stage"), "name", "") == "UNSCALED" for state in states.values())

    def batch_is(self, step: int, batch: int, one_rank: int) -> None:
        """Set the global batch from `step` on; `one_rank` is the global batch of a single rank."""
        self._batch = batch
        if self._lr is None and self.scales_lr:
            self._lr = LearningRate(
                self._rule, base_batch=self._base_batch or one_rank, warmup_steps=self._warmup_steps
            )
            if self._lr_state is not None:
                self._lr.load_state_dict(self._lr_state)
        if self._lr is not None:
            self._lr.changed(step, batch)

    def apply(self, step: int, chosen: Sequence[Optimizer] | None = None) -> None:
        """Step all optimizers, or those `chosen`, on the present gradients; then clear all gradients."""
        scaler = self._scaler
        optimizers = list(self.optimizers if chosen is None else chosen)
        if scaler is not None:  # it refuses an optimizer without gradients, whose step would do nothing
            optimizers = [optimizer for optimizer in optimizers if _has_gradient(optimizer)]
        if scaler is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(params_of(optimizers), self._clip_norm)
        factor = self._lr.factor(step, self._batch) if self._lr is not None and self._batch is not None else 1.0
        self._applying = True
        try:
            for optimizer in optimizers:
                with scaled(optimizer, factor):
                    if scaler is not None:
                        scaler.step(optimizer)
                    else:
                        optimizer.step()
        finally:
            self._applying = False
        self.clear()
        if scaler is not None and optimizers:
            scaler.update()
        if self.scheduler_every == "step":
            self.schedule()

    def step_only(self, step: int, optimizer: Optimizer) -> None:
        """Step one optimizer on the present gradients, and nothing else: the script does the rest itself."""
        if self._lr is None or self._batch is None:
            self.step_as_is(optimizer)
            return
        with scaled(optimizer, self._lr.factor(step, self._batch)):
            self.step_as_is(optimizer)

    def step_as_is(self, optimizer: Optimizer) -> None:
        """Make a step on the present gradients, at the present learning rate.

        A rank that follows calls this for each step that the others have made.
        """
        self._applying = True
        try:
            optimizer.step()
        finally:
            self._applying = False

    @property
    def is_applying(self) -> bool:
        """Whether BFTrainer steps an optimizer at the moment."""
        return self._applying

    def clear(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def schedule(self) -> None:
        """Step the schedulers."""
        for scheduler in self._schedulers:
            scheduler.step()

    def state_dict(self) -> Mapping[str, Any] | None:
        """Return the state of the learning rate's warm-up."""
        return self._lr.state_dict() if self._lr is not None else self._lr_state

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a saved state of the warm-up."""
        self._lr_state = state
        if self._lr is not None and state is not None:
            self._lr.load_state_dict(state)

    def _step_begins(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Refuse a step by the script. torch calls this before each step of a registered optimizer."""
        if not self._applying:
            raise InputError(
                f"{type(optimizer).__name__}.step() was called by the script, but run.step() steps the registered "
                "optimizers, after it has summed the gradients over all ranks. Remove the call (and zero_grad()); to "
                "step one of several optimizers call run.step(optimizer=…)"
            )
        if self.before_step is not None:
            self.before_step(optimizer, args[1:], kwargs)


def params_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return the parameters of some optimizers, in order."""
    return [param for opt in optimizers for group in opt.param_groups for param in group["params"]]


def _has_gradient(optimizer: Optimizer) -> bool:
    return any(param.grad is not None for group in optimizer.param_groups for param in group["params"])
