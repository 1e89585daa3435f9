"""Kernel of the `exact` allocator: its dynamic programme as plain loops, which numba compiles.

`plan` is ordinary Python; `compiled` is numba's version of it, where numba is installed (the extra `fast`). Importing
numba and loading the compiled code takes about half a second, so the allocator asks for it only in a process that takes
many decisions.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Kernel = Callable[[Floats, Counts, Counts, Counts, Floats, Floats, Floats, float, int, float], Counts]


def plan(
    rates: Floats,
    now: Counts,
    least: Counts,
    tops: Counts,
    down: Floats,
    up: Floats,
    grown_s: Floats,
    horizon_s: float,
    pool: int,
    tie: float,
) -> Counts:
    """The best count of each claim; among equally good counts the largest.

    Rates are by claim and count, costs of rescaling in value. Counts above the current one are worth their rate for
    `grown_s` seconds only. Staying at the current count adds `tie`.
    """
    claims, width = rates.shape
    gains = np.full((claims, width), -np.inf)
    best = np.full((claims + 1, pool + 1), -np.inf)
    best[claims, :] = 0.0
    for j in range(claims - 1, -1, -1):
        for n in range(tops[j] + 1):
            if 0 < n < least[j]:
                continue
            if n > now[j]:
                gain = grown_s[j] * rates[j, n] - up[j]
            elif n < now[j]:
                gain = horizon_s * rates[j, n] - down[j]
            else:
                gain = horizon_s * rates[j, n] + tie
            gains[j, n] = gain
            for budget in range(n, pool + 1):
                best[j, budget] = max(best[j, budget], gain + best[j + 1, budget - n])
    counts = np.zeros(claims, np.int64)
    left = pool
    for j in range(claims):
        enough = best[j, left] - tie / 4
        count = min(tops[j], left)
        while gains[j, count] + best[j + 1, left - count] < enough:
            count -= 1
        counts[j] = count
        left -= count
    return counts


@functools.cache
def compiled() -> Kernel | None:
    """`plan` as machine code, or None where numba is not installed."""
    try:
        numba: Any = importlib.import_module("numba")
    except ImportError:
        return None
    signature = "i8[::1](f8[:,::1], i8[::1], i8[::1], i8[::1], f8[::1], f8[::1], f8[::1], f8, i8, f8)"
    try:
        kernel: Kernel = numba.njit(signature, cache=True)(plan)
    except RuntimeError:  # no folder to cache the machine code in: compiled again in every process
        kernel = numba.njit(signature)(plan)
    return kernel
