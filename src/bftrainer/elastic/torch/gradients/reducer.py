"""Gradient reducer: sums gradients over all ranks in buckets, while the backward pass still runs.

The last gradients of a backward pass are those of the first layers. Buckets are filled in that order; each but the last
is sent as soon as it is full. The last bucket is sent in `finish`, together with the *riders*: numbers that every rank
adds to and needs at every step (knowledge of a new generation, samples, the loss, BatchNorm's statistics). So agreeing
on the step at which to rescale costs no extra message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bftrainer.elastic.torch.gradients.riders import numbers_on
from bftrainer.elastic.torch.group import nccl
from bftrainer.elastic.torch.group.group import GroupBroken, breaking
from bftrainer.errors import InputError

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
NO_GRADIENT = (
    "run.step() found no gradient: call loss.backward() before it, for each batch. Does the loss depend on the "
    "parameters of the registered optimizers?"
)
_OWN = 2
"""Number of the reducer's own riders: parameters without a gradient, and buckets whose gradient came late."""


@dataclass(slots=True)
class _Bucket:
    params: list[Tensor] = field(default_factory=list)
    flat: Tensor | None = None
    views: list[Tensor] = field(default_factory=list)
    riders: Tensor | None = None
    missing: int = 0  # params whose gradient has not come yet
    work: dist.Work | None = None
    late: bool = False  # another gradient came after the bucket was sent


