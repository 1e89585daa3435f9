"""Waiting for a condition with a deadline, from a thread (`wait_until`) and from a coroutine (`until`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

TIMEOUT_S = 60.0
SHORTEST_S, LONGEST_S = 0.002, 0.2
SHARE = 0.05
"""How long the next pause is, as a share of the time waited so far. Looks cost time of a busy machine: some of them ask
a controller or Slurm. So a long wait has few looks, and ends at most this share later than it could."""


def wait_until(
    condition: Callable[[], Any], what: object = "it", timeout_s: float = TIMEOUT_S, longest_s: float = LONGEST_S
) -> Any:
    """Wait until a condition holds; its value then. A function as `what` is called when the time is over.

    `longest_s` is the longest pause between two looks, for conditions that cost something to look at.
    """
    for pause_s in _pauses(what, timeout_s, longest_s):
        if value := condition():
            return value
        time.sleep(pause_s)
    raise AssertionError("unreachable")


async def until(condition: Callable[[], Any], what: object = "it", timeout_s: float = TIMEOUT_S) -> Any:
    """Wait as `wait_until` does, while other coroutines go on."""
    for pause_s in _pauses(what, timeout_s):
        if value := condition():
            return value
        await asyncio.sleep(pause_s)
    raise AssertionError("unreachable")


def _pauses(what: object, timeout_s: float, longest_s: float = LONGEST_S) -> Iterator[float]:
    """How long to sleep between two looks: little at first. Ends with an error after one look past the deadline."""
    began = time.monotonic()
    while True:
        waited_s = time.monotonic() - began
        yield min(max(SHORTEST_S, SHARE * waited_s), longest_s)
        if waited_s > timeout_s:
            raise TimeoutError(f"{what() if callable(what) else what} did not happen within {timeout_s:g} s")
