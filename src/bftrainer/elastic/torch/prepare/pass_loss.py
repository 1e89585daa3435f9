"""Loss of a step, added up over the backward passes for it, as it is reported.

The loss is what the script calls `backward()` on. Parts weigh as their gradients do, so the reported loss is that of
the whole batch: the mean over its samples, or the sum of means if the script adds up several losses.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bftrainer.elastic.torch.gradients.riders import StepTotals
from bftrainer.elastic.torch.prepare.handed_batch import HandedBatch


class PassLoss:
    """Losses and samples of the passes since the last step."""

    def __init__(self) -> None:
        self.scaler: Any = None
        """The prepared GradScaler, by whose scale the losses are multiplied."""
        self._unsent: Tensor | float | None = None  # the loss of passes that no sum has counted
        self._own = 0  # this rank's samples of them
        self._total = 0  # the samples of all ranks
        self._loss: float | Tensor = 0.0
        self._samples = 0
        self._known = False

    def begin(self) -> None:
        """Begin a step."""
        self._forget()
        self._loss, self._samples, self._known = 0.0, 0, False

    def add(self, root: Tensor | None, batch: HandedBatch) -> None:
        """Add the loss of a pass that begins."""
        if batch.passes == 1:
            self._own += batch.samples
            self._total += batch.total if batch.is_last else 0
        if root is None or root.numel() != 1 or not batch.weight:
            return
        scale = getattr(self.scaler, "_scale", None)
        value: Tensor | float
        if scale is not None and self.scaler.is_enabled():
            value = root.detach().reshape(()).double() * batch.weight / scale.double()
        elif root.device.type == "cpu":
            value = root.item() * batch.weight  # the same number, without operations on tensors
        else:
            value = root.detach().reshape(()).double() * batch.weight
        self._unsent = value if self._unsent is None else self._unsent + value

    def unsent(self) -> tuple[int, Tensor | float | None]:
        """Return the samples of this rank that no sum has counted, and their loss in the form of a mean over them."""
        if self._unsent is None or not self._own:
            return self._own, None
        return self._own, self._unsent * (self._total / self._own)

    def sent(self, total: StepTotals) -> None:
        """Note the sums over all ranks."""
        self._samples += total.samples
        if total.loss is not None:
            self._loss = self._loss + total.loss
            self._known = True
        self._forget()

    @property
    def of_step(self) -> float | None:
        """Loss of the step so far, over all ranks; None if no sum had one."""
        return float(self._loss) if self._known else None

    def total(self, last: StepTotals) -> StepTotals:
        """Return the last sum with the samples and the loss of all sums of the step."""
        return last.of_step(self._samples, self._loss if self._known else None)

    def _forget(self) -> None:
        self._unsent = None
        self._own = self._total = 0
