"""Rules of the `slurm` pool: which nodes get pilots, and which pilots are kept, cancelled or made short.

They decide on what `read.py` has read, and have no clock of their own; `pool.py` carries the decisions out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from bftrainer.cluster.pools.slurm.figures import CancelReason, EndReason
from bftrainer.cluster.pools.slurm.hardware import NodeKind, SiteLayout, has_features
from bftrainer.cluster.pools.slurm.read import Pilot, SlurmNode
from bftrainer.cluster.pools.slurm.runner import is_refusal
from bftrainer.cluster.pools.slurm.settings import SlurmSettings
from bftrainer.util.backoff import Backoff

RETRY_S, LONGEST_RETRY_S = 5.0, 300.0
"""Seconds to wait after a pilot has failed, at first and at most."""
LONGEST_PAUSE_S = 60.0
"""Most seconds without a submission after several nodes have refused."""
SHORT_AFTER_S = 15.0
"""Seconds of waiting after which a pilot is taken not to fit before a job that Slurm plans on its node."""
SHORT_FOR_S = 900.0
"""Seconds for which the pilots of such a node are short."""
NO_SUCCESSORS: Mapping[str, str] = MappingProxyType({})
_REFUSALS = 3
"""If this many nodes refuse, and none accepts in between, the cause may not be the nodes."""


def usable(nodes: Mapping[str, SlurmNode], settings: SlurmSettings) -> dict[str, SlurmNode]:
    """Return the nodes that the settings allow."""
    only, never = settings.only, settings.never
    return {
        name: node
        for name, node in nodes.items()
        if name not in never and (not only or name in only) and has_features(node.features, settings.constraint)
    }


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


def sort_pilots(pilots: Iterable[Pilot], mark: str, successors: Mapping[str, str] = NO_SUCCESSORS) -> Sorted:
    """Keep one pilot per node, among those whose agents connect to this controller.

    `successors` has the ids of pilots to which nodes were handed over. They come first, and running pilots come before
    waiting ones.
    """
    kept: dict[str, Pilot] = {}
    cancel: list[Cancellation] = []
    ended: dict[int, Pilot] = {}

    def rank(pilot: Pilot) -> tuple[bool, bool, int]:
        return successors.get(pilot.node, pilot.id) != pilot.id, pilot.state != "running", pilot.job

    for pilot in sorted(pilots, key=rank):
        if pilot.state in ("ending", "ended"):
            ended[pilot.job] = pilot
        elif pilot.mark and pilot.mark != mark:
            cancel.append(Cancellation(pilot, "other address", "its agent looks for this controller where it is not"))
        elif pilot.state == "frozen":
            cancel.append(Cancellation(pilot, "suspended", "it is suspended, and would keep its node's memory"))
        elif pilot.node in kept:
            other = kept[pilot.node]
            if successors.get(pilot.node) == other.id:
                cancel.append(Cancellation(pilot, "handed over", f"its node goes to {other.owner}"))
            else:
                cancel.append(Cancellation(pilot, "another pilot", f"job {other.job} is on its node already"))
        else:
            kept[pilot.node] = pilot
    return Sorted(kept, tuple(cancel), ended)


def choose(free: Sequence[str], leave: Collection[str], least_free: int) -> tuple[str, ...]:
    """Return the free nodes to use, in order: none in `leave`, and only so many that `least_free` stay free."""
    left = [node for node in free if node not in leave]
    return tuple(left[: max(0, len(left) - max(0, least_free - (len(free) - len(left))))])


class Refusals:
    """Decides which nodes to try after submissions were refused.

    A node that refuses is tried less and less often (`Keeper`) and keeps no pilot from other nodes. Nodes of a kind
    that has not refused come first, then nodes that have not refused themselves. If several nodes refuse, of every kind
    there is, with no success in between, the cause is probably not the nodes: those kinds wait, and then one node is
    tried at a time.
    """

    def __init__(self) -> None:
        self.problem = ""
        """Why submissions are paused; empty if they are not."""
        self.nodes: set[str] = set()
        """Nodes that refused, and have accepted none since."""
        self.until = -math.inf
        """The end of the pause."""
        self._kinds: set[NodeKind | None] = set()
        self._in_a_row: set[str] = set()
        """Nodes that refused since the last success of such a kind."""
        self._pauses = 0
        self._silent = False
        """Whether the last failure was no refusal: Slurm did not answer, so that the pause holds for all nodes."""
        self._last = ""

    def order(self, nodes: Sequence[str], layout: SiteLayout, now: float) -> tuple[str, ...]:
        """Return the nodes to try now, the most promising ones first."""
        if now < self.until and self._silent:
            return ()
        fresh = [node for node in nodes if layout.kinds.get(node) not in self._kinds]
        if now < self.until or not self._kinds:
            return tuple(fresh)
        refused = sorted(
            (node for node in nodes if layout.kinds.get(node) in self._kinds), key=lambda node: node in self.nodes
        )
        return (*fresh, *(refused[:1] if self._pauses else refused))

    def refused(self, node: str, problem: str, now: float, candidates: Collection[str], layout: SiteLayout) -> bool:
        """Record a failed submission; `candidates` are the nodes that wait for pilots. Returns whether that is news."""
        news, self._last = problem != self._last, problem
        self.nodes.add(node)
        self._silent = not is_refusal(problem)
        if not self._silent:
            self._in_a_row.add(node)
            self._kinds.add(layout.kinds.get(node))
        others = any(layout.kinds.get(other) not in self._kinds for other in candidates)
        if self._silent or (self._pauses and not others) or (len(self._in_a_row) >= _REFUSALS and not others):
            self._pauses += 1
            self.problem, self.until = problem, now + Backoff(RETRY_S, LONGEST_PAUSE_S).wait_s(self._pauses)
        return news

    def accepted(self, node: str, layout: SiteLayout) -> None:
        """Record a submission that succeeded."""
        self.nodes.discard(node)
        if self._silent or layout.kinds.get(node) in self._kinds:
            nodes = self.nodes
            self.forget()
            self.nodes = nodes

    def keep(self, nodes: Container[str]) -> None:
        """Forget all nodes except these."""
        self.nodes = {node for node in self.nodes if node in nodes}

    def forget(self) -> None:
        """Forget all, because the cause may be over."""
        self.nodes, self._kinds, self._in_a_row = set(), set(), set()
        self.problem, self._last, self.until, self._pauses, self._silent = "", "", -math.inf, 0, False


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
