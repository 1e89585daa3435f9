"""Loaders of a Trainer: the training loader as BFTrainer needs it, and as the Trainer sees it.

The Trainer counts batches of all ranks together, each of `per_device_train_batch_size` times the ranks that the script
was submitted for. Their number does not change when nodes come and go. Which part of a batch this rank computes, and in
how many passes, is found out when the Trainer asks for it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from bftrainer.errors import InputError


def plain_loader(loader: Any) -> DataLoader[Any]:
    """Return a training loader as torch's own DataLoader, without what Accelerate has put around it."""
    loader = getattr(loader, "base_dataloader", loader)
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or type(batches) is not BatchSampler:
        raise InputError(
            "get_train_dataloader() must return a DataLoader with a batch_size, but got one with "
            f"{type(batches).__name__}: samples are shared out over changing nodes, so batches cannot be given"
        )
    kind = type(batches.sampler)
    if kind not in (RandomSampler, SeedableRandomSampler, SequentialSampler):
        raise InputError(
            f"the training samples come in the order of {kind.__name__}, which changing nodes cannot share. Use "
            "train_sampling_strategy='random' or 'sequential', and a torch.utils.data.Subset to leave samples out"
        )
    workers: dict[str, Any] = {}
    if loader.num_workers:
        workers = {
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    return DataLoader(
        loader.dataset,
        batch_size=batches.batch_size,
        shuffle=kind is not SequentialSampler,
        drop_last=batches.drop_last,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        **workers,
    )


class GlobalBatches(DataLoader[Any]):
    """The training loader as the Trainer and its callbacks see it: `len` counts the batches of all ranks together.

    A loop over it, such as one of a callback, gives the samples as the DataLoader does, on every rank.
    """

    def __init__(self, loader: DataLoader[Any], ranks: int) -> None:
        # Not DataLoader's own: nothing is loaded by this object.
        self.__dict__.update(_loader=loader, _ranks=ranks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_loader"], name, value)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self.loader)

    def __len__(self) -> int:
        full, rest = divmod(len(self.dataset), self.samples)
        return full + (rest > 0 and not self.drop_last) or 1  # one batch may be larger than the dataset

    @property
    def loader(self) -> DataLoader[Any]:
        """The DataLoader of the script."""
        found: DataLoader[Any] = self.__dict__["_loader"]
        return found

    @property
    def samples(self) -> int:
        """Samples of a full batch, over all ranks."""
        size = self.loader.batch_size
        assert size is not None
        return size * int(self.__dict__["_ranks"])


def batch_numbers(count: int) -> DataLoader[int]:
    """Return a loader of the numbers of an epoch's batches. The Trainer can skip those that are trained already."""
    return DataLoader(range(count), batch_size=1, collate_fn=operator.itemgetter(0))  # type: ignore[arg-type]
