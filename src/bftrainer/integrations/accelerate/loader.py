"""Loader of an elastic Accelerate script: each rank's share of every batch in training, all batches in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Protocol

import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from bftrainer.elastic import Run
from bftrainer.elastic.torch.prepare.loader import PreparedLoader


class _Follows(Protocol):
    def __call__(self) -> object: ...


class ElasticLoader(DataLoader[Any]):
    """The script's DataLoader, as `accelerator.prepare` returns it.

    A loop over it in which gradients are computed is a training epoch. Under `torch.no_grad()`, or if no prepared model
    is in training mode, it gives all batches on every rank, through Accelerate's own loader for one process. All that
    it does not have itself is that of the DataLoader.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        alone: Any,
        run: Run,
        *,
        prepare: Callable[[DataLoader[Any]], PreparedLoader],
        ranks: int,
        place: tuple[torch.device | None, bool],
        on_batch: _Follows,
    ) -> None:
        """`alone` is Accelerate's loader for one process. `place` is the device for batches, and whether to wait."""
        # Not DataLoader's own: nothing is loaded by this object.
        self.__dict__.update(
            _loader=loader, _alone=alone, _run=run, _prepare=prepare, _ranks=ranks, _place=place, _on_batch=on_batch
        )
        self.__dict__.update(_prepared=None, _looped="")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_loader"], name, value)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if torch.is_grad_enabled() and self.__dict__["_run"].preparation.is_training:
            return self._looping("train", self._shares())
        return self._looping("evaluate", iter(self.__dict__["_alone"]))

    def __len__(self) -> int:
        """Return the batches of an epoch, over all ranks; within a loop, those that this loop gives."""
        looped = self.__dict__["_looped"]
        if looped == "train":
            return len(self.prepared)
        if looped == "evaluate":
            return len(self.__dict__["_alone"])
        full, rest = divmod(len(self.dataset), (self.batch_size or 1) * self.__dict__["_ranks"])
        return full + (rest > 0 and not self.drop_last) or 1

    @property
    def prepared(self) -> PreparedLoader:
        """The loader of this rank's shares. It is prepared when training begins: all optimizers are known then."""
        if self.__dict__["_prepared"] is None:
            self.__dict__["_prepared"] = self.__dict__["_prepare"](self.__dict__["_loader"])
        found: PreparedLoader = self.__dict__["_prepared"]
        return found

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the order of the samples follows the epoch by itself."""

    def _shares(self) -> Iterator[Any]:
        device, non_blocking = self.__dict__["_place"]
        with closing(iter(self.prepared.batches)) as shares:  # type: ignore[type-var] # it is a generator
            for batch in shares:
                self.__dict__["_on_batch"]()
                yield batch if device is None else send_to_device(batch, device, non_blocking=non_blocking)

    def _looping(self, kind: str, batches: Iterator[Any]) -> Iterator[Any]:
        before = self.__dict__["_looped"]
        self.__dict__["_looped"] = kind
        try:
            yield from batches
        finally:
            self.__dict__["_looped"] = before
