"""Order of samples of a DistributedSampler: the one that torch gives to as many ranks as the script was submitted for.

In torch, rank r of N takes every N-th sample. So the batches of all ranks in one step are a contiguous part of the
whole order, and `BatchPlan` can cut it for any number of ranks. The samples that torch repeats to give all ranks the
same number are left out.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data.distributed import DistributedSampler


class DistributedOrder:
    """Indices of a whole epoch, over all ranks. The epoch is the one that the script gave to `set_epoch`."""

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self._sampler = sampler
        total: int = len(sampler.dataset)  # type: ignore[arg-type]
        self.length = total // sampler.num_replicas * sampler.num_replicas if sampler.drop_last else total
        """Samples of an epoch."""
        place = repr((self.length, bool(sampler.shuffle), sampler.seed)).encode()
        self.digest = int.from_bytes(hashlib.sha256(place).digest()[:8], "big") >> 2
        """A number that shows whether the samplers of two ranks draw the same."""

    def __call__(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the indices of the present epoch of the sampler; `epoch` counts the loops over the loader."""
        return np.array(indices_of(self._sampler)[: self.length], dtype=np.int64)


def indices_of(sampler: DistributedSampler[Any]) -> list[int]:
    """Return all indices that a sampler gives to all ranks together, without repetitions."""
    total: int = len(sampler.dataset)  # type: ignore[arg-type]
    if not sampler.shuffle:
        return list(range(total))
    generator = torch.Generator()
    generator.manual_seed(sampler.seed + sampler.epoch)
    drawn: list[int] = torch.randperm(total, generator=generator).tolist()
    return drawn
