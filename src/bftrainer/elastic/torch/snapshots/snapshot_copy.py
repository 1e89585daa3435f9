"""Snapshot copy: copies a training state to CPU memory, to be written while training continues.

Only `snapshot.py` uses it. The input is a state of any nesting, on any device; the output is the same state with every
tensor once, in memory that is reused from one snapshot to the next. For GPU tensors that memory is pinned, and the copy
is queued on the training stream: after everything queued before it and before everything that the script does next, so
no later change can affect it. Python does not wait for the copy; call `Copy.wait` before reading it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bftrainer.elastic.torch.snapshots.portable import portable

_Like = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
"""Properties that must be equal for memory to be reused: shape, strides, type, and whether it is pinned."""


class Copier:
    """Copies states, one after the other, into the same memory. The former copy must not be in use any more."""

    def __init__(self) -> None:
        self._kept: dict[_Like, list[torch.Tensor]] = {}

    def copy(self, state: Mapping[str, Any]) -> Copy:
        """Return a copy that later changes of `state` do not affect.

        Raises an InputError that names a value that could not be loaded again.
        """
        free, self._kept = self._kept, {}
        copies = _Copies(free)
        copied = portable(state, copies.of)
        self._kept = copies.used
        return Copy(copied, copies.delivered())


class Copy:
    """A copied state. Before `wait` has returned, tensors that come from a GPU may be incomplete."""

    def __init__(self, state: dict[str, Any], deliveries: list[_Delivery]) -> None:
        self.state = state
        self._deliveries = deliveries

    def wait(self) -> float:
        """Wait until the copy is complete. Return the seconds that the GPUs stood still for it."""
        return max((delivery.wait() for delivery in self._deliveries), default=0.0)


class _Copies:
    """The tensors of one copy."""

    def __init__(self, free: dict[_Like, list[torch.Tensor]]) -> None:
        self.used: dict[_Like, list[torch.Tensor]] = {}
        self._free = free
        self._copied: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}
        self._deliveries: dict[torch.device, _Delivery] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of a tensor.

        Tied weights, which are different tensors over the same memory, share one copy.
        """
        key: object = id(tensor)
        if tensor.layout is torch.strided:
            where = (tensor.device, tensor.data_ptr(), tensor.is_conj(), tensor.is_neg())
            key = (*where, tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._copied:
            # Keep the original too: its address is unique only while it lives.
            self._copied[key] = tensor, self._copy_of(tensor)
        return self._copied[key][1]

    def delivered(self) -> list[_Delivery]:
        """Return what to wait for, now that all copies are queued."""
        for delivery in self._deliveries.values():
            delivery.end()
        return list(self._deliveries.values())

    def _copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor.to("cpu", copy=True)
        if tensor.is_cuda and tensor.device not in self._deliveries:
            self._deliveries[tensor.device] = _Delivery(tensor.device)
        like = (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_cuda)
        free = self._free.get(like)
        memory = free.pop() if free else _memory_for(tensor)
        self.used.setdefault(like, []).append(memory)
        return memory.copy_(tensor, non_blocking=tensor.is_cuda)


class _Delivery:
    """The copies queued from one GPU, on the stream that is current when this object is made."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._begun: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._ended: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._stream.record_event(self._begun)

    def end(self) -> None:
        """Record that all copies are queued."""
        self._stream.record_event(self._ended)

    def wait(self) -> float:
        """Wait until the copies have arrived. Return the seconds from the first to the last."""
        self._ended.synchronize()
        return float(self._begun.elapsed_time(self._ended)) / 1000.0


def _memory_for(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cuda:
        try:
            return torch.empty_like(tensor, device="cpu", pin_memory=True)
        except RuntimeError:  # the host pins no more memory: the copy is slower, but as good
            pass
    return torch.empty_like(tensor, device="cpu")
