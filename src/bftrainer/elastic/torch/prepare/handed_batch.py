"""Handed batch: a batch, or a part of one, that the script has received and no step has used yet."""

from __future__ import annotations

from dataclasses import dataclass

from bftrainer.elastic.torch.data.batch_plan import Step


@dataclass(slots=True)
class HandedBatch:
    """One batch in the hands of the script."""

    step: Step
    """Where the batch lies in the epoch, over all ranks."""
    micro: int
    """Number of this rank's part of it: a large share comes in several parts."""
    weight: float
    """Weight of the mean loss of this part in that of the whole batch."""
    samples: int
    """Samples that count: 0 if another rank has all of them."""
    is_last: bool
    """Whether it is the last part of this rank's share."""
    ends_epoch: bool
    """Whether no sample of the epoch comes after it."""
    total: int
    """Samples of the whole batch, over all ranks."""
    passes: int = 0
    """Backward passes made for it."""
