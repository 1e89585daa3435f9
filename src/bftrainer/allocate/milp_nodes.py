"""The `milp-nodes` allocator solves the paper's node-level model, line by line, for fidelity and cross-checks.

A `Problem` without limits comes in, a `Decision` goes out. The model also decides which node serves which trainer, but
only the counts are returned, and `place.py` chooses nodes for them. `milp` finds the same counts far faster.

Given: the current map c_jn over nodes 0..|N|−1. Nodes are handed to the claims in order, as many as each runs on.
Variables, for trainer j, node n, point d of its curve:
    has_jn                binary, x_jn: node n serves j
    nodes_j               whole, N_j = Σ_n x_jn
    idle_l_j, idle_u_j    binary, y^l_j, y^u_j: j is excused from its minimum, its maximum, and then has no node
    changed_jn            binary, u_jn = x_jn ⊕ c_jn: node n joins or leaves j
    shrinks_j             binary, z_j: j takes no new node (else: it keeps every node it has)
    up_j, down_j          binary, z^u_j, z^d_j: j pays for scaling up, for scaling down
    weight_jd             from 0 to 1, w_j^d: how much of curve point d makes up (N_j, O_j)
    segment_jd            binary: N_j lies between points d and d+1; stands for the special ordered set of type 2
    late_j                L_j: what is lost while new nodes start; only for trainers whose nodes take time to start
Constraints:
    job size         N ≥ min − M·y^l,  N ≤ M(1 − y^l),  max ≥ N − M·y^u,  N ≤ M(1 − y^u)
    one trainer      Σ_j x_jn ≤ 1 for every node
    exclusive or     u ≤ x + c,  u ≥ x − c,  u ≥ c − x,  u ≤ 2 − x − c
    no migration     N − H ≥ Σ_n u − M·z,  N − H ≤ −Σ_n u + M(1 − z)       with H_j = Σ_n c_jn
    rescaling        N ≤ C + (M − C)z^u,  N ≥ (C + 1)z^u,  N ≤ (C − 1) + (M − (C − 1))(1 − z^d),  N ≥ C(1 − z^d)
    curve            Σ_d w_d = 1,  Σ_d w_d·n_d = N,  w_d ≤ segment_{d−1} + segment_d,  Σ_d segment_d = 1
    start            L ≥ s(Σ_d w_d·O(n_d) − O(C)) − M(1 − z^u),  L ≥ −M·z^u               with s = min(start, T)
Objective: Σ_j T·Σ_d w_d·O_j(n_d) − O_j(C_j)(up_j·z^u_j + down_j·z^d_j) − L_j.

Where the paper leaves a choice:
- The printed N ≤ M(i − y^l) is read as N ≤ M(1 − y^l).
- The paper asks for M > |N|. In the no-migration rows a trainer that grows from nothing to the whole pool needs
  |N| ≤ −|N| + M, so they take M = 2|N|; with less, some growth would be cut off. Elsewhere each row takes the least M
  that excuses it (min for the minimum, min(max, |N|) for the most): the same model with a tighter relaxation.
- z_j = 0 means N − H = Σ u, every change is a node gained; z_j = 1 means H − N = Σ u, every change is a node lost. So a
  grower keeps every node it has, and a shrinker takes no new one.
- Where Σ C_j > |N| no current map exists. Nodes are then handed out in order until none is left: H_j ≤ C_j of them
  serve to forbid migration, while the rescaling rows and the cost go on counting from C_j. Every count vector can be
  placed from H without migration, so the optimum remains that of the count model.
- Curve points that no count can use (below min, beyond min(max, |N|)) are left out, with the curve's values at min and
  at min(max, |N|) as the ends, and a trainer that cannot grow gets no cost of growing: numbers that mean nothing would
  only set the scale of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bftrainer.allocate.anytime import Counts, first_counts, obeys, settle
from bftrainer.allocate.problem import Claim, Decision, Problem
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
from bftrainer.errors import InputError

MOST_PAIRS = 1_000_000
"""Pairs of trainer and node beyond which the model would fill the memory before it could be solved."""

Map = npt.NDArray[np.bool_]
"""Trainers by nodes: whether the trainer has the node."""


@dataclass(frozen=True, slots=True)
class NodeMilpAllocator:
    """Solves the node-level model. Optimal unless the time runs out, and never worse than an allowed current map."""

    time_limit_s: float = 60.0
    backend: Backend = "highs"

    def __post_init__(self) -> None:
        check_settings(self.time_limit_s, self.backend)

    @property
    def name(self) -> str:
        """Name for `--allocator`."""
        return "milp-nodes"

    def allocate(self, problem: Problem) -> Decision:
        """Node counts that obey the pool and every claim."""
        watch = Stopwatch(self.time_limit_s)
        if problem.limits:
            raise InputError(
                "owner caps, shares and exclusive groups are not in the milp-nodes model; use the milp allocator"
            )
        if len(problem.claims) * problem.pool > MOST_PAIRS:
            size = f"{len(problem.claims)} trainers × {problem.pool} nodes"
            raise InputError(
                f"milp-nodes takes up to {MOST_PAIRS} pairs of trainer and node, but got {size}; use the milp allocator"
            )
        start = first_counts(problem)
        if problem.pool == 0 or not problem.claims:
            return settle(problem, start, True, watch)
        written = _write(problem, start)
        answer = solve(written.model, written.point(start), watch.left_s, self.backend)
        counts, proven = start, answer.proven
        if answer.values is not None:
            found = tuple(int(n) for n in np.rint(answer.values[written.has]).sum(axis=1))
            # Tolerances never add up to a whole node, but an allocator must not rely on it.
            if not obeys(problem, found):
                proven = False
            elif problem.objective(found) > problem.objective(start):
                counts = found
        return settle(problem, counts, proven, watch)


def current_map(problem: Problem) -> Map:
    """c_jn: nodes handed to the claims in order, as many as each runs on, until none is left."""
    ends = np.minimum(np.cumsum(problem.current), problem.pool)
    begins = np.concatenate([[0], ends[:-1]])
    node = np.arange(problem.pool)
    result: Map = (node >= begins[:, None]) & (node < ends[:, None])
    return result


def migration_free(current: Map, counts: Counts) -> Map:
    """A map with these counts in which growers keep their nodes and shrinkers take no new ones."""
    new = current.copy()
    for j, n in enumerate(counts):
        new[j, np.flatnonzero(current[j])[n:]] = False
    free = np.flatnonzero(~new.any(axis=0))
    for j, n in enumerate(counts):
        missing = n - int(new[j].sum())
        if missing > 0:
            new[j, free[:missing]] = True
            free = free[missing:]
    return new


@dataclass(frozen=True, slots=True)
class _Curve:
    """Points of a claim's curve within reach, and their variables' columns."""

    points: Floats
    weight: Ints
    segment: Ints
    late: Ints
    """The column of what is lost while nodes start; none if they start at once."""
    lost: Floats
    """That loss at each point, for a trainer that grows."""


@dataclass(frozen=True, slots=True)
class _WrittenNodes:
    """A model, and the columns of all its variables."""

    problem: Problem
    model: Model
    current: Map
    has: Ints
    nodes: Ints
    idle_l: Ints
    idle_u: Ints
    changed: Ints
    shrinks: Ints
    up: Ints
    down: Ints
    curves: list[_Curve]

    def point(self, counts: Counts) -> Floats:
        """The values of all variables for `counts`, on nodes reached without migration."""
        x = np.zeros(len(self.model.gain))
        n, running = np.array(counts), np.array(self.problem.current)
        new = migration_free(self.current, counts)
        x[self.has], x[self.changed], x[self.nodes] = new, new ^ self.current, n
        x[self.shrinks] = n < self.current.sum(axis=1)
        x[self.up], x[self.down] = n > running, n < running
        x[self.idle_l] = n == 0
        for count, curve in zip(counts, self.curves, strict=True):
            d = min(int(np.searchsorted(curve.points, count, side="right")) - 1, len(curve.points) - 2)
            x[curve.segment[d]] = 1
            share = (count - curve.points[d]) / (curve.points[d + 1] - curve.points[d])
            x[curve.weight[d : d + 2]] = 1 - share, share
        for count, now, curve in zip(counts, self.problem.current, self.curves, strict=True):
            if count > now:
                x[curve.late] = np.interp(count, curve.points, curve.lost)
        return x


def _write(problem: Problem, start: Counts) -> _WrittenNodes:
    claims, pool = problem.claims, problem.pool
    trainers = len(claims)
    current = current_map(problem)
    held = current.sum(axis=1).astype(np.float64)  # H_j
    running = np.array(problem.current, dtype=np.float64)  # C_j
    least = np.array([claim.min_nodes for claim in claims], dtype=np.float64)
    most = np.minimum([claim.max_nodes for claim in claims], pool).astype(np.float64)
    at_stake = np.array([claim.value.rate(claim.running) for claim in claims])
    scale = _scale(problem, start)

    draft = Draft()
    has = draft.columns(trainers * pool).reshape(trainers, pool)
    changed = draft.columns(trainers * pool).reshape(trainers, pool)
    nodes = draft.columns(trainers, upper=pool)
    idle_l, idle_u, shrinks = draft.columns(trainers), draft.columns(trainers), draft.columns(trainers)
    up_s = np.where(most > running, [claim.up_s for claim in claims], 0.0)
    up = draft.columns(trainers, gain=-scale * at_stake * up_s)
    down = draft.columns(trainers, gain=-scale * at_stake * [claim.down_s for claim in claims])

    draft.rows(trainers, [(nodes, 1.0), (has, -1.0)], lower=0, upper=0)

    # Job size.
    draft.rows(trainers, [(nodes, 1.0), (idle_l, least)], lower=least)
    draft.rows(trainers, [(nodes, 1.0), (idle_l, most)], upper=most)
    draft.rows(trainers, [(nodes, 1.0), (idle_u, -float(pool))], upper=most)
    draft.rows(trainers, [(nodes, 1.0), (idle_u, most)], upper=most)

    # One trainer per node.
    draft.rows(pool, [(has.T, 1.0)], upper=1)

    # Exclusive or.
    x, u, c = has.ravel(), changed.ravel(), current.ravel().astype(np.float64)
    pairs = len(x)
    draft.rows(pairs, [(u, 1.0), (x, -1.0)], upper=c)
    draft.rows(pairs, [(u, 1.0), (x, -1.0)], lower=-c)
    draft.rows(pairs, [(u, 1.0), (x, 1.0)], lower=c)
    draft.rows(pairs, [(u, 1.0), (x, 1.0)], upper=2 - c)

    # No migration.
    far = 2.0 * pool
    draft.rows(trainers, [(nodes, 1.0), (changed, -1.0), (shrinks, far)], lower=held)
    draft.rows(trainers, [(nodes, 1.0), (changed, 1.0), (shrinks, far)], upper=held + far)

    # Rescaling. Above is the most a count can be, which is C_j or less where Σ C_j > |N| or C_j > max_j.
    above = np.maximum(most, running)
    draft.rows(trainers, [(nodes, 1.0), (up, running - above)], upper=running)
    draft.rows(trainers, [(nodes, 1.0), (up, -(running + 1))], lower=0)
    draft.rows(trainers, [(nodes, 1.0), (down, above - (running - 1))], upper=above)
    draft.rows(trainers, [(nodes, 1.0), (down, running)], lower=running)

    curves = [
        _write_curve(draft, claim, nodes[j], up[j], int(most[j]), scale, problem.horizon_s)
        for j, claim in enumerate(claims)
    ]
    model = draft.model()
    return _WrittenNodes(problem, model, current, has, nodes, idle_l, idle_u, changed, shrinks, up, down, curves)


def _write_curve(draft: Draft, claim: Claim, nodes: int, up: int, most: int, scale: float, horizon_s: float) -> _Curve:
    """O_j(N_j) as a weighted mean of two neighbouring curve points, and what is lost of it while new nodes start."""
    least = claim.min_nodes
    inner = {least, *(n for n in claim.value.nodes if least < n < most)} if least < most else ()
    points = np.array([0, *sorted(inner), most], dtype=np.float64)
    count = len(points)
    values = claim.value.at(points) if least <= most else np.zeros(count)
    weight = draft.columns(count, whole=False, gain=scale * horizon_s * values)
    segment = draft.columns(count - 1)
    draft.rows(1, [(weight, 1.0)], lower=1, upper=1)
    draft.rows(1, [(weight, points), (nodes, -1.0)], lower=0, upper=0)
    draft.rows(1, [(segment, 1.0)], lower=1, upper=1)
    draft.rows(1, [(weight[0], 1.0), (segment[0], -1.0)], upper=0)
    draft.rows(1, [(weight[-1], 1.0), (segment[-1], -1.0)], upper=0)
    draft.rows(count - 2, [(weight[1:-1], 1.0), (segment[:-1], -1.0), (segment[1:], -1.0)], upper=0)
    lost = scale * min(claim.start_s, horizon_s) * (values - claim.value.rate(claim.running))
    far = float(np.abs(lost).max())  # M
    late = draft.columns(1 if far and most > claim.running else 0, lower=-far, upper=far, whole=False, gain=-1.0)
    draft.rows(len(late), [(late, 1.0), (weight, -lost), (up, -far)], lower=-far)
    draft.rows(len(late), [(late, 1.0), (up, far)], lower=0)
    return _Curve(points, weight, segment, late, lost)


def _scale(problem: Problem, start: Counts) -> float:
    """The factor that scales the possible improvement over `start` to the range where solvers are precise."""
    reach = [claim.gains(problem.pool, problem.horizon_s) for claim in problem.claims]
    gains = [own[np.isfinite(own)] for own in reach]
    span = math.fsum([*(float(own.max()) for own in gains), -problem.objective(start)])
    largest = max(float(np.abs(own).max()) for own in gains)
    # Where costs dwarf the improvement, the scaled costs must not exceed what a solver takes for finite.
    unit = max(span, 1e-6 * largest)
    return OBJECTIVE_SPAN / unit if unit > TINY else 1.0
