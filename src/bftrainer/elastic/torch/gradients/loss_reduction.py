"""Loss reduction check: detects a loss summed over the batch, where a mean is needed.

Gradients of the ranks are weighted by their share of the batch, which is right for means. A sum changes with the number
of nodes, as it does under DistributedDataParallel. `Run.step` has the first loss checked: on several nodes a sum is
refused; a script that trains alone gets a warning. Only certain signs count: a loss function of torch with
reduction='sum' over the batch, or the sum of per-sample losses. It may be divided by a number that is smaller than the
batch, such as the number of batches per step: that is no mean either.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bftrainer.errors import InputError

_MOST_NODES = 12
_PASSED_THROUGH = ("AddBackward", "SubBackward", "CloneBackward", "AliasBackward", "ToCopyBackward", "ViewBackward")
_SENTENCE = (
    "the loss is a sum over the batch. It must be a mean: otherwise the gradients change with the number of "
    "nodes and micro-batches. Use reduction='mean', or divide the loss by the size of the batch"
)
_NONE, _SUM = 0, 2
"""torch's numbers for reduction='none' and reduction='sum'."""


class SumWatch:
    """Checks the first loss of a batch of two samples or more."""

    def __init__(self) -> None:
        self._looked = False

    def look(self, loss: object, batch: int, *, alone: bool) -> None:
        """Check the loss of a batch of `batch` samples. A sum is refused unless the script trains `alone`."""
        if self._looked or batch < 2 or not isinstance(loss, Tensor):
            return
        self._looked = True
        if is_sum(loss, batch):
            if not alone:
                raise InputError(_SENTENCE)
            print(f"bftrainer: {_SENTENCE}", file=sys.stderr, flush=True)


def is_sum(loss: Tensor, batch: int) -> bool:
    """Return whether `loss` or a term of it is certainly a sum over `batch` samples, even after the backward pass."""
    terms = list(_terms(loss.grad_fn, batch))
    return any(_sums(node, batch, alone=len(terms) == 1) for node in terms)


def _terms(node: Any, batch: int) -> Iterator[Any]:
    """Yield the autograd nodes of the terms whose sum is the loss; None for one that is divided by `batch` or more."""
    nodes, seen = [(node, 1.0)], 0
    while nodes and seen < _MOST_NODES:
        node, divisor = nodes.pop()
        seen += 1
        if node is None:
            continue
        number = 1.0 if node.name().startswith(_PASSED_THROUGH) else _divisor(node)
        if number is None:
            yield node
        elif divisor * number < batch:
            nodes += [(following, divisor * number) for following, _ in node.next_functions]
        else:
            yield None


def _divisor(node: Any) -> float | None:
    """Return the number of the script's by which a node divides, if it does: not one that was computed by torch."""
    name = node.name()
    if not name.startswith(("DivBackward0", "MulBackward0")):
        return None
    try:
        other = node._saved_other
    except RuntimeError:  # freed by the backward pass
        return None
    if other is None or other.dim() or other.requires_grad:
        return None
    small = torch.tensor(1, dtype=torch.float16 if other.is_floating_point() else torch.int8)
    if torch.result_type(other, small) != small.dtype or not (value := abs(float(other))):
        return None
    return value if name.startswith("Div") else 1 / value


def _sums(node: Any, batch: int, *, alone: bool) -> bool:
    if node is None:
        return False
    if getattr(node, "_saved_reduction", None) == _SUM:
        return _is_over(node, batch, alone)
    if not node.name().startswith("SumBackward0"):
        return False
    inner, _ = node.next_functions[0]
    if getattr(inner, "_saved_reduction", None) == _NONE:
        return _is_over(inner, batch, alone)
    # L1Loss(reduction='sum') and hand-written squared errors. One of several terms may be a penalty on weights.
    if alone and inner is not None and inner.name().startswith(("AbsBackward", "PowBackward")):
        difference, _ = inner.next_functions[0]
        return (
            difference is not None
            and difference.name().startswith("SubBackward")
            and _is_over(difference, batch, alone)
        )
    return False


def _is_over(node: Any, batch: int, alone: bool) -> bool:
    """Return whether a node's input has one row per sample and is no parameter.

    If the node is the only term, there may be several rows per sample, as in language models.
    """
    for inner, number in node.next_functions:
        if inner is None or inner.name().endswith("AccumulateGrad"):
            continue
        described = getattr(inner, "_input_metadata", ())
        shape = tuple(described[number].shape) if number < len(described) else ()
        rows = shape[0] if shape else 0
        if rows == batch or (alone and rows and rows % batch == 0):
            return True
    return False
