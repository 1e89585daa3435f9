"""Batch plan: decides which samples each training step takes, so that each is used once per epoch.

An epoch visits the dataset in the order of a permutation. The cursor counts the committed samples of the epoch. A step
takes the next global batch from there, each rank a contiguous part of it. The plan is a pure function of (epoch,
cursor, rank, world), so the number of ranks may change between any two steps. `loader.py` fetches the planned samples;
the training loop moves the cursor when a step is committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from numbers import Integral

import numpy as np
import numpy.typing as npt

from bftrainer.elastic.torch.data.fingerprint import SAME, Fingerprint
from bftrainer.elastic.torch.data.sampler_order import SampleOrder
from bftrainer.errors import InputError


@dataclass(frozen=True, slots=True)
class Micro:
    """Samples of one forward and backward pass of one rank."""

    indices: tuple[int, ...]
    """Indices into the dataset."""
    weight: float
    """Weight of this micro-batch's mean gradient in the mean gradient of the step; 0 for a stand-in."""
    samples: int
    """Number of samples that count: all of `indices`, or 0 for a stand-in, which a rank without a share works on."""


@dataclass(frozen=True, slots=True)
class Step:
    """One rank's part of one training step."""

    start: int
    """The cursor before the step."""
    stop: int
    """The cursor after the step is committed."""
    micros: tuple[Micro, ...]
    """Micro-batches, at least one. Ranks may have different numbers of them."""


@dataclass(frozen=True, slots=True)
class DataSignature:
    """All settings that the order of samples depends on. They must be the same on all ranks.

    `str()` describes the data.

    `max_batch` is not included: each rank may split its share as its memory demands.
    """

    length: int
    batch_size: int
    """Samples per rank; 0 if the global batch is fixed."""
    global_batch: int
    shuffle: bool
    drop_last: bool
    seed: int
    samples: Fingerprint | None = None
    """Fingerprint of the samples. None in snapshots of older versions."""

    def numbers(self) -> tuple[int, ...]:
        """Return integers of at most 63 bits that ranks can exchange."""
        flags = (int(self.shuffle), int(self.drop_last))
        samples = () if self.samples is None else astuple(self.samples)
        return (self.length, self.batch_size, self.global_batch, *flags, self.seed % (1 << 63), *samples)

    @classmethod
    def of(cls, numbers: Sequence[int]) -> DataSignature:
        """Return the signature for which `numbers` returned these numbers on another rank."""
        length, batch_size, global_batch, shuffle, drop_last, seed, *samples = numbers
        found = Fingerprint(*samples) if samples else None
        return cls(length, batch_size, global_batch, bool(shuffle), bool(drop_last), seed, found)

    @property
    def settings(self) -> DataSignature:
        """The same without the fingerprint of the samples."""
        return replace(self, samples=None)

    def agrees_with(self, other: DataSignature) -> bool:
        """Return whether two ranks may train together. Samples of which one of them knows nothing are not compared."""
        if self.settings.numbers() != other.settings.numbers():
            return False
        return self.samples is None or other.samples is None or self.samples.agrees_with(other.samples)

    def __str__(self) -> str:
        size = f"batch_size {self.batch_size}" if self.batch_size else f"global_batch {self.global_batch}"
        order = f"shuffled with seed {self.seed}" if self.shuffle else "not shuffled"
        return f"{self.length} samples, {size}, {order}{', drop_last' if self.drop_last else ''}"