class Reducer:
    """Weighted sums of gradients over the ranks of the present group.

    `riders` numbers are sent along. The gradient of each rank is first multiplied by `weight`. If the weights are
    shares of the global batch, the sum is the gradient of its mean loss, however unevenly the batch is split. Without
    `eager` nothing is sent before `finish`.
    """

    def __init__(self, params: Sequence[Tensor], riders: int, *, eager: bool = True) -> None:
        self.weight = 1.0
        self.active = False
        """Whether gradients of the running backward pass are sent. They are not while they are accumulated."""
        self.alone = True
        """Whether there is no other rank."""
        self.check: Callable[[], None] = lambda: None
        """Raises `GroupBroken` if the received sums must not be used."""
        self.wait: Callable[[dist.Work], object] = lambda work: work.wait()
        """Waits for an operation; a lost peer ends the wait."""
        self._error: Exception | None = None
        self._sent = 0
        self._eager = eager  # whether full buckets are sent during the backward pass
        self._buckets = _buckets(params)
        self.params = [param for bucket in self._buckets for param in bucket.params]
        """Parameters whose gradients are summed."""
        self.arrived = 0
        """Number of gradients that arrived since `forget_passes`."""
        self._rider_count = riders + _OWN
        self._room = 0  # for what is sent after the riders
        self._own_zeros: Tensor | None = None  # the reducer's own riders in most steps
        self._own_riders: Tensor | None = None
        self._all_used = [1.0] * len(self.params)
        self._allocate(self._buckets)
        self._arrivals: dict[int, _Arrival] = {}
        for bucket in self._buckets if eager else ():
            for param in bucket.params:
                is_early = bucket is not self._buckets[-1]
                self._arrivals[id(param)] = _Arrival(self, bucket, is_early=is_early)
        self._handles: list[Any] = []
        self.sees_arrivals(True)
        self._begin()

    def sees_arrivals(self, sees: bool) -> None:
        """Say whether gradients are seen when they arrive. A rank that trains alone can do without."""
        if sees == bool(self._handles):
            return
        if sees:
            self._handles = [
                param.register_post_accumulate_grad_hook(self._arrivals[id(param)])  # type: ignore[no-untyped-call]
                for param in self.params
                if id(param) in self._arrivals
            ]
        else:
            self.close()

    def pin_ahead(self) -> None:
        """Have the memory pinned through which gloo sends the buckets of a GPU: else the first step waits for it."""
        flats = [bucket.flat for bucket in self._buckets if bucket.flat is not None and bucket.flat.is_cuda]
        with contextlib.suppress(RuntimeError):
            held = [torch.empty_like(flat, device="cpu", pin_memory=True) for flat in flats]
            del held  # torch keeps it for its next use

    def passes(self, params: Sequence[Tensor]) -> int:
        """Return the largest number of backward passes since `forget_passes` that reached one of these parameters."""
        if not self.arrived:
            return 0
        counts = (self._arrivals[id(param)].count for param in params if id(param) in self._arrivals)
        return max(counts, default=0)

    def forget_passes(self) -> None:
        """Reset the count of backward passes, because a new batch begins."""
        if self.arrived:
            self.arrived = 0
            for arrival in self._arrivals.values():
                arrival.count, arrival.grad = 0, None

    def is_changed(self) -> bool:
        """Return whether a gradient differs from what the backward pass produced."""
        for param in self.params:
            arrival = self._arrivals.get(id(param))
            if arrival is None or arrival.grad is None:
                continue
            if param.grad is not arrival.grad or param.grad._version != arrival.version:
                return True
        return False

    def accumulated(self) -> list[tuple[Tensor, Tensor, int]]:
        """Return the parameters that have a gradient, each with its gradient and the gradient's version."""
        return [(param, param.grad, param.grad._version) for param in self.params if param.grad is not None]

    def has_lost(self, accumulated: Sequence[tuple[Tensor, Tensor, int]]) -> bool:
        """Return whether any of those gradients was cleared or replaced instead of being added to."""
        for param, grad, version in accumulated:
            arrival = self._arrivals.get(id(param))
            count = arrival.count if arrival is not None else 0
            if param.grad is not grad or param.grad._version != version + count:
                return True
        return False

    def complete(self) -> None:
        """Complete a sum that the backward pass may have begun, and discard it. All ranks do so."""
        self.active = False
        if not self.alone:
            self._exchange(torch.zeros(self._rider_count + self._room, dtype=torch.float64, device=self._device))
            self._begin()

    def finish(self, riders: Tensor, along: Tensor | None = None) -> Tensor:
        """Send the remaining buckets, wait for all, put the sums into the gradients and return the sums of the riders.

        `along` are numbers in double precision, each of which is 0 on all ranks but one. It gets those of all ranks,
        to the last bit. Raises `GroupBroken`; then no gradient has been changed.
        """
        self.active = False
        if self._error is not None:
            error, self._error = self._error, None
            raise GroupBroken(str(error)) from error
        if self.alone:
            if all(param.grad is None for param in self.params):
                raise InputError(NO_GRADIENT)
            if self.weight != 1.0:
                self.rescale(self.weight)
            return riders
        params = self.params
        unused = len([param for param in params if param.grad is None])
        late = len([bucket for bucket in self._buckets if bucket.late])
        own = self._own(riders, unused, late)
        pieces = [] if along is None else [_in_pieces(along).to(riders)]
        self._make_room(sum(piece.numel() for piece in pieces))
        sent = torch.cat([riders, own, *pieces])
        sums = self._exchange(sent)
        any_unused, any_late = sums[self._rider_count - _OWN : self._rider_count].tolist()
        self.check()
        if any_late:
            # On some rank a second backward pass came after buckets were sent: all ranks send again, and none early.
            self._eager = False
            self._begin()
            self._exchange(sent)
        # Optimizers treat a zero gradient and no gradient differently, so all ranks must agree on which it is.
        used: Sequence[float] = self._all_used
        if any_unused:
            here = [0.0 if param.grad is None else 1.0 for param in params]
            used = self.agree(riders.new_tensor(here)).tolist()
            self.check()
            if not any(used):
                raise InputError(NO_GRADIENT)
        for param, view, somewhere in zip(params, self._views, used, strict=True):
            param.grad = view if somewhere else None
        if along is not None:
            along.copy_(_from_pieces(sums[self._rider_count :]))
        self._begin()
        return sums[: self._rider_count - _OWN]

    def _own(self, riders: Tensor, unused: int, late: int) -> Tensor:
        """Return the reducer's own riders as a tensor like `riders`."""
        if unused or late:
            return numbers_on(riders.device, [float(unused), float(late)]).to(riders.dtype)
        if self._own_zeros is None or self._own_zeros.device != riders.device:
            self._own_zeros = riders.new_zeros(_OWN)
        return self._own_zeros

    def rescale(self, factor: float) -> None:
        """Multiply the present gradients by `factor`."""
        grads = [param.grad for bucket in self._buckets for param in bucket.params if param.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

    def agree(self, values: Tensor) -> Tensor:
        """Return the sum of a few values over the ranks, outside of a step."""
        if not self.alone:
            with breaking():
                self.wait(self._send(values))
        return values

    def abandon(self) -> None:
        """Drop the present step and all gradients: its group is broken."""
        for bucket in self._buckets:
            work, bucket.work = bucket.work, None
            if work is not None:
                try:
                    self.wait(work)
                except RuntimeError:
                    continue  # expected: the group is broken
        self._error = None
        for bucket in self._buckets:
            for param in bucket.params:
                param.grad = None
        self._begin()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def _device(self) -> torch.device:
        return self._buckets[-1].params[0].device if self._buckets else torch.device("cpu")

    def _begin(self) -> None:
        self._sent = 0
        for bucket in self._buckets:
            bucket.missing, bucket.work, bucket.late = len(bucket.params), None, False

    def _exchange(self, riders: Tensor) -> Tensor:
        last = self._buckets[-1] if self._buckets else None
        carried = last is not None and last.riders is not None
        target = last.riders if last is not None and last.riders is not None else self._own_riders
        assert target is not None
        for bucket in self._buckets:
            if bucket.work is None:
                self._fill(bucket)
        target.copy_(riders)
        with breaking():  # communication only: an error of the script must not look like a lost peer
            for bucket in self._buckets:
                if bucket.work is None:
                    bucket.work = self._send(bucket.flat)
            own_work = None if carried else self._send(target)
            for bucket in self._buckets:
                assert bucket.work is not None
                self.wait(bucket.work)
            if own_work is not None:
                self.wait(own_work)
        return target.to(riders.dtype)

    def _arrived(self, bucket: _Bucket) -> None:
        """Count a gradient that is complete for the running backward pass, and send the buckets that are full."""
        bucket.missing -= 1
        if bucket.work is not None:
            bucket.late = True
            return
        # Send in the order of buckets, not in the order in which they fill: ranks may use different layers.
        while self._eager and self._sent < len(self._buckets) - 1 and self._error is None:
            following = self._buckets[self._sent]
            if following.missing > 0:
                break
            self._sent += 1
            self._fill(following)
            try:
                following.work = self._send(following.flat)
            except RuntimeError as problem:  # raised in `finish`, not in the middle of the user's backward pass
                self._error = problem

    def _fill(self, bucket: _Bucket) -> None:
        if self.weight == 0.0:  # a stand-in's gradient counts for nothing, even if it is not a number
            torch._foreach_zero_(bucket.views)
            return
        grads = [param.grad for param in bucket.params if param.grad is not None]
        if [grad for grad in grads if grad.layout is not torch.strided]:
            raise InputError("gradients must be dense, but got a sparse one; use Embedding(…, sparse=False)")
        if len(grads) == len(bucket.params):
            torch._foreach_copy_(bucket.views, grads)
        else:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param.grad is None:
                    view.zero_()
                else:
                    view.copy_(param.grad)
        if self.weight != 1.0:
            torch._foreach_mul_(bucket.views, self.weight)

    def _send(self, flat: Tensor | None) -> dist.Work:
        with nccl.issuing:
            work: dist.Work = dist.all_reduce(flat, async_op=True)
        return work

    def _make_room(self, numbers: int) -> None:
        """Have so many numbers sent after the riders. The last bucket, which has them, is not sent yet."""
        if numbers != self._room:
            self._room = numbers
            self._allocate(self._buckets[-1:])

    def _allocate(self, buckets: Sequence[_Bucket]) -> None:
        last = self._buckets[-1] if self._buckets else None
        for bucket in buckets:
            first = bucket.params[0]
            sizes = [param.numel() for param in bucket.params]
            carries = bucket is last and first.dtype in (torch.float32, torch.float64)
            extra = self._rider_count + self._room if carries else 0
            # Written to now: the system would give pages of `torch.zeros` one by one in the first step of a newcomer.
            bucket.flat = torch.empty(sum(sizes) + extra, dtype=first.dtype, device=first.device).zero_()
            pieces = torch.split(bucket.flat, [*sizes, extra] if extra else sizes)
            if extra:
                bucket.riders = pieces[-1]
            bucket.views = [
                _like(piece, param) for piece, param in zip(pieces[: len(sizes)], bucket.params, strict=True)
            ]
        if last is None or last.riders is None:
            self._own_riders = torch.zeros(self._rider_count + self._room, dtype=torch.float64, device=self._device)
        self._views = [view for bucket in self._buckets for view in bucket.views]


class _Arrival:
    """Hook of one parameter: tells the reducer that a gradient has arrived in its bucket."""

    __slots__ = ("bucket", "count", "grad", "is_early", "reducer", "version")

    def __init__(self, reducer: Reducer, bucket: _Bucket, *, is_early: bool) -> None:
        self.reducer, self.bucket, self.count = reducer, bucket, 0
        self.is_early = is_early
        """Whether the bucket may be sent during the backward pass: all but the last one, which has the riders."""
        self.grad: Tensor | None = None
        self.version = 0

    def __call__(self, param: Tensor) -> None:
        reducer, grad = self.reducer, param.grad
        self.count += 1
        self.grad = grad
        self.version = grad._version if grad is not None else 0
        reducer.arrived += 1
        if reducer.active and self.is_early and not reducer.alone:
            reducer._arrived(self.bucket)


def _buckets(params: Sequence[Tensor]) -> list[_Bucket]:
    """Group parameters into buckets, from the last to the first.

    A new bucket begins when the kind changes or it is full.
    """
    buckets: list[_Bucket] = []
    size = 0
    for param in reversed(params):
        bytes_ = param.numel() * param.element_size()
        full = size >= (FIRST_BUCKET_BYTES if len(buckets) == 1 else BUCKET_BYTES)
        kind = (param.dtype, param.device)
        if not buckets or full or kind != (buckets[-1].params[0].dtype, buckets[-1].params[0].device):
            buckets.append(_Bucket())
            size = 0
        buckets[-1].params.append(param)
        size += bytes_
    return buckets


def _in_pieces(numbers: Tensor) -> Tensor:
    """Return numbers in double precision as four times as many small integers, which any precision can hold."""
    return numbers.view(torch.int16)


def _from_pieces(pieces: Tensor) -> Tensor:
    """Return the numbers that `_in_pieces` took apart."""
    return pieces.to(torch.int16).view(torch.float64)


def _like(piece: Tensor, param: Tensor) -> Tensor:
    """Return a piece of a flat buffer with a parameter's shape and memory order, which its gradient has too."""
    if not param.is_contiguous() and torch.empty_like(param).stride() == param.stride():  # channels last, transposed
        return piece.as_strided(param.size(), param.stride(), piece.storage_offset())
    return piece.view(param.size())
