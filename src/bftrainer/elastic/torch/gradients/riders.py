"""Step riders: numbers that the ranks sum in each step, besides the gradients.

They are: whether a rank knows of a new generation, the samples, and the loss. A rank's share of a step may come in
several micro-batches. `StepRiders` adds up their numbers, which are sent as the reducer's riders with the last
micro-batch. The sums over the ranks are read as a `StepTotals`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

RIDERS = 6
"""Number of values in a `StepTotals`."""
_LOSS = 2
CHANGED, SETTINGS = 4, 5
"""Indices of the flag for changed buffers and of rank 0's settings. `Run` fills in both."""


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over the ranks, unchecked: if the group broke, they can be any numbers."""

    _know: float
    _samples: float
    _loss: float
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
    def loss(self) -> float | None:
        """Mean loss over the samples whose loss was given."""
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

    def of_step(self, samples: int, loss: float | None) -> StepTotals:
        """Return these totals for a step of several sums, with the samples and the mean loss of all of them."""
        if loss is None:
            return replace(self, _samples=samples, _loss=0.0, _loss_weight=0.0)
        return replace(self, _samples=samples, _loss=loss * samples, _loss_weight=samples)

    def all_know(self, world: int) -> bool:
        """Return whether all `world` ranks know of a new generation."""
        return round(self._know) >= world


class StepRiders:
    """One rank's contribution to a step, summed over the micro-batches done so far."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start over with the first micro-batch of a step."""
        self.samples, self._loss, self._loss_samples = 0, 0.0, 0

    def add(self, samples: int, loss: Tensor | float | None) -> None:
        """Add a micro-batch that is not the last; `loss` is the mean over it."""
        self.samples += samples
        if loss is not None and samples:
            self._loss += _number(loss) * samples
            self._loss_samples += samples

    def riders(self, samples: int, loss: Tensor | float | None, *, knows: bool, device: torch.device) -> Tensor:
        """Return the numbers that are sent with the last micro-batch."""
        # The loss of a stand-in counts for nothing, even if it is not a number.
        counts = loss is not None and samples > 0
        waits = isinstance(loss, Tensor) and loss.device.type != "cpu"
        known = _number(loss) * samples if loss is not None and counts and not waits else 0.0
        weight = self._loss_samples + (samples if counts else 0)
        values = [float(knows), float(samples + self.samples), known + self._loss, float(weight), 0.0, 0.0]
        riders = torch.tensor(values, dtype=torch.float64, device=device)
        if counts and waits and isinstance(loss, Tensor):
            riders[_LOSS] += loss.detach().reshape(()).double() * samples  # without waiting for the device
        return riders


def _number(loss: Tensor | float) -> float:
    return float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
