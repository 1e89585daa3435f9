"""Allocators by name, for the command line and for settings."""

from __future__ import annotations

from typing import cast, get_args

from bftrainer.allocate.equal import EqualAllocator
from bftrainer.allocate.exact import ExactAllocator
from bftrainer.allocate.problem import Allocator
from bftrainer.errors import InputError

ALLOCATORS = ("exact", "milp", "milp-nodes", "equal")


def make_allocator(name: str, time_limit_s: float = 60.0, backend: str = "highs") -> Allocator:
    """The allocator called `name`. Time limit and backend matter to the MILP ones."""
    if name == "exact":
        return ExactAllocator()
    if name == "equal":
        return EqualAllocator()
    # HiGHS takes time to load, and most calls do not need it.
    from bftrainer.allocate.milp import MilpAllocator
    from bftrainer.allocate.milp_nodes import NodeMilpAllocator
    from bftrainer.allocate.solver import Backend

    backends = get_args(Backend)
    if backend not in backends:
        raise InputError(f"backend must be one of {', '.join(backends)}, but got {backend!r}")
    if name == "milp":
        return MilpAllocator(time_limit_s, cast(Backend, backend))
    if name == "milp-nodes":
        return NodeMilpAllocator(time_limit_s, cast(Backend, backend))
    raise InputError(f"allocator must be one of {', '.join(ALLOCATORS)}, but got {name!r}")
