"""The `milp` allocator solves the count problem as a mixed-integer programme, with every kind of limit.

A `Problem` with its `Limits` (owner caps, owner shares, exclusive groups) comes in, a `Decision` goes out.

Variables, for a claim j whose counts 0, min..C−1, C and C+1..max are cut into runs r on which the gain, as
`Claim.gain_at` has it, is concave (a zig-zag curve gives several runs, Amdahl's law one per branch):
    nodes_j   whole, N_j: the nodes it gets
    take_jr   binary: its count lies in run r
    more_ji   from 0 to the length of linear piece i of a run: its nodes in that piece, beyond the run's first count
    short_o   whole: the nodes owner o lacks to its share
    bare_o    whole: the nodes owner o lacks to the sure part of its share (`rights.py`)
Constraints:
    one run per claim     Σ_r take_jr = 1
    a count in its run    nodes_j = Σ_r first_r·take_jr + Σ_i more_ji,  more_ji ≤ length_i·take_jr
    the pool              Σ_j nodes_j ≤ |pool|
    caps, groups          Σ_o nodes_j ≤ cap_o,  Σ_group (its runs above 0) ≤ 1
    shares                Σ_o nodes_j + short_o ≥ share_o,  Σ_o nodes_j + bare_o ≥ sure_o
The gain is Σ gain(first_r)·take_jr + slope_i·more_ji. Slopes fall along a run, so its pieces fill in order without a
binary each. Shares come before any gain: one solve finds the least Σ W·bare_o + short_o, with W more than all shares
together; a second solve finds the best gain with no more than that. (A penalty that outweighs every gain would do the
same in one solve, but would cost digits of the gain.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bftrainer.allocate.anytime import Counts, first_counts, merit, obeys, owned, settle
from bftrainer.allocate.problem import Claim, Decision, Problem
from bftrainer.allocate.rights import rights
from bftrainer.allocate.solver import (
    OBJECTIVE_SPAN,
    TINY,
    Backend,
    Draft,
    Floats,
    Ints,
    Model,
    Stopwatch,
    check_settings,
    solve,
)


@dataclass(frozen=True, slots=True)
class MilpAllocator:
    """Solves the count model. Optimal unless the time runs out, and never worse than an allowed current map."""

    time_limit_s: float = 60.0
    backend: Backend = "highs"

    def __post_init__(self) -> None:
        check_settings(self.time_limit_s, self.backend)

    @property
    def name(self) -> str:
        """Name for `--allocator`."""
        return "milp"

    def allocate(self, problem: Problem) -> Decision:
        """Node counts that obey the pool, every claim and the limits; shares are met as far as possible."""
        watch = Stopwatch(self.time_limit_s)
        counts, proven = first_counts(problem), True
        if problem.limits.owner_shares:
            counts, proven = self._improve(problem, counts, watch, shares_only=True)
        counts, best = self._improve(problem, counts, watch)
        return settle(problem, counts, proven and best, watch)

    def _improve(
        self, problem: Problem, start: Counts, watch: Stopwatch, shares_only: bool = False
    ) -> tuple[Counts, bool]:
        """Counts better than `start`, and whether they are proven optimal.

        With `shares_only`, better means a smaller shortfall of the shares.
        """
        written = _write(problem, start, shares_only)
        if written is None:
            return start, True
        answer = solve(written.model, written.point(problem, start), watch.left_s, self.backend)
        found = start if answer.values is None else tuple(round(float(n)) for n in answer.values[written.nodes])
        if not obeys(problem, found):  # tolerances never add up to a whole node, but an allocator must not rely on it
            return start, False
        return max(start, found, key=lambda counts: merit(problem, counts)), answer.proven


def most_nodes(problem: Problem, claim: Claim) -> int:
    """The largest count that the claim, the pool and its owner's cap allow (below min_nodes: it cannot run)."""
    return max(0, min(claim.max_nodes, problem.pool, problem.limits.owner_caps.get(claim.owner, problem.pool)))


