"""Freed memory: has the C library of a worker keep the memory that a step frees for the next step.

On a CPU most memory of a step is freed in its backward pass. glibc gives it back to the system as soon as a few
megabytes are free at the end of the heap, and the next step gets the same pages anew, which the system clears one by
one. How often that happens depends on the order of all allocations before, so two workers of one job may differ.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from contextlib import suppress

KEPT_BYTES = 256 << 20
"""Memory that may be free at the end of the heap."""
HEAP_BYTES = 32 << 20
"""Largest block in the heap, the most that glibc accepts. It gives larger blocks back when they are freed."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of the two settings, from malloc.h."""
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Variables by which a user may have chosen other settings."""


def keep_freed_memory(
    environment: Mapping[str, str] = os.environ, set_option: Callable[[int, int], int] | None = None
) -> bool:
    """Have this process keep freed memory. Return False where the user has chosen, or the C library is not glibc."""
    if any(name in environment for name in _VARIABLES):
        return False
    if set_option is None:
        with suppress(AttributeError, OSError):  # another C library
            set_option = ctypes.CDLL(None).mallopt
    if set_option is None:
        return False
    return bool(set_option(_MMAP_THRESHOLD, HEAP_BYTES) and set_option(_TRIM_THRESHOLD, KEPT_BYTES))
