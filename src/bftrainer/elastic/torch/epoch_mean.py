"""Epoch mean of the loss: the number that `run.mean("loss")` returns.

`Run.step` adds the loss of each committed step. That loss is summed over all ranks, so every rank adds the same number
and no communication is needed. `TrainingState` keeps the sums in the state: newcomers and resumed runs continue them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bftrainer.elastic.torch.gradients.riders import LateNumber
from bftrainer.errors import InputError


class EpochMean:
    """Mean over the samples of the latest epoch that has a committed step."""

    def __init__(self) -> None:
        self._epoch = -1
        self._sum: float | Tensor = 0.0  # a tensor if a GPU may still be computing it
        self._samples = 0
        self._unknown = False  # a step of this epoch was committed without a loss

    def add(self, loss: float | Tensor | None, samples: int, epoch: int) -> None:
        """Add a committed step: `loss` is its mean over `samples` samples, None if the script gave none."""
        if epoch != self._epoch:
            self._epoch, self._sum, self._samples, self._unknown = epoch, 0.0, 0, False
        if loss is None:
            self._unknown = True
        else:
            self._sum = self._sum + loss * samples
            self._samples += samples

    def of(self, name: str) -> float:
        """Return the mean of `name`, which must be "loss"; not a number before the first step."""
        if name != "loss":
            raise InputError(f"run.mean() supports only 'loss', the loss given to run.step(loss=…), but got {name!r}")
        if self._samples:
            return self._known_sum() / self._samples
        if self._unknown:
            raise InputError("run.mean('loss') needs the loss of each step: call run.step(loss=loss)")
        return math.nan

    def as_state(self) -> dict[str, Any]:
        """Return the sums as plain values."""
        return {"epoch": self._epoch, "sum": self._known_sum(), "samples": self._samples, "unknown": self._unknown}

    def _known_sum(self) -> float:
        return float(LateNumber(self._sum) if isinstance(self._sum, Tensor) else self._sum)

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from saved sums; start from nothing if a snapshot has none."""
        self._epoch, self._sum = state.get("epoch", -1), state.get("sum", 0.0)
        self._samples, self._unknown = state.get("samples", 0), state.get("unknown", False)