@dataclass(frozen=True, slots=True)
class _ConcaveRun:
    """Counts from `first` on along which the gain is concave: linear pieces with falling slopes."""

    first: int
    gain: float  # at `first`
    lengths: Floats
    slopes: Floats
    best: float  # the largest gain in it

    @property
    def last(self) -> int:
        return self.first + int(self.lengths.sum())


def _runs(claim: Claim, most: int, horizon_s: float, floor: float) -> list[_ConcaveRun]:
    """The counts that the claim may have, cut where its gain jumps (0, C), its slope rises or it is below `floor`."""
    now, least = claim.running, claim.min_nodes
    branches = [(0, 0), (max(least, now + 1), most)]
    if now:
        branches += [(least, min(now - 1, most)), (now, now if now <= most else 0)]
    runs: list[_ConcaveRun] = []
    for low, high in branches:
        if low > high:
            continue
        # A branch of one count is one piece of length 0.
        points = [low, *(n for n in claim.value.nodes if low < n < high), high]
        gains = [claim.gain_at(n, horizon_s) for n in points]
        runs += _concave_runs(
            [_piece(*ends, floor) for ends in zip(points, points[1:], gains, gains[1:], strict=False)]
        )
    return runs


Piece = tuple[int, int, float, float]
"""The counts from a to b, the gain at a, and its slope."""


def _piece(first: int, last: int, gain: float, last_gain: float, floor: float) -> Piece | None:
    """The part of a linear piece that is not below `floor`."""
    if max(gain, last_gain) < floor:
        return None
    slope = (last_gain - gain) / (last - first) if last > first else 0.0
    a, b = first, last
    slack = 1e-6  # of a node: a count on the floor must not fall to rounding
    if gain < floor:
        a = math.ceil(first + (floor - gain) / slope - slack)
    elif last_gain < floor:
        b = math.floor(first + (floor - gain) / slope + slack)
    return a, b, gain + slope * (a - first), slope


def _concave_runs(pieces: list[Piece | None]) -> list[_ConcaveRun]:
    """Neighbouring pieces, joined while their slopes fall."""
    chains: list[list[Piece]] = []
    for piece in pieces:
        if piece is None:
            continue
        last = chains[-1][-1] if chains else None
        if last is not None and last[1] == piece[0] and last[3] >= piece[3]:
            chains[-1].append(piece)
        else:
            chains.append([piece])
    return [
        _ConcaveRun(
            first=chain[0][0],
            gain=chain[0][2],
            lengths=np.array([b - a for a, b, _, _ in chain if b > a], dtype=np.float64),
            slopes=np.array([slope for a, b, _, slope in chain if b > a], dtype=np.float64),
            best=max(gain + max(0.0, slope * (b - a)) for a, b, gain, slope in chain),
        )
        for chain in chains
    ]


@dataclass(frozen=True, slots=True)
class _Written:
    """A model, and the columns of the counts in it."""

    model: Model
    nodes: Ints
    runs: list[list[_ConcaveRun]]
    take: list[Ints]
    more: list[Ints]
    short: dict[str, list[tuple[int, int]]]

    def point(self, problem: Problem, counts: Counts) -> Floats:
        """The values of all variables for `counts`."""
        x = np.zeros(len(self.model.gain))
        x[self.nodes] = counts
        for runs, take, more, n in zip(self.runs, self.take, self.more, counts, strict=True):
            chosen = next(r for r, run in enumerate(runs) if run.first <= n <= run.last)
            x[take[chosen]] = 1
            skipped = sum(len(run.lengths) for run in runs[:chosen])
            begins = np.cumsum([0, *runs[chosen].lengths])[:-1]
            filled = np.clip(n - runs[chosen].first - begins, 0, runs[chosen].lengths)
            x[more[skipped : skipped + len(filled)]] = filled
        for owner, columns in self.short.items():
            held = sum(counts[j] for j in owned(problem, owner))
            for column, wanted in columns:
                x[column] = max(0, wanted - held)
        return x


