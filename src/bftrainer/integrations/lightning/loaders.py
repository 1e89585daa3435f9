"""Training loader of an elastic Trainer: Lightning's loop gets one item per batch of all ranks together.

Their number does not change when nodes come and go. An item is the first of this rank's parts of the batch, so that
hooks see data as they were written for. `steps.py` computes all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from bftrainer.integrations.lightning.refusals import refuse_loader


class TrainBatches(DataLoader[Any]):
    """The training loader as Lightning sees it. All that it does not have itself is that of the DataLoader."""

    def __init__(self, loader: Any, ranks: int, take: Callable[[], Any]) -> None:
        """`take` returns this rank's data of the next batch."""
        refuse_loader(loader)
        # Not DataLoader's own: nothing is loaded by this object.
        self.__dict__.update(_loader=loader, _ranks=ranks, _take=take)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_loader"], name, value)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        while True:  # Lightning knows the number of batches, and where it is
            yield self.__dict__["_take"]()

    def __len__(self) -> int:
        full, rest = divmod(len(self.sampler), self.samples)  # type: ignore[arg-type]
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

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: Lightning's progress says where the training is. With it, it can go on in mid-epoch."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load nothing."""
