"""Owner limits in the `exact` allocator: one dynamic programme per owner, and one over the owners.

Every trainer has one owner, so limits on owners split the problem. For each limited owner, and for all others together,
the first programme finds the most they can gain with exactly n nodes. The second divides the pool among them: it first
minimises how far owners fall short of their shares (`rights.py`), then maximises the gain. The result is exact, as
without limits, and the extra time is at most the square of the pool for each owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bftrainer.allocate.problem import Claim, Floats, Problem
from bftrainer.allocate.rights import Right, rights
from bftrainer.allocate.runs import CountRange, most_of_the_best, runs_of, step, tie_of

Ints = npt.NDArray[np.int64]

_NOTHING = np.iinfo(np.int64).max // 4
"""Shortfall of impossible counts."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Claims that share limits, or have none."""

    members: list[int]
    reach: int
    """The most nodes that the claims may have in total."""
    right: Right | None


def keeps_to(problem: Problem, counts: Sequence[int]) -> bool:
    """Whether counts obey the caps and meet every share."""
    held: dict[str, int] = {}
    for claim, count in zip(problem.claims, counts, strict=True):
        held[claim.owner] = held.get(claim.owner, 0) + count
    caps, shares = problem.limits.owner_caps, problem.limits.owner_shares
    return all(held.get(owner, 0) <= cap for owner, cap in caps.items()) and all(
        held.get(owner, 0) >= share for owner, share in shares.items()
    )


def solve_limited(problem: Problem) -> tuple[int, ...]:
    """The best counts within the caps, with shares met as far as possible."""
    tie = tie_of(problem.claims, problem.horizon_s)
    groups = _groups(problem)
    claims, horizon_s = problem.claims, problem.horizon_s
    inner = [_Inner([claims[j] for j in group.members], group.reach, horizon_s, tie) for group in groups]
    given = _share_out(problem.pool, groups, [one.value for one in inner], tie)
    counts = [0] * len(problem.claims)
    for group, one, nodes in zip(groups, inner, given, strict=True):
        for j, count in zip(group.members, one.counts(nodes), strict=True):
            counts[j] = count
    return tuple(counts)


def _groups(problem: Problem) -> list[_Group]:
    caps, known = problem.limits.owner_caps, rights(problem)
    members: dict[str | None, list[int]] = {}
    for j, claim in enumerate(problem.claims):
        members.setdefault(claim.owner if claim.owner in caps or claim.owner in known else None, []).append(j)
    found = []
    for owner, own in members.items():
        most = sum(min(problem.claims[j].max_nodes, problem.pool) for j in own)
        cap = problem.pool if owner is None else caps.get(owner, problem.pool)
        found.append(_Group(own, min(most, cap, problem.pool), None if owner is None else known.get(owner)))
    return found


class _Inner:
    """First dynamic programme: the gain of one group for every number of nodes, and the counts behind it."""

    def __init__(self, claims: Sequence[Claim], reach: int, horizon_s: float, tie: float) -> None:
        self._tie = tie / 4
        self._runs: list[list[CountRange]] = [runs_of(claim, reach, horizon_s, tie) for claim in claims]
        # One row per claim: the most that it and later claims gain with exactly b nodes. After the last: nothing.
        self._best = np.full((len(claims) + 1, reach + 1), -np.inf)
        self._best[-1, 0] = 0.0
        for j in range(len(claims) - 1, -1, -1):
            self._best[j] = step(self._runs[j], self._best[j + 1])

    @property
    def value(self) -> Floats:
        """The most gain with exactly n nodes, minus infinity where the group cannot use n nodes."""
        value: Floats = self._best[0]
        return value

    def counts(self, nodes: int) -> list[int]:
        """The count of each claim when the group has `nodes` nodes in total."""
        found = []
        for j, runs in enumerate(self._runs):
            found.append(most_of_the_best(runs, self._best[j + 1], nodes, self._tie))
            nodes -= found[-1]
        return found


def _share_out(pool: int, groups: Sequence[_Group], values: Sequence[Floats], tie: float) -> list[int]:
    """The nodes of each group: the least shortfall, then the most gain."""
    lack: Ints = np.zeros(pool + 1, np.int64)
    lack[1:] = _NOTHING
    gain = np.where(lack == 0, 0.0, -np.inf)
    choices: list[Ints] = []
    for group, value in zip(groups, values, strict=True):
        lack, gain, chosen = _with(group, value, lack, gain)
        choices.append(chosen)
    best = float(gain[lack == lack.min()].max())
    left = int(np.flatnonzero((lack == lack.min()) & (gain >= best - tie / 4))[-1])
    found = []
    for chosen in reversed(choices):
        found.append(int(chosen[left]))
        left -= found[-1]
    return found[::-1]


def _with(group: _Group, value: Floats, lack: Ints, gain: Floats) -> tuple[Ints, Floats, Ints]:
    """Shortfall and gain by exact total once a group has its part, and the size of that part."""
    new_lack, new_gain = np.full_like(lack, _NOTHING), np.full_like(gain, -np.inf)
    chosen = np.zeros_like(lack)
    for n in np.flatnonzero(value > -np.inf).tolist():
        lacks = lack[: len(lack) - n] + (group.right.lack(n) if group.right is not None else 0)
        gains = gain[: len(gain) - n] + value[n]
        better = (lacks < new_lack[n:]) | ((lacks == new_lack[n:]) & (gains > new_gain[n:]))
        new_lack[n:][better], new_gain[n:][better], chosen[n:][better] = lacks[better], gains[better], n
    new_lack[new_gain == -np.inf] = _NOTHING
    return new_lack, new_gain, chosen
