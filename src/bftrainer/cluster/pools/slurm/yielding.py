"""`YieldRule` decides which nodes the `slurm` pool leaves or gives up to waiting jobs.

It works on counts of nodes of one kind (`_NodeGroup`), so that its cost does not grow with jobs times nodes. It has no
clock; `pool.py` calls it in a thread and carries the plan out.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice

from bftrainer.cluster.pools.slurm.hardware import JobRequest, NodeKind, SiteLayout
from bftrainer.cluster.pools.slurm.read import Pilot, Rank, SlurmNode, WaitingJob
from bftrainer.util.text import natural

YIELD_S = 60.0
"""Seconds. If a job could have started for longer and has not, something other than missing nodes keeps it waiting."""
GIVE_UP_S = 10.0
"""Seconds for which pilots are given up for a waiting job: if it has not started by then, that did not help."""
_SLACK_S = 60.0
"""Slurm plans in steps of a minute: a job that is too long by less may still fit before the next one."""
_PLAN_S = 90.0
"""Seconds for which the last plan for a job counts. Slurm forgets plans in each cycle, until it has made them again."""
_STEP = 1.25
"""Windows before planned jobs are rounded up to powers of this, so that there are few different ones."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of the partition by their user."""

    free: Collection[str]
    ours: Sequence[str]
    """Nodes with pilots; those that are best to give up come first."""
    others: Collection[str] = ()
    """Nodes that only jobs can get: idle ones planned for a job, and those whose pilots are ending."""


def sort_nodes(
    nodes: Mapping[str, SlurmNode],
    free: Collection[str],
    kept: Mapping[str, Pilot],
    pilots: Iterable[Pilot],
    used: Collection[str] = (),
) -> Nodes:
    """Return the nodes by their user.

    `kept` has the pilot of each node, `pilots` also those that are ending. Nodes in `used` have a trainer and are given
    up last. A node that a job has is not ours because a pilot waits for it.
    """
    ending = {pilot.node for pilot in pilots if pilot.on_its_way_out}
    ours = [
        node
        for node, pilot in kept.items()
        if node not in ending
        and not (pilot.state == "waiting" and node in nodes and not nodes[node].free(planned=True))
    ]
    planned = {name for name, node in nodes.items() if name not in kept and node.free(planned=True)}
    return Nodes(
        free,
        sorted(ours, key=lambda node: (kept[node].state != "waiting", node in used, natural(node))),
        (ending | planned).difference(free),
    )


@dataclass(frozen=True, slots=True)
class YieldPlan:
    """Nodes that the pool leaves or gives up to waiting jobs."""

    leave: frozenset[str] = frozenset()
    """Free nodes that stay free."""
    give: tuple[str, ...] = ()
    """Nodes whose pilots must be given up now."""
    again: bool = False
    """Whether to look again soon: a job waits for nodes that are being given up."""


@dataclass(frozen=True, slots=True)
class _Window:
    """The time until a job that Slurm plans on a node."""

    seconds: float
    partitions: frozenset[str]
    """The partitions of the planned job: it goes before their jobs of lower priority."""

    def lets(self, job: WaitingJob) -> bool:
        """Return whether a job of any rank may start before the planned one."""
        return (
            job.limit_s is None
            or job.limit_s <= self.seconds + _SLACK_S
            or self.partitions.isdisjoint(job.request.partitions)
        )


@dataclass(slots=True)
class _NodeGroup:
    """Nodes of one kind, with the same time until a planned job. `total` counts all, the others what is left."""

    kind: NodeKind | None
    window: _Window | None
    rank: Rank = (0, 0)
    """The lowest rank of the jobs that are planned on these nodes."""
    total: int = 0
    free: dict[str, None] = field(default_factory=dict)
    others: dict[str, None] = field(default_factory=dict)
    ours: dict[str, None] = field(default_factory=dict)

    def fits(self, request: JobRequest) -> bool:
        return self.kind is None or self.kind.fits(request)

    def lets(self, job: WaitingJob) -> bool:
        return self.window is None or self.window.lets(job)


@dataclass(slots=True)
class _Taken:
    """Nodes that a job is to have."""

    free: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    ours: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Wants:
    """Nodes that a job could use: how many, and from how many groups of its reach."""

    groups: int
    nodes: int


