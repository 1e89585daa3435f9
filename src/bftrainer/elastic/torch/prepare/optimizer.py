"""Prepared optimizer: the script's own object, whose `step` sums over all ranks and commits."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.optim import Optimizer

from bftrainer.elastic.torch.gradients.optimizers import Stepper
from bftrainer.elastic.torch.prepare.training import PreparedTraining


def make_elastic(optimizer: Optimizer, training: PreparedTraining, stepper: Stepper) -> None:
    """Replace `step` of an optimizer, and add `synchronize`. The object stays the same, as schedulers refer to it."""
    own_step: Any = optimizer.step

    def step(self: Optimizer, closure: Any = None, **options: Any) -> Any:
        if stepper.is_applying:
            return own_step(**options)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # type: ignore[attr-defined] # schedulers look for it, also if this step is lost
        training.step(optimizer)
        return loss

    def synchronize(self: Optimizer) -> None:
        """Sum the gradients over all ranks now. Call it before a line that changes them by hand."""
        training.synchronize(optimizer)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # not overridden, as far as schedulers care
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.synchronize = types.MethodType(synchronize, optimizer)  # type: ignore[attr-defined]
