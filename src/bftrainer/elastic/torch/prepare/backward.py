"""Backward passes of a prepared script: lets BFTrainer act before and after each `loss.backward()`.

`Tensor.backward` and all frameworks call `torch.autograd.backward`, which is replaced here. The gradient of a loss is
multiplied by the weight of the batch while it is computed: autograd begins with that weight in place of 1. So the
gradients of several batches can simply be added up, however unevenly samples are split over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

_real_backward: Callable[..., None] = torch.autograd.backward


class PassObserver(Protocol):
    """What is told of the backward passes of a script."""

    def leaves_pass_out(self) -> bool:
        """Return whether the gradient of the pass that would begin is not wanted."""

    def pass_begins(self, root: Tensor | None) -> float | None:
        """Return the weight of the pass that begins; None if it is not part of training. `root` is the loss."""

    def pass_ends(self) -> None:
        """Act on the gradients that a pass left."""


_observer: PassObserver | None = None
_within = False  # a pass is running; checkpointed layers start another one within it, perhaps in another thread


def observe(observer: PassObserver) -> None:
    """Tell `observer` of every backward pass from now on."""
    global _observer
    _observer = observer
    torch.autograd.backward = _backward


def _backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    global _within
    observer = _observer
    if observer is None or _within:
        _real_backward(tensors, grad_tensors, *args, **kwargs)
        return
    if observer.leaves_pass_out():
        return
    roots: Sequence[Tensor] = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    weight = observer.pass_begins(roots[0] if len(roots) == 1 else None)
    _within = True
    try:
        given = grad_tensors if weight is None or weight == 1.0 else _weighted(roots, grad_tensors, weight)
        _real_backward(tensors, given, *args, **kwargs)
    finally:
        _within = False
    if weight is not None:
        observer.pass_ends()


def _weighted(roots: Sequence[Tensor], grads: Any, weight: float) -> list[Tensor | None]:
    """Return what autograd begins with: the given gradients, or 1 for a single number, times `weight`."""
    listed: Sequence[Tensor | None] = (grads,) * len(roots) if grads is None or isinstance(grads, Tensor) else grads
    return [_one(root, grad, weight) for root, grad in zip(roots, listed, strict=True)]


def _one(root: Tensor, grad: Tensor | None, weight: float) -> Tensor | None:
    if grad is not None:
        return grad * weight
    return torch.full_like(root, weight) if root.numel() == 1 else None  # torch says what is wrong with None
