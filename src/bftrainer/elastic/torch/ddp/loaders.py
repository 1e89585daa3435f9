"""Stand-ins for DataLoader and DistributedSampler: which loops train, which evaluate, and what each of them gives.

A loop over a loader with a DistributedSampler trains if gradients are computed and a wrapped model is in training
mode. Any other loop is an evaluation. One with a DistributedSampler gives all samples on each rank, without the
repetitions that torch adds, and as many batches as the ranks that the script sees have together in one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from bftrainer.elastic.torch.data.loader import is_own
from bftrainer.elastic.torch.ddp.order import DistributedOrder
from bftrainer.elastic.torch.ddp.refused import refuse
from bftrainer.elastic.torch.ddp.session import DdpSession
from bftrainer.elastic.torch.prepare.loader import PreparedLoader

_real_iter: Callable[[Any], Iterator[Any]] = DataLoader.__iter__
_real_len: Callable[[Any], int] = DataLoader.__len__
_real_init: Callable[..., None] = DistributedSampler.__init__


def stand_in_for_loaders(session: DdpSession) -> None:
    """Replace how torch's DataLoaders and DistributedSamplers give batches."""

    def iterate(self: DataLoader[Any]) -> Iterator[Any]:
        if is_own(self) or isinstance(self, PreparedLoader):
            return _real_iter(self)
        sampler = self.sampler
        if not isinstance(sampler, DistributedSampler):
            return session.evaluate(_real_iter(self))
        if type(sampler) is not DistributedSampler:
            refuse(f"{type(sampler).__name__} is a DistributedSampler of the script's own")
        if torch.is_grad_enabled() and any(model.training for model in session.found.models):
            return session.train(self)
        return session.evaluate(_real_iter(_whole(self, sampler, session.ranks)))

    def length(self: DataLoader[Any]) -> int:
        found = session.length(self)
        return _real_len(self) if found is None else found

    def init(
        self: DistributedSampler[Any],
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if num_replicas not in (None, session.ranks) or rank not in (None, 0):
            refuse(f"DistributedSampler(num_replicas={num_replicas}, rank={rank}): these are not all ranks of the job")
        _real_init(self, dataset, session.ranks, 0, *args, **kwargs)

    DataLoader.__iter__ = iterate  # type: ignore[method-assign,assignment]
    DataLoader.__len__ = length  # type: ignore[method-assign]
    DistributedSampler.__init__ = init  # type: ignore[method-assign]


def _whole(loader: DataLoader[Any], sampler: DistributedSampler[Any], ranks: int) -> DataLoader[Any]:
    """Return a loader of the batches of all ranks together."""
    if loader.batch_size is None:
        refuse("a DataLoader with a DistributedSampler and without a batch size")
    workers: dict[str, Any] = {}
    if loader.num_workers:
        workers = {"prefetch_factor": loader.prefetch_factor, "timeout": loader.timeout}
        workers |= {
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size * ranks,
        sampler=DistributedOrder(sampler)(0).tolist(),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        **workers,
    )
