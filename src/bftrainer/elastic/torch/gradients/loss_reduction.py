"""Loss reduction check: detects a loss summed over the batch, where a mean is needed.

Gradients of the ranks are weighted by their share of the batch, which is right for means. A sum changes with the number
of nodes, as it does under DistributedDataParallel. `Run.step` has the first loss checked: on several nodes a sum is
refused; a script that trains alone gets a warning. Only certain signs count: a loss function of torch with
reduction='sum' over the batch, or the undivided sum of per-sample losses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

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
    terms = list(_terms(loss.grad_fn))
    return any(_sums(node, batch, alone=len(terms) == 1) for node in terms)


def _terms(node: Any) -> Iterator[Any]:
    """Yield the autograd nodes of the terms whose sum is the loss."""
    nodes, seen = [node], 0
    while nodes and seen < _MOST_NODES:
        node = nodes.pop()
        seen += 1
        if node is None:
            continue
        if node.name().startswith(_PASSED_THROUGH):
            nodes += [following for following, _ in node.next_functions]
        else:
            yield node


def _sums(node: Any, batch: int, *, alone: bool) -> bool:
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
