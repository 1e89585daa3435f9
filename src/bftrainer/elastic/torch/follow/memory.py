"""Memory of a flow: it gets its pages before training waits for it, and gives them back without making training wait.

The system gives a page when it is first written to, and takes its time to take pages back. Both take longer than
copying what is in them, so neither belongs into a step or a pause.

A GPU copies from and to pinned memory by itself, while the host goes on. Torch keeps pinned memory for its next use,
and a process that has much of it takes longer to end, for which the others wait when it is killed. So a flow has its
own, which goes back to the system.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bftrainer.elastic.torch.freed_memory import HEAP_BYTES

_MOST_FROM_HEAP = HEAP_BYTES - (1 << 16)
"""The C library takes larger blocks from the system one by one, and gives each back when it is freed."""


_SETTLED_S = 1.0
"""Seconds after which pinned memory is given back: by then the training has got over its change."""
_BETWEEN_S = 0.1
"""Seconds between one block of pinned memory and the next. While one is given back, the GPU gets no new work."""


class _Pinned(mmap.mmap):
    """A block of memory that is pinned as long as a tensor lies in it."""

    address: int | None = None
    gpu = 0

    def pin(self, address: int) -> None:
        """Pin the block, which begins at `address`, if the system lets it."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(address, len(self), 0)):
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # else CUDA blames the next operation of this thread
            return
        self.address, self.gpu = address, torch.cuda.current_device()

    def __del__(self) -> None:
        if self.address is not None:
            with torch.cuda.device(self.gpu):
                torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]


def make_room(size: int, *, pinned: bool) -> Tensor:
    """Return so many bytes of CPU memory, pinned if wanted and possible. That takes long: not for a training thread."""
    if pinned and size:
        with contextlib.suppress(RuntimeError, OSError):
            return _pinned_room(size)
    return torch.empty(size, dtype=torch.uint8)


def _pinned_room(size: int) -> Tensor:
    """Return pinned memory. The thread's current device must be the GPU that is trained on."""
    block = _Pinned(-1, size)
    with contextlib.suppress(OSError):
        block.madvise(mmap.MADV_HUGEPAGE)  # fewer pages, and less time to get and to pin them
    room = torch.frombuffer(block, dtype=torch.uint8).zero_()  # the GPU gets no new work while its driver gets pages
    block.pin(room.data_ptr())
    return room


def make_ready_room(size: int, *, pinned: bool) -> Tensor:
    """Return memory like `make_room` that has all of its pages."""
    room = make_room(size, pinned=pinned)
    return room if room.is_pinned() else room.zero_()


def make_heap_ready(sizes: Sequence[int]) -> Tensor | None:
    """Have pages ready for blocks of these sizes that the calling thread will allocate. Keep what is returned.

    A newcomer's first backward pass would wait for the pages of its gradients. The C library gives no memory back that
    lies below a block in use, so one more block is allocated after the others and kept.
    """
    small = [size for size in sizes if 0 < size < _MOST_FROM_HEAP]
    if not small:
        return None
    try:
        torch.empty(_MOST_FROM_HEAP, dtype=torch.uint8)  # is freed at once: from now on smaller blocks are on the heap
        blocks = [torch.empty(size, dtype=torch.uint8).zero_() for size in small]
        above = torch.empty(max(small) // 8 + 1, dtype=torch.float64)
    except RuntimeError:  # no memory left
        return None
    blocks.clear()
    return above


def drop(held: list[Any]) -> None:
    """Drop objects at low priority. Call it as the last thing that a thread does: the priority stays low."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    held.clear()


def give_back(rooms: list[Tensor]) -> None:
    """Give pinned memory back, a while later and block by block, in a thread of its own."""

    def slowly() -> None:
        time.sleep(_SETTLED_S)
        while rooms:
            rooms.pop()
            time.sleep(_BETWEEN_S)

    threading.Thread(target=slowly, name="bftrainer-follow-end", daemon=True).start()
