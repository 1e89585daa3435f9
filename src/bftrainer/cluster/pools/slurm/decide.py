"""Rules of the `slurm` pool: which nodes get pilots, which pilots are kept, cancelled, given up or made short.

They decide on what `read.py` has read, and have no clock of their own; `pool.py` carries the decisions out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bftrainer.cluster.pools.slurm.figures import CancelReason, EndReason
from bftrainer.cluster.pools.slurm.read import Pilot, SlurmNode, WaitingJob
from bftrainer.cluster.pools.slurm.settings import SlurmSettings
from bftrainer.util.backoff import Backoff
from bftrainer.util.text import natural

RETRY_S, LONGEST_RETRY_S = 5.0, 300.0
"""Seconds to wait after a pilot has failed, at first and at most."""
YIELD_S = 60.0
"""Seconds. If a job could have started for longer and has not, something other than missing nodes keeps it waiting."""

GIVE_UP_S = 10.0
"""Seconds for which pilots are given up for a waiting job: if it has not started by then, that did not help."""
SHORT_AFTER_S = 15.0
"""Seconds of waiting after which a pilot is taken not to fit before a job that Slurm plans on its node."""
SHORT_FOR_S = 900.0
"""Seconds for which the pilots of such a node are short."""
_REFUSALS = 3
"""After this many refused submissions in a row, or two for the same reason, the cause is not the node."""


def has_features(node: SlurmNode, constraint: str) -> bool:
    """Return whether a node has the features of `constraint`: names joined by `&`, which binds first, and `|`."""
    return any(set(each.split("&")) <= node.features for each in constraint.split("|")) if constraint else True


def usable(nodes: Mapping[str, SlurmNode], settings: SlurmSettings) -> dict[str, SlurmNode]:
    """Return the nodes that the settings allow."""
    only, never = settings.only, settings.never
    return {
        name: node
        for name, node in nodes.items()
        if name not in never and (not only or name in only) and has_features(node, settings.constraint)
    }


def free_nodes(nodes: Mapping[str, SlurmNode], settings: SlurmSettings) -> list[str]:
    """Return the nodes that the settings allow and that a pilot could start on now."""
    return [name for name, node in usable(nodes, settings).items() if node.free(settings.planned)]


def fate(pilot: Pilot | None) -> tuple[str, EndReason]:
    """Return how a pilot ended, in words and as a kind. None: Slurm no longer knows it."""
    if pilot is None:
        return "its pilot has vanished", "failed"
    if pilot.preempted or pilot.how == "PREEMPTED":
        return "its pilot was preempted", "preempted"
    return f"its pilot has ended: {pilot.how.lower()}", "time limit" if pilot.how == "TIMEOUT" else "failed"


@dataclass(frozen=True, slots=True)
class Cancellation:
    """A pilot to be cancelled, and why: `reason` for statistics, `why` in words."""

    pilot: Pilot
    reason: CancelReason
    why: str


@dataclass(frozen=True, slots=True)
class Sorted:
    """Pilots by what is to be done with them."""

    kept: Mapping[str, Pilot]
    """One pilot per node."""
    cancel: tuple[Cancellation, ...]
    ended: Mapping[int, Pilot]


def sort_pilots(pilots: Iterable[Pilot], mark: str) -> Sorted:
    """Keep one pilot per node, among those whose agents connect to this controller.

    Running pilots come before waiting ones.
    """
    kept: dict[str, Pilot] = {}
    cancel: list[Cancellation] = []
    ended: dict[int, Pilot] = {}
    for pilot in sorted(pilots, key=lambda pilot: (pilot.state != "running", pilot.job)):
        if pilot.state in ("ending", "ended"):
            ended[pilot.job] = pilot
        elif pilot.mark and pilot.mark != mark:
            cancel.append(Cancellation(pilot, "other address", "its agent looks for this controller where it is not"))
        elif pilot.state == "frozen":
            cancel.append(Cancellation(pilot, "suspended", "it is suspended, and would keep its node's memory"))
        elif pilot.node in kept:
            cancel.append(Cancellation(pilot, "another pilot", f"job {kept[pilot.node].job} is on its node already"))
        else:
            kept[pilot.node] = pilot
    return Sorted(kept, tuple(cancel), ended)


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of the partition by their user."""

    free: Collection[str]
    ours: Sequence[str]
    """Nodes with pilots; those that are best to give up come first."""
    others: Collection[str] = ()
    """Nodes that only jobs can get: idle ones planned for a job, and those whose pilots are ending."""


def sort_nodes(
    nodes: Mapping[str, SlurmNode], free: Collection[str], kept: Mapping[str, Pilot], pilots: Iterable[Pilot]
) -> Nodes:
    """Return the nodes by their user. `kept` has the pilot of each node, `pilots` also those that are ending."""
    ending = {pilot.node for pilot in pilots if pilot.on_its_way_out}
    ours = [node for node in kept if node not in ending]
    planned = {name for name, node in nodes.items() if node.free(planned=True) and name not in kept}
    return Nodes(
        free,
        sorted(ours, key=lambda node: (kept[node].state != "waiting", natural(node))),
        (ending | planned).difference(free),
    )