class _Reach:
    """The groups that fit a request and a time limit: first those for every job, then those for jobs of high rank."""

    def __init__(self, groups: Iterable[_NodeGroup], job: WaitingJob) -> None:
        fitting = [group for group in groups if group.fits(job.request)]
        always = [group for group in fitting if group.lets(job)]
        ranked = sorted((group for group in fitting if not group.lets(job)), key=lambda group: group.rank)
        self.groups = (*always, *ranked)
        self.exhausted = False
        """Whether nothing is left in any of the groups."""
        self._always = len(always)
        self._ranks = [group.rank for group in ranked]
        self._totals = list(accumulate((group.total for group in self.groups), initial=0))
        cpus = (group.kind.cpus if group.kind is not None else 0 for group in self.groups)
        self._cpus = list(accumulate(cpus, max, initial=0))

    def of(self, job: WaitingJob) -> tuple[int, int, int]:
        """Return how many of the groups a job may use, their number of nodes, and the CPUs of the largest node."""
        count = self._always + bisect_right(self._ranks, job.rank)
        return count, self._totals[count], self._cpus[count]


class _Stock:
    """The nodes that waiting jobs could get, in groups."""

    def __init__(self, nodes: Nodes, layout: SiteLayout, plans: Mapping[str, tuple[_Window, Rank]]) -> None:
        self.group_of: dict[str, _NodeGroup] = {}
        groups: dict[tuple[int, _Window | None], _NodeGroup] = {}
        for part, names in (("free", nodes.free), ("others", nodes.others), ("ours", nodes.ours)):
            for node in names:
                if node in self.group_of:
                    continue
                kind = layout.kinds.get(node)
                window, rank = plans.get(node, (None, (0, 0)))
                key = (id(kind), window)
                group = groups.get(key)
                if group is None:
                    group = groups[key] = _NodeGroup(kind, window, rank)
                group.rank = min(group.rank, rank)
                group.total += 1
                getattr(group, part)[node] = None
                self.group_of[node] = group
        self._groups = tuple(groups.values())
        self._reaches: dict[tuple[JobRequest, float | None], _Reach] = {}

    def reach(self, job: WaitingJob) -> _Reach:
        """Return the groups that jobs with this request and time limit can use."""
        key = (job.request, job.limit_s)
        reach = self._reaches.get(key)
        if reach is None:
            reach = self._reaches[key] = _Reach(self._groups, job)
        return reach

    def within(self, job: WaitingJob, inside: Iterable[str]) -> WaitingJob:
        """Return a job of a reservation as one that requires as many nodes of the reservation, first the free ones."""
        here = sorted((node for node in inside if node in self.group_of), key=self._is_taken)
        chosen = here[: job.nodes] if len(here) >= job.nodes else inside  # too few: it cannot start
        return replace(job, required=job.required or frozenset(chosen), tasks=1)

    def _is_taken(self, node: str) -> bool:
        return node not in self.group_of[node].free

    def take(self, job: WaitingJob, reach: _Reach, wants: _Wants, count: int, *, with_ours: bool) -> _Taken:
        """Take nodes for a job out: required ones, then free ones, ending ones and, last, those of pilots."""
        taken = _Taken()
        parts = ("free", "others", "ours") if with_ours else ("free", "others")
        for node in job.required:
            count -= 1
            for part in parts:
                if getattr(self.group_of[node], part).pop(node, node) is None:
                    getattr(taken, part).append(node)
        if reach.exhausted:
            return taken
        for part in parts:
            for group in reach.groups[: wants.groups]:
                if count <= 0:
                    return taken
                left = getattr(group, part)
                if left:
                    mine = list(islice(left, count))
                    for node in mine:
                        del left[node]
                    getattr(taken, part).extend(mine)
                    count -= len(mine)
        reach.exhausted = count > 0 and with_ours and wants.groups == len(reach.groups)
        return taken


