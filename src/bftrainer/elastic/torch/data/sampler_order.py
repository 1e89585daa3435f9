"""Order of a script's own sampler: the same on all ranks, and the same again when an epoch is resumed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from bftrainer.errors import InputError


class SampleOrder(Protocol):
    """Order of samples in each epoch that is not BFTrainer's own."""

    @property
    def length(self) -> int:
        """Indices of an epoch."""

    @property
    def digest(self) -> int:
        """A number that shows whether the orders of two ranks are the same."""

    def __call__(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the indices of an epoch."""


class SamplerOrder:
    """Indices that a sampler draws in each epoch, with random numbers seeded by the epoch."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        first = self(0)
        self.length = len(first)
        """Indices that the sampler draws in an epoch."""
        self.digest = int.from_bytes(hashlib.sha256(first.tobytes()).digest()[:8], "big") >> 2
        """A number that shows whether the samplers of two ranks draw the same."""

    def __call__(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the indices of an epoch."""
        kind = type(self._sampler).__name__
        with _seeded(self._seed, epoch, self._sampler):
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            try:
                drawn = np.array([int(index) for index in self._sampler], dtype=np.int64)
            except (TypeError, ValueError):
                raise InputError(f"the DataLoader's sampler ({kind}) must draw indices, one at a time") from None
        if not len(drawn):
            raise InputError(f"the DataLoader's sampler ({kind}) draws no samples in epoch {epoch}")
        if epoch and len(drawn) != self.length:
            raise InputError(
                f"the DataLoader's sampler ({kind}) draws {len(drawn)} samples in epoch {epoch} and {self.length} in "
                "epoch 0; it must draw the same number in every epoch"
            )
        return drawn


@contextmanager
def _seeded(seed: int, epoch: int, sampler: Any) -> Iterator[None]:
    """Seed all that a sampler may draw from, and put the script's own random numbers back afterwards."""
    place = int.from_bytes(hashlib.sha256(repr((seed, epoch, "sampler")).encode()).digest()[:8], "big") >> 1
    before = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    generator = getattr(sampler, "generator", None)
    random.seed(place)
    np.random.seed(place % (1 << 32))
    torch.default_generator.manual_seed(place)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(place)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.random.set_rng_state(before[2])
