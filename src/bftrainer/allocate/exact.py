"""The `exact` allocator solves the count problem to optimality by dynamic programming over claims.

Let best_j(b) be the most that claims j, j+1, … can gain with b nodes. It is the maximum over n of
gain_j(n) + best_{j+1}(b−n): a multiple-choice knapsack. Small problems try every count of a claim at every budget in
one broadcast. Large ones use that a gain is linear on few runs of counts (`runs.py`): counts that can be in no optimal
plan are dropped first, and the maximum over the rest of a run is a sliding-window maximum. A process that takes many
decisions has small problems solved by compiled code where possible (`kernel.py`). `limited.py` handles owners' caps
and shares.
"""

from __future__ import annotations

import time
from itertools import accumulate

import numpy as np

from bftrainer.allocate.kernel import Kernel
from bftrainer.allocate.kernel import compiled as load_kernel
from bftrainer.allocate.limited import keeps_to, solve_limited
from bftrainer.allocate.problem import Claim, Decision, Floats, Problem
from bftrainer.allocate.runs import most_of_the_best, promising, runs_of, step, tie_of
from bftrainer.errors import InputError

SMALL = 1_000_000
"""Cells (budgets × counts of all claims) up to which trying everything is faster."""

SMALL_COMPILED = 4_000_000
"""`SMALL` for compiled code."""

MANY = 1000
"""Decisions after which compiled code is worth the half second it takes to load."""


class ExactAllocator:
    """Finds the optimum for every piecewise-linear value curve, of any shape.

    On a tie, as many trainers as possible stay as they are; then earlier submissions get more nodes.
    """

    name = "exact"

    def __init__(self, *, compiled: bool | None = None) -> None:
        """`compiled`: whether to use compiled code, loaded at once. None: decide by the number of decisions taken."""
        self._decisions = 0
        self._kernel = load_kernel() if compiled else None
        self._wait = compiled is None
        if compiled and self._kernel is None:
            raise InputError("compiled decisions need numba: pip install 'bftrainer[fast]'")

    def allocate(self, problem: Problem) -> Decision:
        """See `Allocator`."""
        began = time.perf_counter()
        if problem.limits.exclusive:
            raise InputError("the exact allocator cannot hold exclusive groups; use the milp allocator")
        counts = _solve(problem, self._kernel)
        # If the optimum without limits obeys them, it is the optimum with them; and it is found much sooner.
        if problem.limits and not keeps_to(problem, counts):
            counts = solve_limited(problem)
        decision = Decision(counts, "optimal", problem.objective(counts), (time.perf_counter() - began) * 1e3)
        self._decisions += 1
        if self._wait and self._decisions == MANY:
            self._kernel = load_kernel()
        return decision


def _solve(problem: Problem, kernel: Kernel | None) -> tuple[int, ...]:
    claims = problem.claims
    tops = [min(claim.max_nodes, problem.pool) for claim in claims]
    pool = min(problem.pool, sum(tops))
    if pool == 0:
        return (0,) * len(claims)
    cells = (pool + 1) * (sum(tops) + len(tops))
    if kernel is not None and cells <= SMALL_COMPILED:
        return _solve_compiled(kernel, claims, tops, pool, problem.horizon_s)
    if cells <= SMALL:
        return _solve_densely(claims, tops, pool, problem.horizon_s)
    return _solve_by_runs(claims, pool, problem.horizon_s)


def _solve_compiled(
    kernel: Kernel, claims: tuple[Claim, ...], tops: list[int], pool: int, horizon_s: float
) -> tuple[int, ...]:
    """Solve by trying every count at every budget, in compiled code."""
    widest = max(tops) + 1
    rates = np.concatenate([claim.value.up_to(widest - 1) for claim in claims]).reshape(len(claims), widest)
    running = np.array([claim.running for claim in claims])
    down = np.array([claim.value.rate(claim.running) * claim.down_s for claim in claims])
    up = np.array([claim.growth_cost(horizon_s) for claim in claims])
    grown_s = np.array([claim.with_new_nodes_s(horizon_s) for claim in claims])
    least = np.array([claim.min_nodes for claim in claims])
    tie = tie_of(claims, horizon_s)
    return tuple(kernel(rates, running, least, np.array(tops), down, up, grown_s, horizon_s, pool, tie).tolist())