def refuse_different_data(signatures: Sequence[DataSignature]) -> None:
    """Raise an InputError if two ranks have different signatures, which names both.

    `signatures` are in order of ranks.
    """
    first = signatures[0]
    for rank, other in enumerate(signatures):
        if other.agrees_with(first):
            continue
        if other.settings.numbers() == first.settings.numbers():
            raise InputError(
                f"the ranks train on different data: rank 0 and rank {rank} have {first.length} samples each, but not "
                "the same ones. Random numbers that split or make the data must be the same on all nodes: call "
                "torch.manual_seed(0) (or np.random.seed(0), random.seed(0)) before, or give "
                "generator=torch.Generator().manual_seed(0) to random_split(). Sort lists of files. If the samples are "
                f"the same, and only what the dataset holds in memory differs, say so: dataset.{SAME} = True"
            )
        raise InputError(
            f"the ranks train on different data: rank 0 has {first}; rank {rank} has {other}. Dataset, batch size, "
            "sampler and seed must be the same on all nodes. Does every node see the same files? Is a sampler that "
            "draws at random seeded?"
        )


class BatchPlan:
    """Splits every epoch into steps, and every step over the ranks."""

    def __init__(
        self,
        length: int,
        *,
        batch_size: int | None = None,
        global_batch: int | None = None,
        max_batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        order: SampleOrder | None = None,
        samples: Fingerprint | None = None,
    ) -> None:
        """`length` is the length of the dataset. Give either `batch_size` or `global_batch`. With `order`, the order
        of samples is that of the script's own sampler, and `length` the number that it draws. `samples` is the
        fingerprint of the dataset.

        `batch_size` is per rank, so the global batch grows with the world. `global_batch` stays the same. `max_batch`
        is the largest number of samples of one forward and backward pass; a larger share is split.
        """
        if (batch_size is None) == (global_batch is None):
            got = "neither" if batch_size is None else "both"
            raise InputError(f"one of `batch_size` and `global_batch` must be given, but got {got}")
        self.length = whole_number("length", length, 1)
        self.batch_size = None if batch_size is None else whole_number("batch_size", batch_size, 1)
        self.global_batch = None if global_batch is None else whole_number("global_batch", global_batch, 1)
        self.max_batch = None if max_batch is None else whole_number("max_batch", max_batch, 1)
        self.seed = whole_number("seed", seed, 0)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.own_order = order
        """The order of the script's own sampler, if it has one."""
        self._samples = samples
        smallest = self.global_batch_size(1)
        if drop_last and smallest > self.length:
            name = "batch_size" if global_batch is None else "global_batch"
            raise InputError(
                f"`{name}` must be at most the {self.length} samples of the dataset when `drop_last` is set, "
                f"but got {smallest}"
            )
        self._last: tuple[int, npt.NDArray[np.int64]] | None = None

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the dataset's indices in the order of the epoch, read-only. The last order requested is kept."""
        if self._last is not None and self._last[0] == epoch:
            return self._last[1]
        epoch = whole_number("epoch", epoch, 0)
        if self.own_order is not None:
            order = self.own_order(epoch)
        elif self.shuffle:
            # Written out, because `default_rng` may use another generator in a later numpy.
            random = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, epoch))))
            order = random.permutation(self.length).astype(np.int64, copy=False)
        else:
            order = np.arange(self.length, dtype=np.int64)
        order.flags.writeable = False
        self._last = (epoch, order)
        return order

    def forget_order(self) -> None:
        """Ask for the order again, because a script may have given its sampler another epoch."""
        self._last = None

    @property
    def signature(self) -> DataSignature:
        """Settings that must be the same on all ranks."""
        sizes = self.batch_size or 0, self.global_batch or 0
        seed = self.seed if self.shuffle else 0  # without shuffling, any seed gives the same order
        seed = seed if self.own_order is None else self.own_order.digest
        return DataSignature(self.length, *sizes, self.shuffle, self.drop_last, seed, self._samples)

    def global_batch_size(self, world: int) -> int:
        """Return the samples of a full step on `world` ranks."""
        if self.batch_size is not None:
            return self.batch_size * world
        assert self.global_batch is not None
        return self.global_batch

    def samples_in_epoch(self, world: int) -> int:
        """Return the samples of an epoch that is trained on `world` ranks from beginning to end."""
        full = self.global_batch_size(world)
        # An epoch that is smaller than a batch is trained as a whole even with `drop_last`, see `step_at`.
        return (self.length // full * full or self.length) if self.drop_last else self.length

    def steps_in_epoch(self, world: int) -> int:
        """Return the steps of such an epoch."""
        return -(-self.samples_in_epoch(world) // self.global_batch_size(world))

    def batches_in_epoch(self, rank: int, world: int) -> int:
        """Return the micro-batches that `rank` gets in such an epoch."""
        full_steps, rest = divmod(self.samples_in_epoch(world), self.global_batch_size(world))
        batches = full_steps * self._micros(_part(self.global_batch_size(world), rank, world)[1])
        return batches + (self._micros(_part(rest, rank, world)[1]) if rest else 0)

    def batches_from(self, cursor: int, rank: int, world: int) -> int:
        """Return the micro-batches that `rank` gets from `cursor` to the end of the epoch, if the world stays."""
        full = self.global_batch_size(world)
        steps, rest = divmod(self.length - cursor, full)
        batches = steps * self._micros(_part(full, rank, world)[1])
        taken = rest and (not self.drop_last or (cursor == 0 and steps == 0))
        return batches + (self._micros(_part(rest, rank, world)[1]) if taken else 0)

    def _micros(self, share: int) -> int:
        """Return the number of micro-batches that a share is split into; a rank without a share gets a stand-in."""
        return 1 if self.max_batch is None or share == 0 else -(-share // self.max_batch)

    def step_at(self, epoch: int, cursor: int, rank: int, world: int) -> Step | None:
        """Return the part of `rank` of `world` in the step that starts at `cursor`; None when the epoch is over."""
        if world < 1 or not 0 <= rank < world:
            raise InputError(f"`rank` must be from 0 to below `world`, but got rank {rank} of {world}")
        if not 0 <= cursor <= self.length:
            raise InputError(f"`cursor` must be from 0 to {self.length}, the dataset's length, but got {cursor}")
        if self.is_over(cursor, world):
            return None
        total = min(self.global_batch_size(world), self.length - cursor)
        order = self.order(epoch)
        begin, share = _part(total, rank, world)
        if share == 0:
            stand_in = Micro((int(order[cursor]),), 0.0, 0)
            return Step(cursor, cursor + total, (stand_in,))
        begin += cursor
        count = self._micros(share)
        indices = order[begin : begin + share].tolist()
        if count == 1:
            micros: tuple[Micro, ...] = (Micro(tuple(indices), share / total, share),)
        else:
            parts = (_part(share, number, count) for number in range(count))
            micros = tuple(Micro(tuple(indices[first : first + n]), n / total, n) for first, n in parts)
        return Step(cursor, cursor + total, micros)

    def is_over(self, cursor: int, world: int) -> bool:
        """Return whether an epoch has no step at `cursor` any more."""
        full = self.global_batch_size(world)
        total = min(full, self.length - cursor)
        # A short batch that is the whole epoch is taken anyway: on a world that grew beyond the dataset all epochs
        # would be empty, and training would never advance.
        return total == 0 or (self.drop_last and total < full and cursor > 0)

    def steps_from(self, epoch: int, cursor: int, rank: int, world: int) -> Iterator[Step]:
        """Yield the remaining steps of the epoch, assuming that the world stays the same."""
        while (step := self.step_at(epoch, cursor, rank, world)) is not None:
            yield step
            cursor = step.stop


def _part(total: int, number: int, parts: int) -> tuple[int, int]:
    """Return start and length of part `number` when `total` is cut as evenly as possible, longer parts first."""
    size, longer = divmod(total, parts)
    return number * size + min(number, longer), size + (number < longer)


def whole_number(name: str, value: object, least: int) -> int:
    """Return `value`, which must be a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise InputError(f"`{name}` must be a whole number, {least} or more, but got {value!r}")
    return int(value)
