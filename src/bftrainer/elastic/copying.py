"""Copies a training state into CPU memory, from which a snapshot is written while training goes on.

`snapshot.py` is the only caller. A state of any nesting, on any device, comes in; the same state goes out with every
tensor once, in memory that is kept from one snapshot to the next. For tensors on a GPU that memory is pinned, and the
copy is queued on the stream that trains: it comes after what was queued before and before everything that the script
does next, so that no later change can reach it. Python does not wait for it; whoever reads the copy calls `wait`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bftrainer.elastic.portable import portable

_Like = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
"""What must be equal for memory to be used again: shape, strides, type, and whether it is pinned."""


class Copier:
    """Copies states, one after the other, into the same memory. The former copy must not be in use any more."""

    def __init__(self) -> None:
        self._kept: dict[_Like, list[torch.Tensor]] = {}

    def copy(self, state: Mapping[str, Any]) -> Copy:
        """A copy that later changes of `state` do not reach, or an InputError naming what could not be loaded again."""
        free, self._kept = self._kept, {}
        copies = _Copies(free)
        copied = portable(state, copies.of)
        self._kept = copies.used
        return Copy(copied, copies.delivered())


class Copy:
    """A copied state. Before `wait` has returned, tensors that come from a GPU may not be there yet."""

    def __init__(self, state: dict[str, Any], deliveries: list[_Delivery]) -> None:
        self.state = state
        self._deliveries = deliveries

    def wait(self) -> float:
        """Wait until all of it is there; gives the seconds that the GPUs stood still for it."""
        return max((delivery.wait() for delivery in self._deliveries), default=0.0)


class _Copies:
    """The tensors of one copy."""

    def __init__(self, free: dict[_Like, list[torch.Tensor]]) -> None:
        self.used: dict[_Like, list[torch.Tensor]] = {}
        self._free = free
        self._copied: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}
        self._deliveries: dict[torch.device, _Delivery] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor; tied weights, different tensors over the same memory, have one."""
        key: object = id(tensor)
        if tensor.layout is torch.strided:
            where = (tensor.device, tensor.data_ptr(), tensor.is_conj(), tensor.is_neg())
            key = (*where, tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._copied:
            # With the original: its address stays its own as long as it lives.
            self._copied[key] = tensor, self._copy_of(tensor)
        return self._copied[key][1]

    def delivered(self) -> list[_Delivery]:
        """What to wait for, now that all copies are on their way."""
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
    """The copies that are on their way from one GPU, on the stream that is current when this is made."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._begun: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._ended: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._stream.record_event(self._begun)

    def end(self) -> None:
        """All copies are queued."""
        self._stream.record_event(self._ended)

    def wait(self) -> float:
        """Wait until they are here; gives the seconds from the first to the last."""
        self._ended.synchronize()
        return float(self._begun.elapsed_time(self._ended)) / 1000.0


def _memory_for(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cuda:
        try:
            return torch.empty_like(tensor, device="cpu", pin_memory=True)
        except RuntimeError:  # a host that lets no more memory be pinned: the copy is slower, and as good
            pass
    return torch.empty_like(tensor, device="cpu")
