"""Splits the CPU cores of a node into even shares, one per rank, with as many cores near a rank's GPU as possible.

A pure function of values; `rank_places.py` calls it. Cores that are near the same ranks form a group. How many cores of
each group a rank gets is a maximum flow, found by augmenting paths: a rank whose near groups are taken may have another
rank move on to a group that it is near to as well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def core_shares(cores: Sequence[int], near: Sequence[Collection[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the share of each rank, in ascending order. `near` has the cores near each rank, empty if unknown.

    Shares are disjoint and differ by at most one core. Within a group, a share is a run of cores in the given order.
    With fewer cores than ranks, all ranks share all cores.
    """
    ranks = len(near)
    if len(cores) < ranks:
        return (tuple(sorted(cores)),) * ranks
    groups = _CoreGroups(cores, near)
    share, extra = divmod(len(cores), ranks)
    for _ in range(share):
        for rank in range(ranks):  # in turns: ranks that are near the same few cores get as many of them each
            groups.take_near(rank)
    larger: set[int] = set()
    for rank in range(ranks):
        if len(larger) < extra and groups.held(rank) == share and groups.take_near(rank):
            larger.add(rank)
    larger.update([rank for rank in range(ranks) if rank not in larger][: extra - len(larger)])
    for rank in range(ranks):
        groups.fill(rank, share + (rank in larger) - groups.held(rank))
    return groups.shares()


class _CoreGroups:
    """The groups of cores, and how many cores of each group every rank holds."""

    def __init__(self, cores: Sequence[int], near: Sequence[Collection[int]]) -> None:
        by_ranks: dict[frozenset[int], list[int]] = {}
        sets = [frozenset(near_rank) for near_rank in near]
        for core in cores:
            by_ranks.setdefault(frozenset(rank for rank, own in enumerate(sets) if core in own), []).append(core)
        self._cores = list(by_ranks.values())
        self._near = [[group for group, near_to in enumerate(by_ranks) if rank in near_to] for rank in range(len(near))]
        self._free = [len(group) for group in self._cores]
        self._held = [[0] * len(self._cores) for _ in near]

    def held(self, rank: int) -> int:
        """Return how many cores a rank holds."""
        return sum(self._held[rank])

    def take_near(self, rank: int) -> bool:
        """Give a rank one more core near it; others keep as many as they have. Return whether that is possible."""
        came_from: dict[int, tuple[int, int] | None] = {rank: None}
        """For each rank on a path: the rank that takes one of its cores, and the group of that core."""
        queue = [rank]
        for taker in queue:
            for group in self._near[taker]:
                if self._free[group]:
                    self._free[group] -= 1
                    self._pass_on(taker, group, came_from)
                    return True
                for holder, held in enumerate(self._held):
                    if held[group] and holder not in came_from:
                        came_from[holder] = (taker, group)
                        queue.append(holder)
        return False

    def _pass_on(self, taker: int, group: int, came_from: dict[int, tuple[int, int] | None]) -> None:
        """Have each rank on the path take a core of the next group, and leave one to the rank before it."""
        self._held[taker][group] += 1
        while (step := came_from[taker]) is not None:
            before, left = step
            self._held[taker][left] -= 1
            self._held[before][left] += 1
            taker = before

    def fill(self, rank: int, count: int) -> None:
        """Give a rank so many more cores, wherever some are free."""
        for group, free in enumerate(self._free):
            taken = min(free, count)
            self._free[group] -= taken
            self._held[rank][group] += taken
            count -= taken

    def shares(self) -> tuple[tuple[int, ...], ...]:
        """Return the cores of each rank."""
        shares: list[list[int]] = [[] for _ in self._held]
        for group, cores in enumerate(self._cores):
            start = 0
            for rank, held in enumerate(self._held):
                shares[rank] += cores[start : start + held[group]]
                start += held[group]
        return tuple(tuple(sorted(share)) for share in shares)
