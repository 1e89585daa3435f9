"""Prepared GradScaler: unscales sums over all ranks, so that all ranks leave out the same steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from bftrainer.elastic.torch.prepare.training import PreparedTraining
from bftrainer.errors import InputError

_real_unscale = torch.amp.GradScaler.unscale_


def make_elastic_scaler(scaler: Any, training: PreparedTraining) -> None:
    """Have a GradScaler work on summed gradients, and do nothing for batches that are lost or not complete."""
    if not scaler.is_enabled():
        return  # then it only calls the optimizer
    own_step, own_update = scaler.step, scaler.update

    def unscale_(optimizer: Optimizer) -> None:
        if training.holds_back():
            return
        training.synchronize(optimizer)
        if not training.holds_back():  # no peer was lost meanwhile
            _real_unscale(scaler, optimizer)

    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        training.synchronize(optimizer)
        if training.holds_back():
            training.step(optimizer)  # notes that the script has stepped
            return None
        steps = training.steps
        result = own_step(optimizer, *args, **kwargs)
        if training.steps == steps:  # a gradient was not finite: the scaler left the step out, on all ranks
            training.step(optimizer, apply=False)
        return result

    def update(*args: Any, **kwargs: Any) -> None:
        if any(state["found_inf_per_device"] for state in scaler._per_optimizer_states.values()) or args or kwargs:
            own_update(*args, **kwargs)

    scaler.unscale_, scaler.step, scaler.update = unscale_, step, update


def refuse_other_scalers(optimizers: list[Optimizer]) -> None:
    """Refuse GradScalers that are not prepared, for these optimizers: they would unscale a part of the gradient."""

    def unscale_(self: Any, optimizer: Optimizer) -> None:
        if self.is_enabled() and any(optimizer is known for known in optimizers):
            raise InputError("give the GradScaler to elastic.prepare(), beside the model and the optimizer")
        _real_unscale(self, optimizer)

    torch.amp.GradScaler.unscale_ = unscale_  # type: ignore[method-assign]
