"""Methods of a Trainer that are called by part: where they are given a batch, they see one of this rank's parts.

The Trainer's loop calls some methods with a batch that it got from its loader. In an elastic Trainer that is a
`Batch` or a `StoredBatch`. The methods below, in whichever class they are overridden, are wrapped in the class that is
used, so that each of them gets what it was written for.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from bftrainer.integrations.transformers.evaluation import StoredBatch
from bftrainer.integrations.transformers.steps import Batch

_WRAPPED = "_bftrainer_by_part"


def wrap(trainer_class: type) -> None:
    """Wrap the methods of a class, unless they are those of a class whose methods are wrapped."""
    for name, wrapper in _WRAPPERS.items():
        method = getattr(trainer_class, name, None)
        if method is not None and not getattr(method, _WRAPPED, False):
            wrapped = functools.wraps(method)(wrapper(method))
            setattr(wrapped, _WRAPPED, True)
            setattr(trainer_class, name, wrapped)


def _get_batch_samples(method: Callable[..., Any]) -> Callable[..., Any]:
    def get_batch_samples(self: Any, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        if not self._elastic.is_in_epoch:
            return method(self, epoch_iterator, num_batches, device)
        numbers = list(itertools.islice(epoch_iterator, num_batches))
        return self._elastic.steps.take(len(numbers), lambda parts: method(self, iter(parts), len(parts), device))

    return get_batch_samples


def _training_step(method: Callable[..., Any]) -> Callable[..., Any]:
    def training_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(inputs, Batch):
            return method(self, model, inputs, *args, **kwargs)
        return self._elastic.steps.compute(inputs, lambda part, items: method(self, model, part, items))

    return training_step


def _floating_point_ops(method: Callable[..., Any]) -> Callable[..., Any]:
    def floating_point_ops(self: Any, inputs: Any) -> Any:
        if not isinstance(inputs, Batch):
            return method(self, inputs)
        return self._elastic.steps.flos if inputs.is_last else 0

    return floating_point_ops


def _track_num_input_tokens(method: Callable[..., Any]) -> Callable[..., Any]:
    def _track_num_input_tokens(self: Any, inputs: Any) -> None:
        if not isinstance(inputs, Batch):
            method(self, inputs)
        elif inputs.is_last:
            self.state.num_input_tokens_seen += self._elastic.steps.tokens

    return _track_num_input_tokens


def _prediction_step(method: Callable[..., Any]) -> Callable[..., Any]:
    def prediction_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(inputs, StoredBatch):
            return method(self, model, inputs, *args, **kwargs)
        return inputs.results(lambda batch: method(self, model, batch, *args, **kwargs))

    return prediction_step


_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "get_batch_samples": _get_batch_samples,
    "training_step": _training_step,
    "floating_point_ops": _floating_point_ops,
    "_track_num_input_tokens": _track_num_input_tokens,
    "prediction_step": _prediction_step,
}
