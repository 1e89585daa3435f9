"""`YieldRule` decides which nodes the `slurm` pool leaves or gives up to waiting jobs.

It works on counts of nodes of one kind (`_NodeGroup`), so that its cost does not grow with jobs times nodes. It has no
clock; `pool.py` calls it in a thread and carries the plan out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from bftrainer.cluster.pools.slurm.hardware import JobRequest, NodeKind, SiteLayout
from bftrainer.cluster.pools.slurm.read import Pilot, Rank, SlurmNode, WaitingJob
from bftrainer.util.text import natural

YIELD_S = 60.0
"""Seconds. If a job could have started for longer and has not, something other than missing nodes keeps it waiting."""
GIVE_UP_S = 10.0
"""Seconds for which pilots are given up for a waiting job: if it has not started by then, that did not help."""
_SLACK_S = 60.0
"""Slurm plans in steps of a minute: a job that is too long by less may still fit before the next one."""
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
    up last.
    """
    ending = {pilot.node for pilot in pilots if pilot.on_its_way_out}
    ours = [node for node in kept if node not in ending]
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

    def lets(self, job: WaitingJob, rank: Rank) -> bool:
        """Return whether a job may start before the planned one, which has a `rank`."""
        return (
            job.limit_s is None
            or job.limit_s <= self.seconds + _SLACK_S
            or job.rank >= rank
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
        return self.window is None or self.window.lets(job, self.rank)


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
        self.groups = tuple(groups.values())
        self._fitting: dict[JobRequest, tuple[_NodeGroup, ...]] = {}

    def fitting(self, job: WaitingJob) -> list[_NodeGroup]:
        """Return the groups whose nodes a job could use now."""
        request = job.request
        known = self._fitting.get(request)
        if known is None:
            known = self._fitting[request] = tuple(group for group in self.groups if group.fits(request))
        return [group for group in known if group.lets(job)]


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

    def plan(
        self, now: float, wall: float, queue: Sequence[WaitingJob], nodes: Nodes, layout: SiteLayout, soon_s: float
    ) -> YieldPlan:
        """Return the plan for the jobs in the `queue`. `soon_s`: how near a planned start must be.

        A job could start if there are enough idle nodes, nodes with pilots, and nodes whose pilots are ending, that fit
        it and on which it does not delay a job of higher priority. `now` is monotonic, `wall` the time of day.
        """
        if self.partitions:
            queue = [job for job in queue if not job.request.partitions.isdisjoint(self.partitions)]
        stock = _Stock(nodes, layout, _plans(queue, wall))
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
                        meant += 1
            groups = stock.fitting(job)
            wants = _nodes_wanted(job, groups, stock)
            if not wants:
                continue
            could[job.job] = self._since.get(job.job, now)
            waited_s = now - could[job.job]
            if waited_s >= YIELD_S:
                continue
            taken = _take(job, groups, stock, max(0, wants - meant), with_ours=waited_s < GIVE_UP_S)
            leave.update(taken.free)
            give.update(dict.fromkeys(taken.ours))
            again |= waited_s < GIVE_UP_S and bool(taken.ours or taken.others)
        self._since = could
        return YieldPlan(frozenset(leave), tuple(node for node in nodes.ours if node in give), again)


@dataclass(slots=True)
class _Taken:
    """Nodes that a job is to have."""

    free: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    ours: list[str] = field(default_factory=list)


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


def _nodes_wanted(job: WaitingJob, groups: Sequence[_NodeGroup], stock: _Stock) -> int:
    """Return how many nodes a job, or all jobs of an array, could use now; 0 if it could not start."""
    if not all(node in stock.group_of for node in job.required):
        return 0
    fitting = sum(group.total for group in groups)
    largest = max((group.kind.cpus if group.kind is not None else 0 for group in groups), default=0)
    each = max(1, job.nodes, math.ceil(job.cpus / largest) if largest else 0)
    if max(fitting, len(job.required)) < each:
        return 0
    return each * max(1, min(job.tasks, fitting // each))


def _take(job: WaitingJob, groups: Sequence[_NodeGroup], stock: _Stock, count: int, *, with_ours: bool) -> _Taken:
    """Take nodes for a job out of the stock: required ones, then free ones, ending ones and, last, those of pilots."""
    taken = _Taken()
    for node in job.required:
        count -= 1
        for name, part in _parts(stock.group_of[node], with_ours=with_ours):
            if node in part:
                del part[node]
                getattr(taken, name).append(node)
    for index in range(3 if with_ours else 2):
        for group in groups:
            if count <= 0:
                return taken
            name, part = list(_parts(group, with_ours=True))[index]
            mine = list(islice(part, count))
            for node in mine:
                del part[node]
            getattr(taken, name).extend(mine)
            count -= len(mine)
    return taken


def _parts(group: _NodeGroup, *, with_ours: bool) -> Iterator[tuple[str, dict[str, None]]]:
    yield "free", group.free
    yield "others", group.others
    if with_ours:
        yield "ours", group.ours