def _write(problem: Problem, start: Counts, shares_only: bool) -> _Written | None:
    """The model in which `start` is feasible; None where nothing can be better."""
    minus_lacking, value = merit(problem, start)
    horizon_s, claims = problem.horizon_s, problem.claims
    most = [most_nodes(problem, claim) for claim in claims]
    tops = [float(claim.gains(n, horizon_s).max()) for claim, n in zip(claims, most, strict=True)]
    if shares_only:
        if minus_lacking == 0:
            return None
        scale, floors = 0.0, [-math.inf] * len(claims)
    else:
        span = math.fsum([*tops, -value])  # no counts are better than `start` by more than this
        if span <= max(1e-12 * abs(value), TINY):
            return None
        # Counts that lose more than all claims together could win are left out. The rest fits the scale of the
        # improvement, so its digits survive the solver's absolute tolerances, whatever the omitted counts cost.
        scale = OBJECTIVE_SPAN / span
        floors = [min(top - span, c.gain_at(n, horizon_s)) for top, c, n in zip(tops, claims, start, strict=True)]
    runs = [_runs(claim, n, horizon_s, floor) for claim, n, floor in zip(claims, most, floors, strict=True)]

    draft = Draft()
    nodes = draft.columns(len(runs), upper=[max(run.last for run in own) for own in runs])
    take, more = [], []
    for j, own in enumerate(runs):
        lengths = np.concatenate([run.lengths for run in own])
        slopes = np.concatenate([run.slopes for run in own])
        take.append(draft.columns(len(own), gain=[(run.gain - tops[j]) * scale for run in own]))
        more.append(draft.columns(len(lengths), upper=lengths, whole=False, gain=slopes * scale))
        own_take = np.repeat(take[j], [len(run.lengths) for run in own])
        firsts = [-float(run.first) for run in own]
        draft.rows(1, [(take[j], 1.0)], lower=1, upper=1)
        draft.rows(1, [(nodes[j], 1.0), (take[j], firsts), (more[j], -1.0)], lower=0, upper=0)
        draft.rows(len(lengths), [(more[j], 1.0), (own_take, -lengths)], upper=0)
    draft.rows(1, [(nodes, 1.0)], upper=problem.pool)
    short = _write_limits(draft, problem, nodes, runs, take, shares_only, -minus_lacking)
    return _Written(draft.model(), nodes, runs, take, more, short)


def _write_limits(
    draft: Draft,
    problem: Problem,
    nodes: Ints,
    runs: list[list[_ConcaveRun]],
    take: list[Ints],
    shares_only: bool,
    at_most: int,
) -> dict[str, list[tuple[int, int]]]:
    """Add the rows of caps, groups and shares with a shortfall of `at_most`. Returns the shortfall columns by owner."""
    limits = problem.limits
    for owner, cap in limits.owner_caps.items():
        draft.rows(1, [(nodes[owned(problem, owner)], 1.0)], upper=cap)
    for group in limits.exclusive:
        members = [j for j, claim in enumerate(problem.claims) if claim.name in group]
        runs_above_0 = [take[j][r] for j in members for r, run in enumerate(runs[j]) if run.first > 0]
        draft.rows(1, [(runs_above_0, 1.0)], upper=1)
    short: dict[str, list[tuple[int, int]]] = {}
    weights: dict[int, float] = {}
    for owner, right in rights(problem).items():
        short[owner] = []
        for wanted, weight in ((right.share, 1), (right.sure, right.weight)):
            column = draft.columns(1, upper=max(0, wanted), gain=-float(weight) if shares_only else 0.0)
            draft.rows(1, [(nodes[owned(problem, owner)], 1.0), (column, 1.0)], lower=wanted)
            short[owner].append((int(column[0]), wanted))
            weights[int(column[0])] = float(weight)
    if short:
        draft.rows(1, [(list(weights), list(weights.values()))], upper=at_most)
    return short
