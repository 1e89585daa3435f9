"""Batches of one rank: the iterable that `run.batches` returns.

It knows its length and its position in the epoch. `Run` creates it and passes in the generator function that a loop
over it calls. It can be created before the first epoch and used in every epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from bftrainer.elastic.torch.data.batch_plan import BatchPlan, DataSignature
from bftrainer.elastic.torch.data.source import DataSource, length_of
from bftrainer.errors import InputError


class _Progress(Protocol):
    cursor: int


class _Runner(Protocol):
    """The part of `Run` that `Batches` uses."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def progress(self) -> _Progress: ...


class Batches:
    """This rank's batches of each epoch. Made by `run.batches`; iterate over it once per epoch.

    It can be created before the first epoch and used in every epoch. `len()` is the number of batches that this rank
    gets in a whole epoch. All counts are for the present number of nodes, which may change.
    """

    def __init__(
        self, run: _Runner, source: DataSource, plan: BatchPlan, iterate: Callable[[Batches], Iterator[Any]]
    ) -> None:
        self.plan = plan
        self._run = run
        self._source = source
        self._iterate = iterate

    def __iter__(self) -> Iterator[Any]:
        length = length_of(self.dataset)
        if length != self.plan.length and self.plan.own_order is None:
            raise InputError(
                f"the dataset had {self.plan.length} samples when its batches were made and has {length} now; call "
                "run.batches() again after changing it, or elastic.prepare() after all changes"
            )
        return self._iterate(self)

    def __len__(self) -> int:
        """Return the number of batches that this rank gets in a whole epoch, including micro-batches of `max_batch`."""
        return self.plan.batches_in_epoch(self._run.rank, self._run.world)

    @property
    def dataset(self) -> Any:
        """The dataset, or the dataset of the DataLoader if one was given."""
        return self._source.dataset

    @property
    def loading(self) -> Mapping[str, Any]:
        """The options for loading, as for torch's DataLoader."""
        return self._source.loading

    @property
    def persistent(self) -> bool:
        """Whether the DataLoader's worker processes stay alive from epoch to epoch."""
        return self._source.persistent

    @property
    def position(self) -> int:
        """Samples of the present epoch that are committed, over all ranks."""
        return self._run.progress.cursor

    @property
    def samples(self) -> int:
        """Samples of a whole epoch, over all ranks."""
        return self.plan.samples_in_epoch(self._run.world)

    @property
    def steps(self) -> int:
        """Steps of a whole epoch."""
        return self.plan.steps_in_epoch(self._run.world)

    @property
    def global_batch(self) -> int:
        """Samples of a full step, over all ranks."""
        return self.plan.global_batch_size(self._run.world)

    @property
    def signature(self) -> DataSignature:
        """Settings that must be the same on all ranks: the length of the data, the batch sizes and the order."""
        return self.plan.signature
