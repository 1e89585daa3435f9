"""Logged values of a step: what `self.log` was given in `training_step`, over all parts of a batch and all ranks.

Each rank computes its parts of a batch. The value of the whole batch is the mean over its samples, or the sum, the
smallest or the largest value, as `self.log(reduce_fx=…)` says. Lightning gets that one value per batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bftrainer.elastic.torch.gradients.step_exchange import Numbers
from bftrainer.elastic.torch.prepare.handed_batch import HandedBatch

_KEPT = ("prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "metric_attribute")
"""Options of `self.log` that a value is logged with again."""
_LOSS = "loss"
"""Name of the loss of a batch among the numbers of a rank, which is not JSON as those of logged values are."""


@dataclass(frozen=True, slots=True)
class LogCall:
    """One call of `self.log`, as Lightning passes it on."""

    fx: str
    name: str
    value: Any
    options: Mapping[str, Any]

    @property
    def reduction(self) -> str:
        """How values are reduced: mean, sum, min or max."""
        given = self.options.get("reduce_fx", "mean")
        name = (given if isinstance(given, str) else given.__name__).lower()
        return "mean" if name == "avg" else name


@dataclass(slots=True)
class _Entry:
    """A name logged on this rank, for one batch, with the values of all parts that count."""

    reduction: str
    values: list[Tensor]
    weights: list[float]


class StepValues:
    """Logged values and losses of the batches of one step on this rank."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def add(self, batch: int, handed: HandedBatch, calls: Sequence[LogCall], loss: Tensor | None) -> None:
        """Add what a part of a batch has logged. `batch` is its number in the step."""
        seen: dict[str, int] = {}
        for call in calls:
            described = _described(batch, call)
            seen[described] = seen.get(described, 0) + 1
            size = call.options.get("batch_size")
            weight = handed.weight if size is None else float(size)
            self._add(f"{described} {seen[described]}", call.reduction, handed, weight, call.value)
        self._add(f"{_LOSS} {batch}", "mean", handed, handed.weight, loss)

    def _add(self, name: str, reduction: str, handed: HandedBatch, weight: float, value: Any) -> None:
        entry = self._entries.setdefault(name, _Entry(reduction, [], []))
        if handed.samples and isinstance(value, Tensor):  # another rank has the samples of a part without any
            entry.values.append(value.detach().double().reshape(()))
            entry.weights.append(weight)

    def numbers(self) -> dict[str, list[float]]:
        """Return a value and its weight for each name, over the parts of this rank."""
        tensors = [value for entry in self._entries.values() for value in entry.values]
        flat: list[float] = torch.stack(tensors).tolist() if tensors else []
        numbers, place = {}, 0
        for name, entry in self._entries.items():
            pairs = list(zip(flat[place : place + len(entry.values)], entry.weights, strict=True))
            place += len(entry.values)
            numbers[name] = list(_reduced(entry.reduction, pairs))
        return numbers


def calls_of_all(numbers: Sequence[Numbers], totals: Sequence[int], module: Any, strategy: Any) -> list[list[LogCall]]:
    """Return the calls of `self.log` for each batch of a step, with values over all ranks.

    `numbers` are those of all ranks, and `totals` the samples of each batch. `module` has the metrics that are logged.
    """
    names = list(dict.fromkeys(name for row in numbers for name in row if name.startswith("{")))
    calls: list[list[LogCall]] = [[] for _ in totals]
    for name in names:
        described = json.loads(name[: name.rindex("}") + 1])
        value, weight = _of_all(name, numbers, described["reduce"])
        options = dict(described["options"])
        if options.get("metric_attribute"):
            logged: Any = _attribute(module, options["metric_attribute"])
        elif not weight:
            continue
        else:
            logged = torch.tensor(value, dtype=getattr(torch, described["dtype"]), device=strategy.root_device)
        options["batch_size"] = round(weight) if described["sized"] else totals[described["batch"]]
        options |= {"reduce_fx": getattr(torch, described["reduce"]), "sync_dist_fn": strategy.reduce}
        calls[described["batch"]].append(LogCall(described["fx"], described["name"], logged, options))
    return calls


def loss_of_all(numbers: Sequence[Numbers], batch: int) -> float | None:
    """Return the loss of a batch over all ranks."""
    value, weight = _of_all(f"{_LOSS} {batch}", numbers, "mean")
    return value if weight else None


def _of_all(name: str, numbers: Sequence[Numbers], reduction: str) -> tuple[float, float]:
    rows = [row[name] for row in numbers if name in row]
    return _reduced(reduction, [(value, weight) for value, weight in rows if weight])


def _reduced(reduction: str, pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return a value for several values with weights, and its weight. 0 and 0 if there are none."""
    if not pairs:
        return 0.0, 0.0
    weight = sum(one for _, one in pairs)
    if reduction == "mean":
        return sum(value * one for value, one in pairs) / weight if weight else 0.0, weight
    values = [value for value, _ in pairs]
    return {"sum": sum, "min": min, "max": max}[reduction](values), weight  # type: ignore[operator]


def _described(batch: int, call: LogCall) -> str:
    """Return a text from which the call can be made again on a rank that has not made it."""
    floating = isinstance(call.value, Tensor) and call.value.is_floating_point()
    dtype = call.value.dtype if floating else torch.get_default_dtype()
    return json.dumps(
        {
            "batch": batch,
            "fx": call.fx,
            "name": call.name,
            "reduce": call.reduction,
            "dtype": str(dtype).removeprefix("torch."),
            "sized": call.options.get("batch_size") is not None,
            "options": {name: call.options[name] for name in _KEPT if name in call.options},
        }
    )


def _attribute(module: Any, path: str) -> Any:
    found = module
    for name in path.split("."):
        found = getattr(found, name)
    return found
