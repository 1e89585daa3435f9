"""Gradients between backward passes: which are this rank's own, and which are summed over all ranks already.

A script may make several backward passes before it steps, and may read or clip gradients after any of them. After a
sum the gradients are *global*, the same on all ranks. Before the next backward pass they are put aside, so that its
part is summed alone, and they are added again afterwards. Parts of a batch that is not complete are *hidden*: the
script sees no gradient, so its clipping, its step and its `zero_grad` change nothing. For a batch that was lost, and
comes again, no backward pass is made. Zeros *stand in* for its gradients, because the script may read them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from bftrainer.elastic.torch.gradients.optimizers import params_of

_Kept = list[tuple[Tensor, Tensor]]


class PassGradients:
    """Gradients of the prepared optimizers."""

    def __init__(self) -> None:
        self._global: set[int] = set()  # optimizers, by id, whose gradients are the same on all ranks
        self._aside: dict[int, _Kept] = {}  # global gradients of earlier passes, by optimizer
        self._hidden: _Kept = []
        self._left: dict[int, list[tuple[Tensor, Tensor, int]]] = {}  # own gradients as the last pass left them
        self._stood_in: dict[int, Tensor] = {}  # parameters, by id, whose gradients were stood in for

    def is_global(self, optimizer: Optimizer) -> bool:
        """Return whether the gradients of an optimizer are the same on all ranks."""
        return id(optimizer) in self._global

    def put_aside(self, optimizers: Sequence[Optimizer]) -> None:
        """Put the global gradients of these optimizers aside, because a backward pass begins."""
        for optimizer in optimizers:
            if id(optimizer) not in self._global:
                continue
            self._global.discard(id(optimizer))
            kept = _taken(optimizer)
            if kept:  # copies: the next sum is written to where these lie
                self._aside[id(optimizer)] = [(param, grad.clone()) for param, grad in kept]

    def put_back(self, optimizers: Sequence[Optimizer]) -> None:
        """Make the gradients of these optimizers, which were summed or not touched by the pass, global again."""
        for optimizer in optimizers:
            self._global.add(id(optimizer))
            for param, grad in self._aside.pop(id(optimizer), ()):
                param.grad = grad if param.grad is None else param.grad.add_(grad)

    def is_put_aside(self, optimizer: Optimizer) -> bool:
        """Return whether this optimizer has global gradients of an earlier pass."""
        return id(optimizer) in self._aside

    def note(self, optimizers: Sequence[Optimizer]) -> None:
        """Note the gradients that a pass left, of those optimizers that have gradients of this rank's own."""
        for optimizer in optimizers:
            if id(optimizer) not in self._global and not self._hidden:
                params = params_of([optimizer])
                left = [(param, param.grad, param.grad._version) for param in params if param.grad is not None]
                self._left[id(optimizer)] = left

    def is_changed(self, optimizer: Optimizer) -> bool:
        """Return whether the script has changed gradients of this rank's own since the last pass.

        It may have cleared them: then those of earlier passes are gone too.
        """
        left = self._left.pop(id(optimizer), None)
        if left is None or all(param.grad is grad and grad._version == version for param, grad, version in left):
            return False
        if any(param.grad is not None and bool(param.grad.any()) for param in params_of([optimizer])):
            return True
        self._aside.pop(id(optimizer), None)
        return False

    def hide(self, optimizers: Sequence[Optimizer]) -> None:
        """Hide the gradients of a part of a batch from the script."""
        self._hidden = [pair for optimizer in optimizers for pair in _taken(optimizer)]

    def show(self) -> None:
        """Undo `hide`, because the next part's backward pass adds to them."""
        hidden, self._hidden = self._hidden, []
        for param, grad in hidden:
            param.grad = grad

    def stand_in(self, optimizers: Sequence[Optimizer]) -> None:
        """Give zeros to parameters without a gradient: the script may read those of a batch that comes again."""
        for param in params_of(optimizers):
            if param.grad is None and param.requires_grad:
                param.grad = torch.zeros_like(param)
                self._stood_in[id(param)] = param

    def lose(self, optimizers: Sequence[Optimizer]) -> None:
        """Drop the gradients of a step that failed. Zeros stand in for them."""
        self.forget(optimizers)
        self.stand_in(optimizers)

    def end_standing_in(self) -> None:
        """Take away the gradients that were stood in for. Optimizers treat a zero gradient and none differently."""
        for param in self._stood_in.values():
            param.grad = None
        self._stood_in.clear()

    def forget(self, optimizers: Sequence[Optimizer]) -> None:
        """Drop all gradients: they belong to a batch that the script left, for example."""
        self._hidden = []
        self._stood_in.clear()
        self._aside.clear()
        self._global.clear()
        self._left.clear()
        for param in params_of(optimizers):
            param.grad = None


def _taken(optimizer: Optimizer) -> _Kept:
    """Return the gradients of an optimizer's parameters, and leave none."""
    found = [(param, param.grad) for param in params_of([optimizer]) if param.grad is not None]
    for param, _ in found:
        param.grad = None
    return found
