"""The default number of ranks of a node, from what its agent said in `Join`."""

from __future__ import annotations

from collections.abc import Sequence


def default_ranks(gpus: Sequence[object], slots: int) -> int:
    """Return how many ranks a worker has on a node by default: as its pool said, or one per GPU, or one."""
    return slots or len(gpus) or 1
