"""Registry of allocators by name, for the command line and settings: built-in, or a user's as `module:name`."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, cast, get_args

from bftrainer.allocate.equal import EqualAllocator
from bftrainer.allocate.exact import ExactAllocator
from bftrainer.allocate.problem import Allocator, Decision, Problem
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.util.plugins import find_named, is_named, said

ALLOCATORS = ("exact", "milp", "milp-nodes", "equal")


def make_allocator(name: str, time_limit_s: float = 60.0, backend: str = "highs") -> Allocator:
    """Make the allocator called `name`, or a user's as `module:name`.

    Only the MILP allocators use the time limit and the backend.
    """
    if is_named(name):
        return _Foreign(name, _made(name))
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
    raise InputError(f"allocator must be one of {', '.join(ALLOCATORS)} or module:name, but got {name!r}")


def _made(name: str) -> Any:
    """Make a user's allocator: an object, or the result of calling a class or function without arguments."""
    found = find_named(name, "allocator")
    if isinstance(found, type) or not hasattr(found, "allocate"):
        try:
            found = found()
        except BFTrainerError:
            raise
        except Exception as problem:  # a user's class may raise anything
            raise InputError(f"allocator {name!r} cannot be made without arguments: {said(problem)}") from problem
    if not callable(getattr(found, "allocate", None)):
        raise InputError(f"allocator {name!r} must have a method allocate(problem), but {found!r:.80} has none")
    return found


class _Foreign:
    """Wraps a user's allocator and checks its decisions before they are trusted."""

    def __init__(self, name: str, theirs: Any) -> None:
        self.name = name
        self._theirs = theirs

    def allocate(self, problem: Problem) -> Decision:
        """See `Allocator`."""
        try:
            decision = self._theirs.allocate(problem)
        except BFTrainerError:
            raise
        except Exception as problem_of_theirs:  # a user's allocator may raise anything
            raise InputError(f"allocator {self.name!r} failed: {said(problem_of_theirs)}") from problem_of_theirs
        if not isinstance(decision, Decision):
            raise InputError(f"allocator {self.name!r} must return a Decision, but got {decision!r:.80}")
        try:
            counts = tuple(operator.index(count) for count in decision.counts)
            allowed = len(counts) == len(problem.claims) and problem.feasible(counts)
        except TypeError:
            counts, allowed = decision.counts, False
        if not allowed:
            raise InputError(
                f"allocator {self.name!r} must give each of {len(problem.claims)} trainers 0 nodes or from its minimum "
                f"to its maximum, and at most {problem.pool} in total, but gave {counts!r:.80}"
            )
        return replace(decision, counts=counts, objective=problem.objective(counts))
