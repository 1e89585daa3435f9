"""Evaluation of an elastic Trainer: the ranks compute the batches in turn, and all of them get all results.

A batch is computed as a whole by one rank, so that the results are those of a single process, to the digit. Then the
Trainer's own evaluation loop runs on every rank over the stored results, and computes the metrics as it always does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from transformers import Trainer

from bftrainer.elastic.torch.prepare.framework import FrameworkLoop

Predicts = Callable[[Any], tuple[Any, Any, Any]]
"""Computes one batch: the loss, the logits and the labels; see `Trainer.prediction_step`."""


def can_be_shared(trainer: Trainer, loader: Any) -> bool:
    """Return whether the batches of a loader can be computed by number, each on another rank."""
    loader = getattr(loader, "base_dataloader", loader)
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
        and type(loader.batch_sampler.sampler) is SequentialSampler
        and not trainer.args.batch_eval_metrics
    )


class SharedEvaluation:
    """Loader of one evaluation. It gives stored batches, whose results come from all ranks."""

    def __init__(self, trainer: Trainer, loop: FrameworkLoop, loader: Any, what: str) -> None:
        self._trainer = trainer
        self._loop = loop
        self._loader: DataLoader[Any] = getattr(loader, "base_dataloader", loader)
        self._what = what
        assert self._loader.batch_sampler is not None
        self._batches: list[Sequence[int]] = list(self._loader.batch_sampler)
        self._name = getattr(trainer.model, "main_input_name", "input_ids")
        self._preprocess = trainer.preprocess_logits_for_metrics
        self._results: list[Any] | None = None
        self.rows = 0
        """Samples of the batch that the evaluation loop is at."""

    @property
    def dataset(self) -> Any:
        """The dataset that is evaluated."""
        return self._loader.dataset

    @property
    def batch_size(self) -> int | None:
        """Samples of a full batch."""
        return self._loader.batch_size

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[StoredBatch]:
        for number, indices in enumerate(self._batches):
            yield StoredBatch(self, number, {self._name: torch.empty(len(indices), 0)})

    def results_of(self, number: int, predict: Predicts) -> tuple[Any, Any, Any, Any]:
        """Return the results of a batch. At the first call the ranks compute all of them."""
        if self._results is None:
            # With the first call the Trainer has told how to predict.
            self._results = self._loop.divide(self._what, len(self), lambda numbers: self._computed(numbers, predict))
        self.rows = len(self._batches[number])
        losses, logits, labels, inputs = self._results[number]
        return losses, logits, labels, inputs

    def gathered(self, data: Any) -> Any:
        """Return the rows of the present batch. The Trainer repeats a loss as often as a full batch has samples."""
        return _mapped(data, lambda tensor: tensor[: self.rows])

    def _computed(self, numbers: list[int], predict: Predicts) -> Mapping[int, Any]:
        loader = self._loader
        batches = DataLoader(
            loader.dataset,
            batch_sampler=[list(self._batches[number]) for number in numbers],
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            prefetch_factor=loader.prefetch_factor,
            multiprocessing_context=loader.multiprocessing_context,
        )
        return {number: self._result(batch, predict) for number, batch in zip(numbers, batches, strict=True)}

    def _result(self, batch: Any, predict: Predicts) -> tuple[Any, Any, Any, Any]:
        losses, logits, labels = predict(batch)
        if logits is not None and self._preprocess is not None:  # here, because its result is often much smaller
            logits = self._preprocess(logits, labels)
        inputs = batch[self._name] if "inputs" in self._trainer.args.include_for_metrics else None
        result: tuple[Any, Any, Any, Any] = _mapped(
            (losses, logits, labels, inputs), lambda tensor: tensor.detach().cpu()
        )
        return result


class StoredBatch(dict[str, Any]):
    """A batch of an evaluation whose results are computed by one of the ranks, in the place of its inputs."""

    def __init__(self, evaluation: SharedEvaluation, number: int, inputs: Mapping[str, Any]) -> None:
        super().__init__(inputs)
        self._evaluation = evaluation
        self._number = number

    def results(self, predict: Predicts) -> tuple[Any, Any, Any]:
        """Return what `predict` returns for the inputs on the rank that computes them."""
        losses, logits, labels, inputs = self._evaluation.results_of(self._number, predict)
        if inputs is not None:
            (name,) = self
            self[name] = inputs
        return losses, logits, labels


def _mapped(data: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return nested data with all its tensors changed."""
    if isinstance(data, Tensor):
        return change(data)
    if isinstance(data, Mapping):
        return {name: _mapped(value, change) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(_mapped(value, change) for value in data)
    return data
