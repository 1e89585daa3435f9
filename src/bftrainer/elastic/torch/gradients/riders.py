"""Step riders: numbers that the ranks sum in each step, besides the gradients.

They are: whether a rank knows of a new generation, the samples, and the loss. A rank's share of a step may come in
several micro-batches. `StepRiders` adds up their numbers, which are sent as the reducer's riders with the last
micro-batch. The sums over the ranks are read as a `StepTotals`.

With several ranks a step waits for the device, because nothing may count before the sums are known to be complete. A
rank that trains alone does not wait: its loss stays on the GPU until somebody asks for the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RIDERS = 6
"""Number of values in a `StepTotals`."""
_LOSS = 2
CHANGED = 4
"""Index of the flag for changed buffers, which `PresentBatch` fills in."""


class LateNumber:
    """A number that a GPU may still be computing. `float()` waits for it, in any thread."""

    __slots__ = ("_value",)

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def __float__(self) -> float:
        if self._value.is_cuda:
            torch.cuda.synchronize(self._value.device)  # a thread of its own may have another stream
        return float(self._value)


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over the ranks, unchecked: if the group broke, they can be any numbers."""

    _know: float
    _samples: float
    _loss: float | Tensor
    """A tensor if the device may still be computing it."""
    _loss_weight: float
    _changed: float
    _settings: float

    @classmethod
    def of(cls, riders: Tensor) -> StepTotals:
        """Read the sums. This waits for the device, after which the sums are known to be complete."""
        return cls(*riders[:RIDERS].tolist())

    @property
    def samples(self) -> int:
        """Samples of the whole step."""
        return round(self._samples)

    @property
    def loss(self) -> float | Tensor | None:
        """Mean loss over the samples whose loss was given; a tensor if the device may still be computing it."""
        return self._loss / self._loss_weight if self._loss_weight > 0 else None

    @property
    def loss_samples(self) -> int:
        """Number of samples that the mean loss covers."""
        return round(self._loss_weight)

    @property
    def buffers_changed(self) -> bool:
        """Whether a buffer that must be the same on all ranks has changed on any of them."""
        return self._changed > 0

    @property
    def settings(self) -> int:
        """Rank 0's digest of its optimizers' settings."""
        return round(self._settings)

    def of_step(self, samples: int, loss: float | Tensor | None) -> StepTotals:
        """Return these totals for a step of several sums, with the samples and the mean loss of all of them."""
        summed, weight = (0.0, 0) if loss is None else (loss * samples, samples)
        return StepTotals(self._know, samples, summed, weight, self._changed, self._settings)

    def all_know(self, world: int) -> bool:
        """Return whether all `world` ranks know of a new generation."""
        return round(self._know) >= world


class StepRiders:
    """One rank's contribution to a step, summed over the micro-batches done so far."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start over with the first micro-batch of a step."""
        self.samples, self._loss_samples = 0, 0
        self._loss: float | Tensor = 0.0

    def add(self, samples: int, loss: Tensor | float | None) -> None:
        """Add a micro-batch that is not the last; `loss` is the mean over it."""
        self.samples += samples
        if loss is not None and samples:
            self._loss = self._loss + _summed(loss, samples)
            self._loss_samples += samples

    def totals(self, samples: int, loss: Tensor | float | None, *, knows: bool) -> StepTotals:
        """Return the totals of a rank that trains alone, without waiting for the device."""
        counts = loss is not None and samples > 0
        own = _summed(loss, samples) if loss is not None and counts else 0.0
        weight = float(self._loss_samples + (samples if counts else 0))
        return StepTotals(float(knows), float(samples + self.samples), self._loss + own, weight, 0.0, 0.0)

    def riders(
        self, samples: int, loss: Tensor | float | None, *, knows: bool, device: torch.device, settings: int = 0
    ) -> Tensor:
        """Return the numbers that are sent with the last micro-batch. `settings`: on rank 0, a digest of its own."""
        # The loss of a stand-in counts for nothing, even if it is not a number.
        counts = loss is not None and samples > 0
        total = self._loss + _summed(loss, samples) if loss is not None and counts else self._loss
        known = 0.0 if isinstance(total, Tensor) else total
        weight = self._loss_samples + (samples if counts else 0)
        numbers = [float(knows), float(samples + self.samples), known, float(weight), 0.0, float(settings)]
        riders = numbers_on(device, numbers)
        if isinstance(total, Tensor):
            riders[_LOSS] += total  # without waiting for the device
        return riders


def numbers_on(device: torch.device, values: Sequence[float]) -> Tensor:
    """Return numbers as a tensor on a device. The host does not wait for what the device is computing."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.float64)
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=torch.float64, pin_memory=pinned).to(device, non_blocking=True)


def _summed(loss: Tensor | float, samples: int) -> float | Tensor:
    """Return the sum of losses of which `loss` is the mean; a tensor of its own if the device is not waited for."""
    if isinstance(loss, Tensor) and _is_late(loss):
        return loss.detach().reshape(()).double() * samples
    return float(loss.detach() if isinstance(loss, Tensor) else loss) * samples


def _is_late(loss: Tensor) -> bool:
    """Return whether reading a number would wait for a device."""
    return loss.device.type != "cpu"
