"""Results of a Lightning training: what `self.log` has added up in the present epoch, as plain values.

Lightning keeps an object per logged name. A newcomer has none of them. It logs a value by each name, as the others have
done, and then takes over their sums.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_OPTIONS = ("prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "metric_attribute")
"""Options of `self.log` that Lightning keeps for each name, besides the reduction."""
_SUMS = ("value", "cumulated_batch_size")
"""Attributes of a result whose values are tensors."""
_CACHES = ("_forward_cache", "_computed")
"""Attributes of a result with the value of the last batch, and of the epoch."""


def options_of(meta: Any) -> dict[str, Any]:
    """Return the options that a name was logged with, as plain values."""
    return {name: getattr(meta, name) for name in _OPTIONS} | {"reduce_fx": meta.reduce_fx.__name__}


class ResultsRecord:
    """Results of the training loop of one rank's Trainer. `log` adds a value to them."""

    def __init__(self, trainer: Any, log: Callable[..., None]) -> None:
        self._trainer = trainer
        self._log = log

    @property
    def _results(self) -> Any:
        return self._trainer.fit_loop.epoch_loop._results

    def state(self) -> list[dict[str, Any]]:
        """Return all results as plain values and tensors."""
        return [
            {
                "fx": result.meta.fx,
                "name": result.meta.name,
                "options": options_of(result.meta),
                "sums": {name: getattr(result, name).detach().clone() for name in _held_by(result)},
                "caches": {name: _copied(getattr(result, name)) for name in _CACHES},
                "reset": result.has_reset,
                "updates": result._update_count,
            }
            for result in self._results.values()
        ]

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over results, in place of those of this rank."""
        results, device = self._results, self._trainer.strategy.root_device
        known = {(result.meta.fx, result.meta.name) for result in results.values()}
        if known != {(state["fx"], state["name"]) for state in states}:
            results.clear()
            for state in states:
                self._add(state)
        by_name = {(result.meta.fx, result.meta.name): result for result in results.values()}
        for state in states:
            result = by_name[state["fx"], state["name"]]
            for name, value in state["sums"].items():
                setattr(result, name, value.to(device, copy=True))
            for name, value in state["caches"].items():
                setattr(result, name, value.to(device, copy=True) if isinstance(value, Tensor) else value)
            result.has_reset, result._update_count = state["reset"], state["updates"]

    def _add(self, state: Mapping[str, Any]) -> None:
        options = dict(state["options"])
        attribute = options["metric_attribute"]
        module, strategy = self._trainer.lightning_module, self._trainer.strategy
        value = operator.attrgetter(attribute)(module) if attribute else torch.zeros((), device=strategy.root_device)
        options["reduce_fx"] = getattr(torch, options["reduce_fx"])
        self._log(state["fx"], state["name"], value, **options, batch_size=1, sync_dist_fn=strategy.reduce)


def _held_by(result: Any) -> list[str]:
    return [name for name in _SUMS if result.is_tensor and hasattr(result, name)]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else None
