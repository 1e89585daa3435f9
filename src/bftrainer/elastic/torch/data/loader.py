"""Loader of batches: fetches and collates the samples of the planned steps, with or without worker processes.

Workers are those of a torch DataLoader. The training loop calls `begin` at each epoch and after each rescale. Worker
processes survive both; only the batches that they had prefetched are dropped.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.context import BaseContext
from queue import Empty
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from bftrainer.elastic.torch.data.batch_plan import BatchPlan, Step, whole_number
from bftrainer.elastic.torch.data.source import length_of
from bftrainer.errors import InputError

_OVER = object()
_MOST = 4
"""Maximum number of loaders whose workers are kept at a time."""


class Loader:
    """The micro-batches of one rank, in order. Only one thread may use it.

    Workers keep the copy of the dataset they started with: a later change to it, such as an epoch number, does not
    reach them.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: BatchPlan,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        timeout: float = 0.0,
    ) -> None:
        """The options are those of torch's DataLoader. Memory is pinned only if there is an accelerator."""
        length = length_of(dataset)
        if length != plan.length and plan.own_order is None:
            raise InputError(f"the dataset must have the {plan.length} samples the plan is for, but got {length}")
        num_workers = whole_number("num_workers", num_workers, 0)
        if prefetch_factor is not None:
            prefetch_factor = whole_number("prefetch_factor", prefetch_factor, 1)
        self._plan = plan
        self._indices = _Indices(plan)
        # A separate generator, so that the seeds that DataLoader draws do not change the training's random numbers.
        self._generator = torch.Generator()
        # `torch.accelerator` came with torch 2.6.
        accelerator = getattr(torch, "accelerator", torch.cuda)
        self._options: dict[str, Any] = {
            "batch_sampler": self._indices,
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory and accelerator.is_available(),
            "prefetch_factor": prefetch_factor,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
            "timeout": timeout,
            "generator": self._generator,
            "persistent_workers": num_workers > 0,
        }
        self._dataset = dataset
        self._loader: DataLoader[Any] | None = self._build()
        self._batches: Iterator[Any] | None = None

    def begin(self, epoch: int, cursor: int, rank: int, world: int) -> None:
        """(Re)start at this position. Waits for the batch that each worker is fetching at the moment."""
        self._plan.step_at(epoch, cursor, rank, world)  # refuses invalid values before anything is changed
        self._indices.begin(epoch, cursor, rank, world)
        # Workers draw their seeds when they start. This seed differs from all others of the training.
        place = repr((self._plan.seed, epoch, cursor, rank, world)).encode()
        self._generator.manual_seed(int.from_bytes(hashlib.sha256(place).digest()[:8], "big") >> 1)
        try:
            if self._loader is None:
                self._loader = self._build()
            _take_back(self._batches)
            # With running workers, iter() asks each for an acknowledgement and drops all batches before it. A worker
            # answers in order, so no batch from the old position can follow its acknowledgement.
            self._batches = iter(self._loader)
        except BaseException:
            self.close()  # acknowledgements left in the queue would confuse the next `begin`
            raise

    def next(self) -> tuple[Step, int, Any] | None:
        """Return the step, the number of the micro-batch in it and the collated batch; None when the epoch is over.

        After an error only `begin` can continue: it is not known which batch the workers would return next.
        """
        if self._batches is None:
            raise InputError("`begin` must be called before `next`: at first, after `close` and after an error")
        try:
            batch = next(self._batches, _OVER)
        except BaseException:
            self.close()
            raise
        if batch is not _OVER:
            step, number = self._indices.given.popleft()
            return step, number, batch
        if self._indices.given:
            step, _ = self._indices.given[0]
            self.close()
            raise InputError(
                f"the dataset raised StopIteration in the step from {step.start} to {step.stop} of the epoch; "
                "a map-style dataset must give a sample for every index below its length"
            )
        return None

    def close(self) -> None:
        """End the workers; one that is fetching may finish that first. A later `begin` starts new ones."""
        batches, self._batches, self._loader = self._batches, None, None
        self._indices.given.clear()
        # Only the iterator has a handle on the workers, and only this private method ends them now instead of when the
        # last reference happens to go.
        shutdown = getattr(batches, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()

    def _build(self) -> DataLoader[Any]:
        try:
            return DataLoader(self._dataset, **self._options)
        except (TypeError, ValueError) as problem:
            raise InputError(f"torch's DataLoader refuses these options: {problem}") from None


class Loaders:
    """The loaders of a training with their worker processes, kept from epoch to epoch."""

    def __init__(self) -> None:
        self._loaders: dict[tuple[Any, ...], Loader] = {}

    def of(self, dataset: Any, plan: BatchPlan, loading: Mapping[str, Any]) -> Loader:
        """Return the loader for a dataset, a plan and the options of a `Loader`. An existing loader is reused."""
        options = tuple(sorted((name, _identity(value)) for name, value in loading.items()))
        key = (id(dataset), plan.signature.settings, plan.max_batch, options)
        if key not in self._loaders:
            while len(self._loaders) >= _MOST:
                self._loaders.pop(next(iter(self._loaders))).close()
            self._loaders[key] = Loader(dataset, plan, **loading)
        return self._loaders[key]

    def close(self) -> None:
        """End all workers."""
        for loader in self._loaders.values():
            loader.close()


def is_own(loader: DataLoader[Any]) -> bool:
    """Return whether a DataLoader of torch was made by a `Loader`."""
    return isinstance(loader.batch_sampler, _Indices)


def _identity(value: Any) -> str:
    """Return a text that distinguishes two values of an option: plain values by value, functions by object."""
    return repr(value) if isinstance(value, bool | int | float | str | None) else f"{type(value).__name__} {id(value)}"


class _Indices:
    """Batch sampler: yields the index lists of the micro-batches from the current position."""

    def __init__(self, plan: BatchPlan) -> None:
        self._plan = plan
        self._place = (0, 0, 0, 1)
        self.given: deque[tuple[Step, int]] = deque()
        """Micro-batches that DataLoader has requested and not returned yet. It returns them in the same order."""

    def begin(self, epoch: int, cursor: int, rank: int, world: int) -> None:
        self._place = (epoch, cursor, rank, world)
        self.given.clear()

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._plan.steps_from(*self._place):
            for number, micro in enumerate(step.micros):
                self.given.append((step, number))
                yield list(micro.indices)


def _take_back(batches: Iterator[Any] | None) -> None:
    """Take back the index lists that the workers have not begun to fetch. Otherwise a rescale would wait for them.

    The queues are private to torch. With a version that has none, a rescale waits, and is still correct.
    """
    for queue in getattr(batches, "_index_queues", ()):
        with suppress(Empty):
            while True:
                queue.get_nowait()
