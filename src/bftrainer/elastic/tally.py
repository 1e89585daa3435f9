"""What a step tells all ranks beside its gradients: who knows of a new generation, how many samples, the loss.

A rank's share of a step may come in several micro-batches. `Tally` adds up what is said of them; it leaves as the
reducer's riders with the last, and their sum over the ranks is read as a `Total`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RIDERS = 6
"""The numbers of a `Total`."""
_LOSS = 2
CHANGED, SETTINGS = 4, 5
"""The places of the flag for changed buffers and of rank 0's settings, which are filled in by who knows them."""


@dataclass(frozen=True, slots=True)
class Total:
    """Sums over the ranks, as they came: of a group that broke they may be anything."""

    _know: float
    _samples: float
    _loss: float
    _loss_weight: float
    _changed: float
    _settings: float

    @classmethod
    def of(cls, riders: Tensor) -> Total:
        """Read the sums. Waits for the device: then they are known to be whole."""
        return cls(*riders[:RIDERS].tolist())

    @property
    def samples(self) -> int:
        """Of the whole step."""
        return round(self._samples)

    @property
    def loss(self) -> float | None:
        """The mean over those samples whose loss was said."""
        return self._loss / self._loss_weight if self._loss_weight > 0 else None

    @property
    def loss_samples(self) -> int:
        """How many samples that mean is of."""
        return round(self._loss_weight)

    @property
    def buffers_changed(self) -> bool:
        """Whether a buffer that must be the same on all ranks has changed on any of them."""
        return self._changed > 0

    @property
    def settings(self) -> int:
        """What rank 0 said of its optimizers' settings."""
        return round(self._settings)

    def all_know(self, world: int) -> bool:
        """Whether all of them know of a new generation."""
        return round(self._know) >= world


class Tally:
    """One rank's part of a step, as far as its micro-batches are through."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """The first micro-batch of a step comes."""
        self.samples, self._loss, self._loss_samples = 0, 0.0, 0

    def add(self, samples: int, loss: Tensor | float | None) -> None:
        """A micro-batch that is not the last is through; `loss` is a mean over it."""
        self.samples += samples
        if loss is not None and samples:
            self._loss += _number(loss) * samples
            self._loss_samples += samples

    def riders(self, samples: int, loss: Tensor | float | None, *, knows: bool, device: torch.device) -> Tensor:
        """What leaves with the last micro-batch."""
        counts = (
            loss is not None and samples > 0
        )  # the loss of a stand-in counts for nothing, even if it is not a number
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
