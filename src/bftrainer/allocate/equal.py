"""The `equal` allocator gives every trainer the same number of nodes. It is the paper's baseline.

Trainers are taken in order of submission while their minimum fits. The pool is shared equally among them, between
their minimum and maximum, and leftover nodes go one each to the earliest. Values of trainers play no part.
"""

from __future__ import annotations

import time

from bftrainer.allocate.problem import Decision, Problem
from bftrainer.errors import InputError


class EqualAllocator:
    """Gives equal shares, first come first served. It proves nothing, so its status is `heuristic`."""

    name = "equal"

    def allocate(self, problem: Problem) -> Decision:
        """See `Allocator`."""
        began = time.perf_counter()
        if problem.limits:
            raise InputError("the equal allocator cannot hold owner caps, shares or groups; use the milp allocator")
        counts = _equal_shares(problem)
        return Decision(counts, "heuristic", problem.objective(counts), (time.perf_counter() - began) * 1e3)


def _equal_shares(problem: Problem) -> tuple[int, ...]:
    counts = [0] * len(problem.claims)
    left = problem.pool
    served = []
    for j, claim in enumerate(problem.claims):
        if claim.min_nodes <= left:
            counts[j] = claim.min_nodes
            left -= claim.min_nodes
            served.append(j)
    # Raise the smallest counts together, step by step, until the pool is used up or every trainer is at its maximum.
    hungry = [j for j in served if counts[j] < problem.claims[j].max_nodes]
    while left and hungry:
        level = min(counts[j] for j in hungry)
        lowest = [j for j in hungry if counts[j] == level]
        ceiling = min([problem.claims[j].max_nodes for j in lowest] + [counts[j] for j in hungry if counts[j] > level])
        raised = min(ceiling - level, left // len(lowest))
        if raised == 0:
            for j in lowest[:left]:
                counts[j] += 1
            break
        for j in lowest:
            counts[j] += raised
        left -= raised * len(lowest)
        hungry = [j for j in hungry if counts[j] < problem.claims[j].max_nodes]
    return tuple(counts)