@dataclass(frozen=True, slots=True)
class YieldPlan:
    """Nodes that the pool leaves or gives up to waiting jobs."""

    reserved: frozenset[str]
    """Free nodes on which Slurm plans to start one of the jobs."""
    more: int
    """Number of further nodes that must stay free for jobs that could start."""
    give: tuple[str, ...]
    """Nodes whose pilots must be given up now."""
    again: bool
    """Whether to look again soon: a job waits that could start."""


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
        self,
        now: float,
        wall: float,
        queue: Sequence[WaitingJob],
        nodes: Nodes,
        layout: Mapping[str, frozenset[str]],
        soon_s: float,
    ) -> YieldPlan:
        """Return the plan for the jobs in the `queue`. `soon_s`: how near a planned start must be.

        A job could start if there are enough idle nodes, nodes with pilots, and nodes whose pilots are ending. `now` is
        monotonic, `wall` the time of day.
        """
        reserved, give = set[str](), dict[str, None]()
        more = 0
        could: dict[str, float] = {}
        spare = {*nodes.free, *nodes.others}
        for job in queue:
            if self.partitions and not set(self.partitions) & set(job.partitions):
                continue
            is_soon = job.start is None or job.start - wall < soon_s
            meant = job.planned_on.intersection(nodes.free) if is_soon else frozenset()
            reserved |= meant
            # Also if it is planned for later: Slurm did not count the nodes that it could take from pilots.
            reach = frozenset().union(*(layout.get(name, ()) for name in job.partitions))
            ours = [node for node in nodes.ours if node in reach]
            if job.nodes > len(reach.intersection(nodes.free)) + len(reach.intersection(nodes.others)) + len(ours):
                continue
            could[job.job] = self._since.get(job.job, now)
            waited_s = now - could[job.job]
            if waited_s >= YIELD_S:
                continue
            more += max(0, (len(reach.intersection(nodes.free)) if job.several else job.nodes) - len(meant))
            mine = sorted(reach & spare)[: job.nodes]
            spare.difference_update(mine)
            lacking = job.nodes - len(mine)
            if waited_s < GIVE_UP_S:
                give.update(dict.fromkeys([node for node in ours if node not in give][:lacking]))
        self._since = could
        again = any(now - since < GIVE_UP_S for since in could.values())
        return YieldPlan(frozenset(reserved), more, tuple(give), again)


def choose(free: Sequence[str], reserved: Collection[str], more: int, least_free: int) -> tuple[str, ...]:
    """Return the free nodes to use, in order: none in `reserved`, and only so many that enough others stay free."""
    left = [node for node in free if node not in reserved]
    return tuple(left[: max(0, len(left) - max(more, least_free - (len(free) - len(left))))])


@dataclass(slots=True)
class Refusals:
    """Failed submissions: how many in a row, the last reason, and until when to submit nothing."""

    count: int = 0
    problem: str = ""
    until: float = -math.inf

    def refused(self, problem: str, now: float) -> bool:
        """Record a failed submission. Returns whether the reason is new."""
        news = problem != self.problem
        self.count, self.problem = self.count + 1, problem
        if self.count >= _REFUSALS or not news:
            self.until = now + Backoff(RETRY_S, LONGEST_RETRY_S).wait_s(self.count - 1)
        return news

    def forget(self) -> None:
        """Reset, after a submission succeeded or because the reason may be over."""
        self.count, self.problem, self.until = 0, "", -math.inf


class ShortPilots:
    """Decides which nodes get short pilots.

    A pilot that keeps waiting for an idle node does not fit before a job that Slurm plans there. For a while the pilots
    of that node are then submitted with a time that may be cut down (`time_min`).
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        """Time since when a pilot waits, by job."""
        self._until: dict[str, float] = {}
        """Time until when pilots must be short, by node."""

    def waits(self, pilot: Pilot, now: float) -> bool:
        """Record that a pilot waits for an idle node. Returns whether a short one should replace it."""
        since = self._since.setdefault(pilot.job, now)
        if now - since < SHORT_AFTER_S or pilot.node in self._until:
            return False  # a waiting short pilot is given up after `join_s`
        self._until[pilot.node] = now + SHORT_FOR_S
        return True

    def keep(self, jobs: Collection[int]) -> None:
        """Forget all pilots except these."""
        self._since = {job: since for job, since in self._since.items() if job in jobs}

    def is_short(self, node: str, now: float) -> bool:
        """Return whether the next pilot of a node must be short."""
        until = self._until.get(node)
        if until is not None and until <= now:
            del self._until[node]
        return node in self._until
