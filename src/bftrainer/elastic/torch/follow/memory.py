"""Memory of a flow: it gets its pages before training waits for it, and gives them back without making training wait.

The system gives a page when it is first written to, and takes its time to take pages back. Both take longer than
copying what is in them, so neither belongs into a step or a pause.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from bftrainer.elastic.torch.freed_memory import HEAP_BYTES

_MOST_FROM_HEAP = HEAP_BYTES - (1 << 16)
"""The C library takes larger blocks from the system one by one, and gives each back when it is freed."""


def make_room(size: int, *, pinned: bool) -> Tensor:
    """Return so many bytes of CPU memory; pinned if copies come from a GPU and the host has such memory left."""
    if pinned:
        with contextlib.suppress(RuntimeError):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return torch.empty(size, dtype=torch.uint8)


def make_ready_room(size: int, *, pinned: bool) -> Tensor:
    """Return memory like `make_room`, all of which was written to."""
    return make_room(size, pinned=pinned).zero_()


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


def drop(held: list[object]) -> None:
    """Drop objects at low priority. Call it as the last thing that a thread does: the priority stays low."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    held.clear()
