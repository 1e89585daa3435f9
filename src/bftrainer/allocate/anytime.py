"""Anytime answers: what a solver with a time limit needs besides its model.

`milp.py` and `milp_nodes.py` start from `first_counts`, compare counts by `merit`, and make a `Decision` of the best
counts they have when they are done or the time is up.
"""

from __future__ import annotations

from bftrainer.allocate.problem import Decision, Problem, Status
from bftrainer.allocate.rights import lacking, rights
from bftrainer.allocate.solver import Stopwatch

Counts = tuple[int, ...]
"""Nodes by claim."""


def owned(problem: Problem, owner: str) -> list[int]:
    """The indices of an owner's claims."""
    return [j for j, claim in enumerate(problem.claims) if claim.owner == owner]


def obeys(problem: Problem, counts: Counts) -> bool:
    """Whether counts obey the pool, the claims, the owner caps and the exclusive groups."""
    limits, claims = problem.limits, problem.claims
    return (
        problem.feasible(counts)
        and all(sum(counts[j] for j in owned(problem, owner)) <= cap for owner, cap in limits.owner_caps.items())
        and all(
            sum(n > 0 and c.name in group for c, n in zip(claims, counts, strict=True)) <= 1
            for group in limits.exclusive
        )
    )


def merit(problem: Problem, counts: Counts) -> tuple[int, float]:
    """Key to compare counts by: first how far owners fall short of their shares, then the objective."""
    return -lacking(rights(problem), problem.claims, counts), problem.objective(counts)


def first_counts(problem: Problem) -> Counts:
    """Starting point of a solver: the current map if allowed, else its allowed part, first come, first served."""
    if obeys(problem, problem.current):
        return problem.current
    left, caps, kept = problem.pool, dict(problem.limits.owner_caps), list[int]()
    running: set[str] = set()
    for claim in problem.claims:
        nodes = min(claim.running, claim.max_nodes, left, caps.get(claim.owner, left))
        blocked = any(claim.name in group and running & group for group in problem.limits.exclusive)
        kept.append(nodes if nodes >= claim.min_nodes and not blocked else 0)
        left -= kept[-1]
        if claim.owner in caps:
            caps[claim.owner] -= kept[-1]
        if kept[-1]:
            running.add(claim.name)
    nothing = (0,) * len(problem.claims)
    return max(nothing, tuple(kept), key=lambda counts: merit(problem, counts))


def settle(problem: Problem, counts: Counts, proven: bool, watch: Stopwatch) -> Decision:
    """The decision: the counts found, unless the current map is allowed and as good."""
    current = problem.current
    stay = obeys(problem, current) and merit(problem, current) >= merit(problem, counts)
    chosen = current if stay else counts
    status: Status = "optimal" if proven else "kept" if stay else "time-limit"
    return Decision(chosen, status, problem.objective(chosen), watch.ms)
