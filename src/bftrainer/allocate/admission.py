"""Admission from the queue: which waiting trainers a decision considers besides those admitted before.

The scheduler passes the trainers in order of submission, the limits of owners and the size of the pool. The queue is
first come, first served up to max parallel. Trainers that cannot run on the present pool use up no place of max
parallel, and an owner's limit is not void because other owners came first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from bftrainer.allocate.problem import Limits
from bftrainer.core.trainer import Trainer

USUAL_PARALLEL = 10
"""Max parallel of the paper, and the least that `automatic_parallel` returns."""
MOST_CELLS = 10_000_000
"""Trainers × nodes above which `automatic_parallel` admits no more trainers than the pool needs.

The time and memory of an exact decision grow with this product.
"""


class _Fitting:
    """Counts trainers that can run at the same time, each at its smallest size, first come, first served."""

    def __init__(self, limits: Limits, pool: int) -> None:
        self.number = 0
        self.free = pool
        self._caps = dict(limits.owner_caps)
        self._groups = limits.exclusive
        self._in_groups: set[str] = set()
        """Trainers that may not run beside those counted."""

    def add(self, trainer: Trainer) -> bool:
        """Count a trainer if it can run beside those counted before. Returns whether it can."""
        cap = self._caps.get(trainer.owner, self.free)
        if trainer.min_nodes > min(cap, self.free) or trainer.name in self._in_groups:
            return False
        self.number += 1
        self.free -= trainer.min_nodes
        if trainer.owner in self._caps:
            self._caps[trainer.owner] -= trainer.min_nodes
        for group in self._groups:
            if trainer.name in group:
                self._in_groups |= group
        return True


def admit(
    admitted: Sequence[Trainer], waiting: Sequence[Trainer], room: int, limits: Limits, pool: int
) -> tuple[Trainer, ...]:
    """The waiting trainers that are considered from now on; `room`: max parallel less the number of those admitted.

    First come, first served, with these exceptions:

    - Trainers of owners whose share the admitted trainers cannot use come first, beyond max parallel if necessary.
    - A trainer is passed over if its owner's cap is used up by the minimum that the owner's admitted trainers need.
    - Considered trainers that cannot run at the same time as those before them, each at its smallest size, leave their
      places to trainers that can. They stay considered, so none of them loses its turn when the pool grows.
    - If caps leave nodes that no admitted trainer may use, others are admitted for them, also beyond max parallel.
    """
    if not waiting:
        return ()
    if not limits:
        first = waiting[: max(room, 0)]
        if sum(t.min_nodes for t in admitted) + sum(t.min_nodes for t in first) <= pool:
            return tuple(first)  # all of them can run at the same time
    chosen = _by_limits(admitted, waiting, room, limits, pool)
    fitting = _Fitting(limits, pool)
    for trainer in (*admitted, *(trainer for trainer in waiting if trainer.name in chosen)):
        fitting.add(trainer)
    for trainer in waiting:
        if fitting.number >= room + len(admitted) or not fitting.free:
            break
        if trainer.name not in chosen and fitting.add(trainer):
            chosen.add(trainer.name)
    return tuple(trainer for trainer in waiting if trainer.name in chosen)


def _by_limits(
    admitted: Sequence[Trainer], waiting: Sequence[Trainer], room: int, limits: Limits, pool: int
) -> set[str]:
    """The names of the trainers admitted by their turn and by the limits of owners."""
    caps, shares = limits.owner_caps, limits.owner_shares
    if not caps and not shares:
        return {trainer.name for trainer in waiting[: max(room, 0)]}
    least: defaultdict[str, int] = defaultdict(int)
    most: defaultdict[str, int] = defaultdict(int)
    within: defaultdict[str, int] = defaultdict(int)  # nodes usable by trainers that fit into the share
    chosen: set[str] = set()

    def reach(owner: str) -> int:
        return min(caps.get(owner, pool), pool)

    def count(trainer: Trainer) -> None:
        least[trainer.owner] += trainer.min_nodes
        if trainer.min_nodes <= reach(trainer.owner):
            most[trainer.owner] += trainer.max_nodes
        if trainer.min_nodes <= shares.get(trainer.owner, 0):
            within[trainer.owner] += trainer.max_nodes

    def take(trainer: Trainer) -> None:
        chosen.add(trainer.name)
        count(trainer)

    for trainer in admitted:
        count(trainer)
    for trainer in waiting:
        if within[trainer.owner] < (share := shares.get(trainer.owner, 0)) and trainer.min_nodes <= share:
            take(trainer)
    for trainer in waiting:
        wanted = most[trainer.owner] < shares.get(trainer.owner, 0) and trainer.min_nodes <= reach(trainer.owner)
        if wanted and trainer.name not in chosen:
            take(trainer)
    for trainer in waiting:
        if len(chosen) >= room:
            break
        cap = caps.get(trainer.owner)
        if trainer.name not in chosen and (cap is None or least[trainer.owner] + trainer.min_nodes <= cap):
            take(trainer)
    over = min(
        sum(max(0, nodes - reach(owner)) for owner, nodes in most.items() if owner in caps),
        pool - sum(min(nodes, reach(owner)) for owner, nodes in most.items()),
    )
    for trainer in waiting:
        if over <= 0:
            break
        free = reach(trainer.owner) - most[trainer.owner]
        if trainer.name not in chosen and free >= trainer.min_nodes:
            over -= min(trainer.max_nodes, free)
            take(trainer)
    return chosen


def admit_for_idle(
    considered: Sequence[Trainer],
    counts: Sequence[int],
    waiting: Iterable[Trainer],
    limits: Limits,
    idle: int,
    wanted: int,
) -> tuple[Trainer, ...]:
    """The waiting trainers that can use nodes which a plan leaves idle, first come, first served.

    `counts` has the nodes of each trainer considered so far. Trainers are added until they can use `wanted` nodes.
    """
    held: defaultdict[str, int] = defaultdict(int)
    for trainer, nodes in zip(considered, counts, strict=True):
        held[trainer.owner] += nodes
    names = {trainer.name for trainer in considered}
    excluded = {name for group in limits.exclusive if group & names for name in group}
    chosen = []
    for trainer in waiting:
        if wanted <= 0:
            break
        cap = limits.owner_caps.get(trainer.owner)
        free = min(idle, wanted) if cap is None else min(idle, wanted, cap - held[trainer.owner])
        if trainer.min_nodes <= free and trainer.name not in names and trainer.name not in excluded:
            used = min(trainer.max_nodes, free)
            wanted -= used
            held[trainer.owner] += used
            chosen.append(trainer)
    return tuple(chosen)


def automatic_parallel(pool: float, queue: Sequence[Trainer]) -> int:
    """How many trainers to consider for a pool of this (mean) size.

    At least as many as can use the whole pool at their largest size, at most as many as fit at their smallest, and
    never fewer than `USUAL_PARALLEL`. The geometric mean of the two is as far from idle nodes as from starved trainers.
    """
    able = [trainer for trainer in queue if trainer.min_nodes <= pool]
    fewest = used = most = fitted = 0
    for trainer in able:
        if used < pool:
            used += trainer.max_nodes
            fewest += 1
        if fitted + trainer.min_nodes <= pool:
            fitted += trainer.min_nodes
            most += 1
    between = round(math.sqrt(fewest * max(most, fewest)))
    affordable = int(MOST_CELLS / max(pool, 1.0))
    return max(fewest, min(between, affordable), USUAL_PARALLEL)