@dataclass(slots=True)
class YieldRule:
    """Leaves idle nodes to waiting jobs that could start on them, and remembers since when they could.

    Slurm takes nodes back by itself, but not twice for the same job within `KillWait` and `MessageTimeout`: where one
    job gets nodes that were cleared for another, that other job would wait for 10 to 40 s. So missing nodes are given
    up as soon as this is noticed: a job that finds free nodes in Slurm's next scheduling cycle does not wait for a
    preemption at all.
    """

    partitions: Collection[str] = ()
    """Partitions whose jobs count; empty: all."""
    _since: dict[str, float] = field(default_factory=dict)
    _planned: dict[str, tuple[float, WaitingJob]] = field(default_factory=dict)
    """The last plan for each job that waits, and when it was seen."""

    def plan(
        self, now: float, wall: float, queue: Sequence[WaitingJob], nodes: Nodes, layout: SiteLayout, soon_s: float
    ) -> YieldPlan:
        """Return the plan for the jobs in the `queue`. `soon_s`: how near a planned start must be.

        A job could start if there are enough idle nodes, nodes with pilots, and nodes whose pilots are ending, that fit
        it and on which it does not delay a job of higher priority. `now` is monotonic, `wall` the time of day.
        """
        if self.partitions:
            queue = [job for job in queue if not job.request.partitions.isdisjoint(self.partitions)]
        stock = _Stock(nodes, layout, _plans(self._with_plans(now, queue), wall))
        leave, give = set[str](), dict[str, None]()
        could: dict[str, float] = {}
        again = False
        for job in sorted(queue, key=lambda job: job.rank, reverse=True):
            meant = 0
            if job.planned_on and (job.start is None or job.start - wall < soon_s):
                for node in job.planned_on:
                    group = stock.group_of.get(node)
                    if group is not None and node in group.free:
                        del group.free[node]
                        leave.add(node)
                        meant += node not in job.required
            inside = layout.reservations.get(job.request.reservation)
            if inside is not None:
                job = stock.within(job, inside)
            reach = stock.reach(job)
            wants = _wants(job, reach, stock)
            if wants is None:
                continue
            could[job.job] = self._since.get(job.job, now)
            waited_s = now - could[job.job]
            if waited_s >= YIELD_S:
                continue
            taken = stock.take(job, reach, wants, max(0, wants.nodes - meant), with_ours=waited_s < GIVE_UP_S)
            leave.update(taken.free)
            give.update(dict.fromkeys(taken.ours))
            again |= waited_s < GIVE_UP_S and bool(taken.ours or taken.others)
        self._since = could
        return YieldPlan(frozenset(leave), tuple(node for node in nodes.ours if node in give), again)

    def _with_plans(self, now: float, queue: Sequence[WaitingJob]) -> list[WaitingJob]:
        """Return the jobs for which Slurm has, or had a moment ago, a plan."""
        known = self._planned
        self._planned = {}
        for job in queue:
            if job.planned_on and job.start is not None:
                self._planned[job.job] = (now, job)
            elif (last := known.get(job.job)) is not None and now - last[0] < _PLAN_S:
                self._planned[job.job] = last
        return [job for _, job in self._planned.values()]


def _plans(queue: Iterable[WaitingJob], wall: float) -> dict[str, tuple[_Window, Rank]]:
    """Return for each node the window before the first job that Slurm plans there, and that job's rank."""
    first: dict[str, tuple[_Window, Rank]] = {}
    planned = [job for job in queue if job.start is not None and job.start > wall]
    for job in sorted(planned, key=lambda job: job.start or 0.0):
        assert job.start is not None
        step = math.ceil(math.log(max(job.start - wall, _SLACK_S) / _SLACK_S, _STEP))
        plan = (_Window(_SLACK_S * _STEP**step, job.request.partitions), job.rank)
        for node in job.planned_on:
            first.setdefault(node, plan)
    return first


def _wants(job: WaitingJob, reach: _Reach, stock: _Stock) -> _Wants | None:
    """Return the nodes that a job, or all jobs of an array, could use now; None if it could not start."""
    if not all(node in stock.group_of for node in job.required):
        return None
    groups, fitting, largest = reach.of(job)
    each = max(1, job.nodes, math.ceil(job.cpus / largest) if largest else 0)
    if max(fitting, len(job.required)) < each:
        return None
    return _Wants(groups, each * max(1, min(job.tasks, fitting // each)))
