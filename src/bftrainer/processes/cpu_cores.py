"""CPU cores of this machine: reads lists such as `0-3,8`, and orders the usable cores by what they share.

`gpu_queries.py` reads the lists of cores near a GPU with it. Agents and the coordinator pass `node_cores` on to
`rank_places.py`, which splits the cores among the ranks of a node.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

MOST_NUMBERS = 1 << 16
"""The greatest number in a list. Greater ones are garbage; a range up to them would fill the memory."""

_PART = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def number_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `0-3,8`, each once and in its order; what cannot be read is left out."""
    numbers: dict[int, None] = {}
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match:
            first, last = int(match[1]), int(match[2] or match[1])
            if last <= MOST_NUMBERS:
                numbers.update(dict.fromkeys(range(first, last + 1)))
    return tuple(numbers)


def node_cores(sys_root: Path = Path("/sys")) -> tuple[int, ...]:
    """Return the cores that this process may use. The hardware threads of one core stand side by side.

    Linux often numbers the second threads of all cores after the first ones. In the order of their numbers, two ranks
    would share cores. The result is empty where the system does not tell.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ()
    cores = os.sched_getaffinity(0)
    return tuple(sorted(cores, key=lambda core: (min(_siblings(core, sys_root)), core)))


def _siblings(core: int, sys_root: Path) -> tuple[int, ...]:
    """Return the hardware threads of the core that `core` is a thread of; unknown: itself."""
    path = sys_root / "devices/system/cpu" / f"cpu{core}" / "topology/thread_siblings_list"
    with suppress(OSError, UnicodeDecodeError):
        return number_list(path.read_text()) or (core,)
    return (core,)
