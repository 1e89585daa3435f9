"""Metrics of torchmetrics in `training_step`: each sample counts once, whichever rank computes it.

A metric adds up what it needs in its states. During a step each rank's metrics hold only what its parts of the batch
have added. Then the states of all ranks are combined, and added to those of before the step. A step that is lost leaves
no trace in them. In an evaluation every rank has all batches, and metrics work as always.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_max, dim_zero_min, dim_zero_sum

from bftrainer.elastic.torch.gradients.step_exchange import Numbers
from bftrainer.errors import InputError

_PREFIX = "metric "
"""Beginning of the names of metric states among the numbers that ranks exchange."""
_REDUCTIONS = frozenset({dim_zero_sum, dim_zero_max, dim_zero_min})
"""Ways in which states of two ranks can be combined to one of the same size."""


def metric_objects(module: Any) -> dict[str, Metric]:
    """Return the metrics in a module, by their path."""
    return {path: one for path, one in module.named_modules() if isinstance(one, Metric) and one._defaults}


def states_of(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Return the states of the metrics that were updated, as plain values."""
    return {
        path: {"updates": one._update_count, "states": _copied(one)}
        for path, one in metrics.items()
        if one._update_count
    }


def load_states(metrics: Mapping[str, Metric], states: Mapping[str, Any]) -> None:
    """Take over the states of metrics."""
    for path, one in metrics.items():
        if path in states:
            _put(one, states[path]["states"], states[path]["updates"])
        elif one._update_count:
            one.reset()


class StepMetrics:
    """Metrics of one rank's module during a step."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self._before = states_of(metrics)
        self._own: dict[tuple[int, str], dict[str, Tensor]] = {}  # what this rank has added, by batch and metric
        self._called: set[str] = set()  # metrics that return a value for each batch
        self.begin_again()

    def begin_again(self) -> None:
        """Have the metrics hold nothing, so that only what this step adds is in them."""
        self._own, self._called = {}, set()
        for path in self._before:
            self._metrics[path].reset()

    def part_is_computed(self, batch: int, *, counts: bool) -> None:
        """Take what a part of a batch has added. Its samples may be those of another rank, and not count."""
        for path, one in self._metrics.items():
            if not one._update_count:
                continue
            if one._forward_cache is not None:
                self._called.add(path)
            before = self._own.setdefault(
                (batch, path), {name: state.clone() for name, state in _defaults(one).items()}
            )
            if counts:
                self._own[batch, path] = _sum_of(one, before, _copied(one))
            one.reset()

    def numbers(self) -> dict[str, list[float]]:
        """Return the states that this rank has added."""
        return {
            f"{_PREFIX}{batch} {path}": torch.cat(
                [state.flatten().double().cpu() for state in states.values()]
            ).tolist()
            for (batch, path), states in self._own.items()
        }

    def combine(self, numbers: Sequence[Numbers], batches: int) -> None:
        """Add the states of all ranks, for each batch of the step, to those of before the step."""
        for path, one in self._metrics.items():
            before = self._before.get(path)
            states = _defaults(one) if before is None else before["states"]
            updates = 0 if before is None else before["updates"]
            for batch in range(batches):
                name = f"{_PREFIX}{batch} {path}"
                rows = [row[name] for row in numbers if name in row]
                if not rows:
                    continue
                added = functools.reduce(functools.partial(_sum_of, one), (_shaped(one, row) for row in rows))
                if path in self._called:  # it has a value for this batch
                    _put(one, added, 1)
                    one._forward_cache = one.compute()
                states, updates = _sum_of(one, states, added), updates + 1
            if updates:
                _put(one, states, updates)


def _shaped(one: Metric, row: Sequence[float]) -> dict[str, Tensor]:
    """Return states from the numbers that a rank sent."""
    states, place = {}, 0
    for name, default in _defaults(one).items():
        numbers = torch.tensor(row[place : place + default.numel()], dtype=torch.float64)
        states[name] = numbers.reshape(default.shape).to(default.dtype)
        place += default.numel()
    return states


def _sum_of(one: Metric, before: Mapping[str, Tensor], added: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return states that hold what two states hold."""
    return {name: _added(one, name, before[name], state) for name, state in added.items()}


def _added(one: Metric, name: str, before: Tensor, step: Tensor) -> Tensor:
    before = before.to(step.device)
    if one._reductions[name] is dim_zero_sum:
        return before + step - _defaults(one)[name].to(step.device)
    return torch.maximum(before, step) if one._reductions[name] is dim_zero_max else torch.minimum(before, step)


def _defaults(one: Metric) -> dict[str, Tensor]:
    return {name: default for name, default in one._defaults.items() if isinstance(default, Tensor)}


def _copied(one: Metric) -> dict[str, Tensor]:
    return {name: getattr(one, name).detach().clone() for name in _defaults(one)}


def _put(one: Metric, states: Mapping[str, Tensor], updates: int) -> None:
    for name, state in states.items():
        setattr(one, name, state.detach().to(one.device, copy=True))
    one._update_count, one._computed = updates, None


class RefusedMetrics:
    """Metrics whose states ranks cannot combine. They may be updated in an evaluation only."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = {path: one for path, one in metrics.items() if not _reductions_of(one) <= _REDUCTIONS}
        self._updates = self._counts()

    def refuse_updated(self) -> None:
        """Raise an InputError if one of them was updated since this object was made."""
        for path, count in self._counts().items():
            if count != self._updates[path]:
                raise InputError(
                    f"the metric `{path}` ({type(self._metrics[path]).__name__}) cannot be updated in training_step "
                    "with ElasticStrategy: it has states other than sums, minima and maxima, so the ranks cannot "
                    "combine them. Use a metric with a fixed state (many have an argument `thresholds`), or use it in "
                    "validation_step"
                )

    def _counts(self) -> dict[str, int]:
        return {path: one._update_count for path, one in self._metrics.items()}


def _reductions_of(one: Metric) -> set[Any]:
    return {one._reductions[name] for name in one._defaults}
