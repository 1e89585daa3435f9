"""What happens to a summed gradient: unscaled, clipped, applied by the optimizers at the learning rate of the moment.

`Stepper` sorts what the script registers into optimizers, schedulers and a GradScaler; `Statistics` keeps BatchNorm's
running statistics the same on all ranks, and takes them back when a step fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from bftrainer.elastic.scaling import LearningRate, scaled
from bftrainer.errors import InputError


class Stepper:
    """The optimizers of a training and all that goes with their steps."""

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

    def add(self, objects: Sequence[object]) -> None:
        """Take what is of use here."""
        for thing in objects:
            if isinstance(thing, Optimizer):
                self.optimizers.append(thing)
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
        """How to step; refuses what makes no sense."""
        if scheduler_every not in (None, "step", "epoch"):
            raise InputError(f"`scheduler_every` must be 'step', 'epoch' or None, but got {scheduler_every!r}")
        if clip_norm is not None and not clip_norm > 0:
            raise InputError(f"`clip_norm` must be above 0, but got {clip_norm!r}")
        LearningRate(rule, base_batch=1 if base_batch is None else base_batch, warmup_steps=warmup_steps)
        self.scheduler_every, self._clip_norm = scheduler_every, clip_norm
        self._rule, self._warmup_steps, self._base_batch = rule, warmup_steps, base_batch

    @property
    def params(self) -> list[Tensor]:
        """What is trained."""
        return [param for opt in self.optimizers for group in opt.param_groups for param in group["params"]]

    @property
    def scales_lr(self) -> bool:
        """Whether the learning rate follows the batch."""
        return self._rule != "none"

    def batch_is(self, step: int, batch: int, one_node: int) -> None:
        """From `step` on the global batch is this; `one_node` is that of a single node."""
        self._batch = batch
        if self._lr is None and self.scales_lr:
            self._lr = LearningRate(
                self._rule, base_batch=self._base_batch or one_node, warmup_steps=self._warmup_steps
            )
            if self._lr_state is not None:
                self._lr.load_state_dict(self._lr_state)
        if self._lr is not None:
            self._lr.changed(step, batch)

    def apply(self, step: int) -> None:
        """Step on the gradients as they are, and clear them."""
        scaler = self._scaler
        if scaler is not None:
            for optimizer in self.optimizers:
                scaler.unscale_(optimizer)
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self.params, self._clip_norm)
        factor = self._lr.factor(step, self._batch) if self._lr is not None and self._batch is not None else 1.0
        for optimizer in self.optimizers:
            with scaled(optimizer, factor):
                if scaler is not None:
                    scaler.step(optimizer)
                else:
                    optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if scaler is not None:
            scaler.update()
        if self.scheduler_every == "step":
            self.schedule()

    def schedule(self) -> None:
        """Step the schedulers."""
        for scheduler in self._schedulers:
            scheduler.step()

    def state_dict(self) -> Mapping[str, Any] | None:
        """Where the learning rate's warm-up stands."""
        return self._lr.state_dict() if self._lr is not None else self._lr_state

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from there."""
        self._lr_state = state
        if self._lr is not None and state is not None:
            self._lr.load_state_dict(state)


class Statistics:
    """The running statistics of BatchNorm and its like."""

    def __init__(self) -> None:
        self._averaged: list[Tensor] = []
        self._counters: list[Tensor] = []  # moved alike by all ranks
        self._committed: list[Tensor] = []

    def add(self, objects: Sequence[object]) -> None:
        """Find them in modules."""
        for module in (thing for thing in objects if isinstance(thing, nn.Module)):
            norms = [m for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]
            for buffer in (buffer for norm in norms for buffer in norm.buffers()):
                (self._averaged if buffer.is_floating_point() else self._counters).append(buffer)

    @property
    def size(self) -> int:
        """How many numbers are to be averaged."""
        return sum(buffer.numel() for buffer in self._averaged)

    def __bool__(self) -> bool:
        return bool(self._averaged)

    def weighted(self, share: float) -> Tensor:
        """This rank's part of the averages."""
        flat = torch.cat([buffer.reshape(-1) for buffer in self._averaged]).double()
        return flat.mul_(share) if share else torch.zeros_like(flat)

    def take(self, sums: Tensor) -> None:
        """The averages over all ranks."""
        pieces = torch.split(sums, [buffer.numel() for buffer in self._averaged])
        for buffer, piece in zip(self._averaged, pieces, strict=True):
            buffer.copy_(piece.view_as(buffer))

    def commit(self) -> None:
        """Remember them as they are."""
        found = self._averaged + self._counters
        if len(self._committed) != len(found):
            self._committed = [buffer.detach().clone() for buffer in found]
        elif found:
            torch._foreach_copy_(self._committed, found)

    def take_back(self) -> None:
        """A step that failed has moved them already: back to what was committed."""
        for buffer, committed in zip(self._averaged + self._counters, self._committed, strict=True):
            buffer.copy_(committed)
