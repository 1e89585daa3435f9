"""The best counts of small problems, by means too simple to be wrong: what the allocators are compared with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from bftrainer.allocate.problem import Claim, Problem


def options(problem: Problem, claim: Claim) -> list[int]:
    """The counts a claim may have in this pool, 0 first."""
    return [0, *range(claim.min_nodes, min(claim.max_nodes, problem.pool) + 1)]


def brute_force(problem: Problem) -> tuple[float, tuple[int, ...]]:
    """The best objective and counts that reach it. With limits: of those that lack the fewest nodes to the shares."""
    if problem.limits:
        sure = {owner: what_is_sure(problem, owner) for owner in problem.limits.owner_shares}
        counts = min(within_limits(problem), key=lambda n: (*lacking(problem, n, sure), -problem.objective(n)))
    else:
        counts = _best_by_nodes_used(problem)
    return problem.objective(counts), counts


def within_limits(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Every count vector that keeps to the pool, the claims, the caps and the groups."""
    limits, claims = problem.limits, problem.claims
    for counts in itertools.product(*(options(problem, claim) for claim in claims)):
        running = {claim.name for claim, n in zip(claims, counts, strict=True) if n}
        if (
            sum(counts) <= problem.pool
            and all(owned(problem, counts, owner) <= cap for owner, cap in limits.owner_caps.items())
            and all(len(running & group) <= 1 for group in limits.exclusive)
        ):
            yield counts


def owned(problem: Problem, counts: Sequence[int], owner: str) -> int:
    """The nodes of all trainers of an owner."""
    return sum(n for claim, n in zip(problem.claims, counts, strict=True) if claim.owner == owner)


def what_is_sure(problem: Problem, owner: str) -> int:
    """The most that an owner's trainers can use within their share, the cap and the pool."""
    limits = problem.limits
    most = min(limits.owner_shares[owner], limits.owner_caps.get(owner, problem.pool), problem.pool)
    mine = [options(problem, claim) for claim in problem.claims if claim.owner == owner]
    return max(total for counts in itertools.product(*mine) if (total := sum(counts)) <= most)


def lacking(problem: Problem, counts: Sequence[int], sure: Mapping[str, int] | None = None) -> tuple[int, int]:
    """The nodes that owners lack to what of their shares is sure, and to their shares."""
    shares = problem.limits.owner_shares
    sure = sure if sure is not None else {owner: what_is_sure(problem, owner) for owner in shares}
    bare, short = (
        sum(max(0, nodes - owned(problem, counts, owner)) for owner, nodes in wanted.items())
        for wanted in (sure, shares)
    )
    return bare, short


def _best_by_nodes_used(problem: Problem) -> tuple[int, ...]:
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by nodes used so far
    for claim in problem.claims:
        gains = [(n, claim.gain_at(n, problem.horizon_s)) for n in options(problem, claim)]
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (value, counts) in best.items():
            for n, gain in gains:
                total = used + n
                if total <= problem.pool and value + gain > longer.get(total, (-math.inf, ()))[0]:
                    longer[total] = (value + gain, (*counts, n))
        best = longer
    return max(best.values())[1]


def same(problem: Problem, a: float, b: float) -> bool:
    """Whether two objectives are equal to 1e-9, or differ by what rounding leaves where gains and costs cancel out."""
    gross = math.fsum(
        problem.horizon_s * max(claim.value.rates)
        + claim.value.rate(claim.running) * max(claim.up_s, claim.down_s, min(claim.start_s, problem.horizon_s))
        for claim in problem.claims
    )
    return abs(a - b) <= max(1e-9 * max(abs(a), abs(b)), 1e-12 * gross)
