"""Flat layout: the bytes of several tensors in one range, cut into shares, and a checksum of each share.

Donors fill their share of the range and newcomers read it, so both compute the same layout from the same shapes. Every
tensor and every share begins at a multiple of 64 bytes. The checksum finds out whether two ranks have the same bytes.
It is a sum of integers, so it does not depend on the device or on the order in which it is computed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bftrainer.elastic.torch.state.transfer import bytes_of

ALIGNMENT = 64
_BLOCK = 64
"""Words per block of a checksum. Blocks are weighted by their position; words within a block are not."""
_SMALL_BYTES = 1 << 16
"""In tensors up to this size each word is weighted by its position."""
_JOINED_BYTES = 256 << 20
"""Bytes of a GPU that are summed up together."""
_MOST_WEIGHTS = 1 << 17
_MULTIPLIER = 0x5851F42D4C957F2D


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and type of a tensor in a flat range."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """Return the shape and type of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Number of bytes of such a tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """The part of one tensor that lies in a share: its bytes from `first` to `last`, `begin` bytes after the start."""

    number: int
    first: int
    last: int
    begin: int


class FlatLayout:
    """Places of tensors in one range of bytes."""

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.specs = tuple(specs)
        self.offsets: list[int] = []
        end = 0
        for spec in self.specs:
            self.offsets.append(end)
            end += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        self.size = end

    def share(self, number: int, count: int) -> tuple[int, int]:
        """Return begin and end of one of `count` shares of about the same size."""
        units = self.size // ALIGNMENT
        return units * number // count * ALIGNMENT, units * (number + 1) // count * ALIGNMENT

    def pieces(self, begin: int, end: int) -> Iterator[TensorPiece]:
        """Yield the parts of tensors between two places, in order."""
        for number, (offset, spec) in enumerate(zip(self.offsets, self.specs, strict=True)):
            first, last = max(begin - offset, 0), min(end - offset, spec.nbytes)
            if first < last:
                yield TensorPiece(number, first, last, offset + first - begin)

    def copy(self, tensors: Sequence[Tensor], begin: int, end: int, room: Tensor) -> None:
        """Copy one share of the tensors into `room`; from a GPU the copies are queued on the current stream."""
        for piece in self.pieces(begin, end):
            raw = bytes_of(tensors[piece.number])[piece.first : piece.last]
            room[piece.begin : piece.begin + raw.numel()].copy_(raw, non_blocking=room.is_pinned())

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors that lie in a flat range, without copying them."""
        return [
            flat[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)
            for offset, spec in zip(self.offsets, self.specs, strict=True)
        ]

    def checksum(self, tensors: Sequence[Tensor], begin: int, end: int) -> str:
        """Return a text that is the same for tensors of the same layout with the same bytes between two places."""
        parts = [bytes_of(tensors[piece.number])[piece.first : piece.last] for piece in self.pieces(begin, end)]
        places = [(spec.shape, spec.dtype) for spec in self.specs]
        found: list[int] = []
        for device in sorted({part.device for part in parts}, key=str):
            here = [part for part in parts if part.device == device]
            small = [part for part in here if part.numel() <= _SMALL_BYTES]
            large = [part for part in here if part.numel() > _SMALL_BYTES]
            sums = [_sum_of(torch.cat(small))] if small else []
            sums += [_sum_of(part) for part in (large if device.type == "cpu" else _joined(large))]
            found += torch.stack(sums).tolist()
        return hashlib.sha256(repr((places, found)).encode()).hexdigest()


def _joined(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield parts one after the other in few large tensors: a GPU takes longer to be told of many than to copy them."""
    group: list[Tensor] = []
    size = 0
    for part in parts:
        if group and size + part.numel() > _JOINED_BYTES:
            yield _one(group)
            group, size = [], 0
        group.append(part)
        size += part.numel()
    if group:
        yield _one(group)


def _one(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)  # a copy of a large one may not fit on the GPU


def _sum_of(raw: Tensor) -> Tensor:
    """Return a weighted sum of bytes, as a tensor on their device. Integer overflow wraps around."""
    whole = raw.numel() // 8 * 8
    tail = torch.zeros(8, dtype=torch.uint8, device=raw.device)
    tail[: raw.numel() - whole] = raw[whole:]
    words = _words(raw[:whole])
    if raw.numel() <= _SMALL_BYTES:
        return _weighted(torch.cat([words, _words(tail)]))
    blocks = words.numel() // _BLOCK
    total = _weighted(torch.cat([words[blocks * _BLOCK :], _words(tail)]))
    for run in torch.split(words[: blocks * _BLOCK].view(blocks, _BLOCK), _MOST_WEIGHTS):
        total = total * _MULTIPLIER + _weighted(run.sum(1))
    return total


def _words(raw: Tensor) -> Tensor:
    """Return bytes as 64-bit integers; a copy of them if they lie at an odd place in memory."""
    if raw.storage_offset() % 8:
        raw = raw.clone()
    return raw.view(torch.int64)


def _weighted(values: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    weights = _weights(values.device)
    for run in torch.split(values, _MOST_WEIGHTS):
        total = total * _MULTIPLIER + (run * weights[: run.numel()]).sum()
    return total


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Return odd numbers without a pattern. Odd ones, so that each change of a value changes its product."""
    numbers = torch.arange(1, _MOST_WEIGHTS + 1, dtype=torch.int64, device=device) * _MULTIPLIER
    return (numbers ^ (numbers >> 29)) * 2 + 1