def _solve_densely(claims: tuple[Claim, ...], tops: list[int], pool: int, horizon_s: float) -> tuple[int, ...]:
    """Solve by trying every count at every budget, in numpy."""
    tie = tie_of(claims, horizon_s)
    gains = _gains(claims, tops, horizon_s, tie)
    # Each row is best_j over the budgets, after as many cells of "not enough nodes" as a claim has counts. So the view
    # [j, n, b] of it is best_j(b−n), with rows that numpy can add and compare at full speed.
    last, widest = len(claims) - 1, gains.shape[1]
    table = np.full((len(claims), widest - 1 + pool + 1), -np.inf)
    best = table[:, widest - 1 :]
    row, cell = table.strides
    shape, strides = (len(claims), widest, pool + 1), (row, -cell, cell)
    shifted: Floats = np.ndarray(shape, np.float64, table.data, (widest - 1) * cell, strides)
    # No claim follows the last one: with b nodes it takes the best count up to b.
    best[last] = gains[last].max()
    np.maximum.accumulate(gains[last, : pool + 1], out=best[last, :widest])
    # With the whole pool for the first claim, a claim never sees less than what those before it cannot take.
    least_left = [max(0, pool - taken) for taken in accumulate(tops, initial=0)]
    columns, scratch = gains[:, :, None], np.empty((widest, pool + 1))
    for j in range(last - 1, -1, -1):
        top, first = tops[j], least_left[j]
        following, gain, cells, found = shifted[j + 1], columns[j], scratch, best[j]
        if first or top + 1 < widest:
            following, gain, cells = following[: top + 1, first:], gain[: top + 1], cells[: top + 1, first:]
            found = found[first:]
        np.add(following, gain, cells)
        np.maximum.reduce(cells, out=found)
    # Take the first count, from the largest down, that is as good as the best.
    downwards, counts = gains[:, ::-1], []
    left, tie = pool, tie / 4
    for j in range(last):
        value = downwards[j] + table[j + 1, left : left + widest]
        count = widest - 1 - int((value >= best[j, left] - tie).argmax())
        counts.append(count)
        left -= count
    affordable = gains[last, : left + 1]
    counts.append(int((affordable >= best[last, left] - tie).nonzero()[0][-1]))
    return tuple(counts)


def _gains(claims: tuple[Claim, ...], tops: list[int], horizon_s: float, tie: float) -> Floats:
    """The gain of each claim (a row) at each count (a column), minus infinity where the claim does not allow it.

    Staying at the current count adds `tie`.
    """
    widest = max(tops) + 1
    rates = np.concatenate([claim.value.up_to(widest - 1) for claim in claims]).reshape(len(claims), widest)
    running = [claim.running for claim in claims]
    at_stake = [claim.value.rate(now) for claim, now in zip(claims, running, strict=True)]
    terms = [
        (now, claim.down_s * rate, claim.growth_cost(horizon_s), claim.with_new_nodes_s(horizon_s))
        for claim, now, rate in zip(claims, running, at_stake, strict=True)
    ]
    now, down, up, grown_s = np.array(terms).T[:, :, None]
    smaller = np.arange(widest) < now
    gains: Floats = np.where(smaller, horizon_s, grown_s) * rates
    gains -= np.where(smaller, down, up)
    for j, claim in enumerate(claims):
        if running[j] < widest:
            gains[j, running[j]] = horizon_s * at_stake[j] + tie
        if claim.min_nodes > 1:
            gains[j, 1 : claim.min_nodes] = -np.inf
        if tops[j] + 1 < widest:
            gains[j, tops[j] + 1 :] = -np.inf
    return gains


def _solve_by_runs(claims: tuple[Claim, ...], pool: int, horizon_s: float) -> tuple[int, ...]:
    """Solve over the counts that may be in an optimal plan, run by run."""
    tie = tie_of(claims, horizon_s)
    runs = promising([runs_of(claim, pool, horizon_s, tie) for claim in claims], pool)
    counts = [0] * len(claims)
    open_claims = []
    for j, choice in enumerate(runs):
        if len(choice) == 1 and choice[0].first == choice[0].last:
            counts[j] = choice[0].first  # settled: every optimal plan has it so
            pool -= counts[j]
        else:
            open_claims.append(j)
    best = np.zeros((len(open_claims) + 1, pool + 1))
    for row in range(len(open_claims) - 1, -1, -1):
        best[row] = step(runs[open_claims[row]], best[row + 1])
    left = pool
    for row, j in enumerate(open_claims):
        counts[j] = most_of_the_best(runs[j], best[row + 1], left, tie / 4)
        left -= counts[j]
    return tuple(counts)
