"""Buffers of trained modules: kept the same on all ranks, and restored when a step fails.

Running statistics of BatchNorm and similar layers are averaged over the ranks, and their counters are those of rank 0:
both are sent with the gradients. All other buffers (codebooks, queues, spectral norms) are copied from rank 0, as under
DistributedDataParallel, in the steps in which they change on any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bftrainer.elastic.torch.state.transfer import TransferGroup, bytes_of, send
from bftrainer.errors import InputError

_HALF = 1 << 20
"""Counters are sent in two halves below this number, which single precision holds exactly."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Location of a buffer. The module may put another tensor there at any time."""

    module: nn.Module
    name: str

    @property
    def value(self) -> Tensor | None:
        return self.module._buffers[self.name]


class Buffers:
    """The buffers of the modules that are trained."""

    def __init__(self) -> None:
        self._averaged: list[_Place] = []
        self._counters: list[_Place] = []
        self._others: list[_Place] = []
        self._committed: list[Tensor | None] = []

    def find(self, modules: Sequence[nn.Module], trained: Sequence[Tensor]) -> None:
        """Find the buffers of modules that have any of the `trained` parameters."""
        ids = {id(param) for param in trained}
        seen: set[tuple[int, str]] = set()
        for module in modules:
            if not any(id(param) in ids for param in module.parameters()):
                continue  # an averaged model, which the script updates in the same way on all ranks
            for part in module.modules():
                is_norm = isinstance(part, _NormBase) and part.track_running_stats
                for name, buffer in part._buffers.items():
                    if (id(part), name) not in seen:
                        seen.add((id(part), name))
                        self._sort(_Place(part, name), buffer, is_norm)

    def _sort(self, place: _Place, buffer: Tensor | None, is_norm: bool) -> None:
        if not is_norm or buffer is None:
            self._others.append(place)
        elif buffer.is_floating_point():
            self._averaged.append(place)
        else:
            self._counters.append(place)

    @property
    def size(self) -> int:
        """Number of values that are sent with the gradients."""
        return sum(_numel(place) for place in self._averaged) + 2 * sum(_numel(place) for place in self._counters)

    def __bool__(self) -> bool:
        return bool(self._averaged or self._counters or self._others)

    @property
    def committed(self) -> bool:
        """Whether `commit` was called."""
        return len(self._committed) == len(self._averaged) + len(self._counters) + len(self._others)

    def riders(self, share: float, rank: int, device: torch.device) -> Tensor:
        """Return this rank's contribution to the averages, weighted by `share`, and the counters if this is rank 0."""
        parts = [_tensor(place).reshape(-1).to(device, torch.float64) for place in self._averaged]
        averages = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=device)
        averages = averages.mul_(share) if share else torch.zeros_like(averages)
        counts = [_tensor(place).reshape(-1).to(device, torch.int64) for place in self._counters]
        if not counts:
            return averages
        count = torch.cat(counts)
        halves = torch.cat([count // _HALF, count % _HALF]).double()
        return torch.cat([averages, halves if rank == 0 else torch.zeros_like(halves)])

    def take(self, sums: Tensor) -> None:
        """Set the buffers from what `riders` returned, summed over all ranks."""
        begin = 0
        for place in self._averaged:
            end = begin + _numel(place)
            _tensor(place).copy_(sums[begin:end].view_as(_tensor(place)))
            begin = end
        total = sum(_numel(place) for place in self._counters)
        upper, lower = sums[begin : begin + total], sums[begin + total : begin + 2 * total]
        values, begin = (upper.round() * _HALF + lower.round()).long(), 0
        for place in self._counters:
            end = begin + _numel(place)
            _tensor(place).copy_(values[begin:end].view_as(_tensor(place)))
            begin = end

    def changed(self) -> Tensor | bool:
        """Return whether any of the other buffers has changed since `commit`. Does not wait for the device."""
        flags: list[Tensor] = []
        for place, before in zip(self._others, self._others_committed, strict=True):
            if _is_other_kind(place.value, before):
                return True
            if place.value is not None and before is not None:
                flags.append((place.value != before).any())
        if not flags:
            return False
        return torch.stack([flag.to(flags[0].device) for flag in flags]).any()

    def fetch(self, rank: int, link: TransferGroup, agree: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        """Get from rank 0 the other buffers that have changed on any rank. Return a function that puts them in place.

        `agree` sums over the ranks. Raises `GroupBroken` when a peer is lost, and an InputError if a buffer's shape
        differs from rank to rank.
        """
        rows = [
            [float(self._differs(n)), _bytes_in(place) if rank == 0 else 0.0] for n, place in enumerate(self._others)
        ]
        table = agree(torch.tensor(rows, dtype=torch.float64, device=link.wire)).tolist()
        link.check_whole()
        wanted = [place for place, (changed, _) in zip(self._others, table, strict=True) if changed]
        for place, (changed, size) in zip(self._others, table, strict=True):
            if changed and _bytes_in(place) != round(size):
                kind = type(place.module).__name__
                raise InputError(
                    f"the buffer {place.name!r} of {kind} has {round(_bytes_in(place))} bytes on rank {rank} and "
                    f"{round(size)} on rank 0; buffers that change shape cannot be kept the same on all ranks"
                )
        tensors = [place.value for place in wanted if place.value is not None]
        flat = torch.cat([bytes_of(tensor).to(link.wire) for tensor in tensors] or [torch.zeros(0, dtype=torch.uint8)])
        if flat.numel():
            send(flat, 0, link)
            link.check_whole()

        def put() -> None:
            pieces = torch.split(flat, [tensor.nbytes for tensor in tensors])
            for tensor, piece in zip(tensors, pieces, strict=True):
                _put_bytes(tensor, piece)

        return put if rank else lambda: None

    def commit(self, *, others: bool = True) -> None:
        """Remember the present buffers; the other buffers only if `others` is set."""
        places = [*self._averaged, *self._counters, *self._others]
        kept = len(self._averaged) + len(self._counters)
        if len(self._committed) != len(places):
            self._committed = [None] * len(places)
            others = True
        for number, place in enumerate(places if others else places[:kept]):
            value, before = place.value, self._committed[number]
            if value is not None and before is not None and not _is_other_kind(value, before):
                before.copy_(value)
            else:
                self._committed[number] = None if value is None else value.detach().clone()

    def take_back(self) -> None:
        """Restore the committed buffers after a step failed that had changed them."""
        places = [*self._averaged, *self._counters, *self._others]
        for place, before in zip(places, self._committed, strict=True):
            if _is_other_kind(place.value, before):
                place.module._buffers[place.name] = None if before is None else before.clone()
            elif place.value is not None and before is not None:
                place.value.copy_(before)

    @property
    def _others_committed(self) -> list[Tensor | None]:
        return self._committed[len(self._averaged) + len(self._counters) :]

    def _differs(self, number: int) -> bool:
        value, before = self._others[number].value, self._others_committed[number]
        if _is_other_kind(value, before):
            return True
        return value is not None and before is not None and not torch.equal(value, before)


def _tensor(place: _Place) -> Tensor:
    found = place.value
    assert found is not None
    return found


def _numel(place: _Place) -> int:
    return _tensor(place).numel()


def _bytes_in(place: _Place) -> float:
    return float(place.value.nbytes) if place.value is not None else -1.0


def _is_other_kind(value: Tensor | None, before: Tensor | None) -> bool:
    """Return whether one tensor cannot be copied into the other."""
    if value is None or before is None:
        return value is not before
    return value.shape != before.shape or value.dtype != before.dtype or value.device != before.device


def _put_bytes(tensor: Tensor, piece: Tensor) -> None:
    raw = bytes_of(tensor)
    raw.copy_(piece)
    if raw.data_ptr() != tensor.data_ptr():  # `raw` is a copy: the tensor is not contiguous
        tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))
