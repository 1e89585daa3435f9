"""Prepared loader: looks like the script's DataLoader, and gives each rank its share of every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from bftrainer.elastic.torch.data.batch_plan import BatchPlan
from bftrainer.elastic.torch.data.batches import Batches


class PreparedLoader(DataLoader[Any]):
    """The script's DataLoader on many ranks. All that it does not have itself is that of the DataLoader.

    A loop over it in which gradients are computed is a training epoch. Under `torch.no_grad()`, or if no prepared
    model is in training mode, it gives all batches on every rank, as the DataLoader does.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: Batches,
        is_training: Callable[[], bool],
        length: Callable[[BatchPlan], int],
    ) -> None:
        # Not DataLoader's own: nothing is loaded by this object.
        self.__dict__.update(_loader=loader, _batches=batches, _is_training=is_training, _length=length)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_loader"], name, value)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if torch.is_grad_enabled() and self.__dict__["_is_training"]():
            return iter(self.__dict__["_batches"])
        return iter(self.__dict__["_loader"])

    def __len__(self) -> int:
        """Return the number of batches of an epoch; within a loop, of those that this loop gives."""
        found: int = self.__dict__["_length"](self.batches.plan)
        return found

    @property
    def batches(self) -> Batches:
        """This rank's batches, with the position in the epoch and the size of the global batch."""
        found: Batches = self.__dict__["_batches"]
        return found
