"""Functions here decide which pilots and nodes the `slurm` pool has.

They parse Slurm's output and are pure. `commands.py` runs the commands that print it; `pool.py` carries the decisions
out. Unexpected output is a `ValueError` or `InputError`: what cannot be parsed must not look like a change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bftrainer.cluster.pools.keeper import NODE_NAME
from bftrainer.cluster.pools.slurm.settings import SlurmSettings, read_duration
from bftrainer.core.hostlist import expand
from bftrainer.traces.recorder.states import is_idle, sinfo_rows
from bftrainer.util.backoff import Backoff
from bftrainer.util.text import natural

PREFIX = "bftrainer-"
"""Prefix of the names of all pilots."""
RETRY_S, LONGEST_RETRY_S = 5.0, 300.0
"""Seconds to wait after a pilot has failed, at first and at most."""
COURTESY_S = 60.0
"""Seconds. If a job could have started for longer and has not, something other than missing nodes keeps it waiting."""

GIVE_WAY_S = 10.0
"""Seconds for which pilots are given up for a waiting job: if it has not started by then, that did not help."""

PILOT_FIELDS = ("JobID", "State", "ReqNodes", "NodeList", "TimeLeft", "PreemptTime", "Reason", "Comment")
QUEUE_FORMAT = "%i|%P|%D|%r|%Y|%S|%j"

State = Literal["waiting", "running", "frozen", "ending", "ended"]
_STATES: Mapping[str, State] = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"), "waiting"),
    **dict.fromkeys(("RUNNING", "CONFIGURING", "SIGNALING", "STAGE_OUT", "RESIZING"), "running"),
    **dict.fromkeys(("SUSPENDED", "STOPPED"), "frozen"),
    "COMPLETING": "ending",
}
_ASKED_BACK = frozenset({"DRAIN", "DRAINED", "DRAINING", "DRNG", "MAINT", "FAIL", "FAILING", "FAILG", "REBOOT"})
"""States of a node that must become empty. Other states mean nothing: a restarted slurmctld knows no node's state."""
_ASKED_BACK_BY = frozenset("$@^!%")
"""Suffixes of the state of a node that is wanted for maintenance, a reboot or power-off."""
_MAY_START = ("None", "Priority", "Resources", "")
_REFUSALS = 3
"""After this many refused submissions in a row, or two for the same reason, the cause is not the node."""
_ARRAY = re.compile(r"\d+_\[.*\]")
_STATE_WORD = re.compile(r"[A-Z_]+")
_UNKNOWN = ("", "N/A", "(null)", "None")


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A node of the partition."""

    name: str
    words: tuple[str, ...]
    """Its state, once per requested partition."""
    features: frozenset[str] = frozenset()

    def free(self, planned: bool = False) -> bool:
        """Return whether a job could start on it now; with `planned`, also if Slurm reserves it for a later job."""
        return is_idle(self.words) or (planned and all(_is_planned(word) for word in self.words))

    @property
    def may_stay(self) -> bool:
        """Whether a pilot that runs there may go on: the node has not been asked to become empty."""
        said = " ".join(self.words)
        return _ASKED_BACK.isdisjoint(_STATE_WORD.findall(said.upper())) and _ASKED_BACK_BY.isdisjoint(said)


@dataclass(frozen=True, slots=True)
class Pilot:
    """One of our jobs, as Slurm knows it."""

    job: int
    node: str
    state: State
    left_s: float | None = None
    """Seconds until its time limit; None if there is none."""
    reason: str = ""
    """Slurm's reason why the job waits."""
    mark: str = ""
    """Fingerprint of the controller that its agent connects to; empty if it cannot be known."""
    preempted: bool = False
    how: str = ""
    """Slurm's name of its state."""

    @property
    def on_its_way_out(self) -> bool:
        """Whether the pilot still has its node, but is ending or preempted."""
        return self.state == "ending" or (self.preempted and self.state == "running")


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A pending job that waits only for nodes."""

    job: str
    partitions: tuple[str, ...]
    nodes: int
    several: bool = False
    """True for a job array: there are more jobs of the kind."""
    planned_on: frozenset[str] = frozenset()
    """Nodes on which Slurm plans to start it."""
    start: float | None = None
    """Time at which Slurm plans to start it, in Unix seconds."""


def read_nodes(text: str) -> dict[str, SlurmNode]:
    """Parse the nodes in the output of `sinfo -N`: name, optional features, state."""
    words: dict[str, list[str]] = {}
    features: dict[str, frozenset[str]] = {}
    for row in sinfo_rows(text):
        words.setdefault(row[0], []).append(row[-1])
        features[row[0]] = frozenset(row[1].split(",")) if len(row) > 2 else frozenset()
    names = sorted((name for name in words if NODE_NAME.fullmatch(name)), key=natural)
    return {name: SlurmNode(name, tuple(words[name]), features[name]) for name in names}


def read_pilots(text: str) -> tuple[Pilot, ...]:
    """Parse the pilots in the output of `squeue -O`, with `PILOT_FIELDS` each followed by a bar."""
    pilots = []
    for row in _table(text, len(PILOT_FIELDS) + 1):
        job, word, asked, given, left, preempted, reason, comment, _ = row
        node = asked if NODE_NAME.fullmatch(asked) else given
        if not job.isdigit() or not _STATE_WORD.fullmatch(word):
            raise ValueError(f"no job and state in {'|'.join(row)[:80]!r}")
        if not NODE_NAME.fullmatch(node):
            continue  # it ended before it was given a node
        parts = comment.split(":")
        pilots.append(
            Pilot(
                int(job),
                node,
                _STATES.get(word, "ended"),
                None if left in ("UNLIMITED", "NOT_SET", "INVALID", *_UNKNOWN) else read_duration(left.lstrip("-")),
                "" if reason in _UNKNOWN else reason,
                parts[3] if len(parts) == 4 and parts[0] == "bftrainer" else "",
                preempted not in _UNKNOWN,
                word,
            )
        )
    return tuple(pilots)


def read_queue(text: str) -> tuple[WaitingJob, ...]:
    """Parse the jobs that wait for nodes in the output of `squeue -o` with `QUEUE_FORMAT`. Pilots do not count."""
    jobs = []
    for row in _table(text, QUEUE_FORMAT.count("|") + 1):
        job, partitions, nodes, reason, planned, start, name = row
        if name.startswith(PREFIX) or reason not in _MAY_START:
            continue
        if not nodes.isdigit():
            raise ValueError(f"no number of nodes in {'|'.join(row)[:80]!r}")
        where = frozenset() if planned in _UNKNOWN else frozenset(expand(planned))
        at = float(start) if start.isdigit() else None
        jobs.append(WaitingJob(job, tuple(partitions.split(",")), int(nodes), bool(_ARRAY.fullmatch(job)), where, at))
    return tuple(jobs)


def read_layout(text: str) -> dict[str, frozenset[str]]:
    """Parse the nodes of each partition in the output of `sinfo -o '%R|%N'`."""
    layout: dict[str, frozenset[str]] = {}
    for line in text.splitlines():
        name, bar, nodes = line.strip().partition("|")
        if not bar or not name:
            raise ValueError(f"no partition in {line[:80]!r}")
        layout[name] = layout.get(name, frozenset()) | frozenset(expand(nodes) if nodes not in _UNKNOWN else ())
    if not layout:
        raise ValueError("there is no partition")
    return layout


def _table(text: str, columns: int) -> list[list[str]]:
    """Parse rows of cells. The header must be there: without it, empty output would mean that there is no job."""
    header, *rows = [line.rstrip("\r") for line in text.split("\n")]
    if not header.startswith("JOBID|") or header.count("|") != columns - 1:
        raise ValueError(f"a table of jobs must begin with its header, but got {header[:80]!r}")
    cells = [[cell.strip() for cell in row.split("|", columns - 1)] for row in rows if row]
    for row in cells:
        if len(row) != columns:
            raise ValueError(f"no job in {'|'.join(row)[:80]!r}")
    return cells


def _is_planned(word: str) -> bool:
    return word.upper() in ("PLANNED", "PLND", "IDLE-", "IDLE+PLANNED", "IDLE")


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


def fate(pilot: Pilot | None) -> tuple[str, bool]:
    """Return how a pilot ended (None: Slurm no longer knows it), and whether the pilot is blameless."""
    if pilot is None:
        return "its pilot has vanished", False
    if pilot.preempted or pilot.how == "PREEMPTED":
        return "its pilot was preempted", True
    return f"its pilot has ended: {pilot.how.lower()}", pilot.how == "TIMEOUT"


@dataclass(frozen=True, slots=True)
class Sorted:
    """Pilots by what is to be done with them."""

    kept: Mapping[str, Pilot]
    """One pilot per node."""
    cancel: tuple[tuple[Pilot, str], ...]
    """Pilots to be cancelled, and why."""
    ended: Mapping[int, Pilot]


def sort_pilots(pilots: Iterable[Pilot], mark: str) -> Sorted:
    """Keep one pilot per node, among those whose agents connect to this controller.

    Running pilots come before waiting ones.
    """
    kept: dict[str, Pilot] = {}
    cancel: list[tuple[Pilot, str]] = []
    ended: dict[int, Pilot] = {}
    for pilot in sorted(pilots, key=lambda one: (one.state != "running", one.job)):
        if pilot.state in ("ending", "ended"):
            ended[pilot.job] = pilot
        elif pilot.mark and pilot.mark != mark:
            cancel.append((pilot, "its agent looks for this controller where it is not"))
        elif pilot.state == "frozen":
            cancel.append((pilot, "it is suspended, and would keep its node's memory"))
        elif pilot.node in kept:
            cancel.append((pilot, f"job {kept[pilot.node].job} is on its node already"))
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


@dataclass(frozen=True, slots=True)
class YieldPlan:
    """Nodes that the pool leaves or gives up to waiting jobs."""

    spoken: frozenset[str]
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

    def wishes(
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
        spoken, give = set[str](), dict[str, None]()
        more = 0
        could: dict[str, float] = {}
        spare = {*nodes.free, *nodes.others}
        for job in queue:
            if self.partitions and not set(self.partitions) & set(job.partitions):
                continue
            is_soon = job.start is None or job.start - wall < soon_s
            meant = job.planned_on.intersection(nodes.free) if is_soon else frozenset()
            spoken |= meant
            # Also if it is planned for later: Slurm did not count the nodes that it could take from pilots.
            reach = frozenset().union(*(layout.get(name, ()) for name in job.partitions))
            ours = [node for node in nodes.ours if node in reach]
            if job.nodes > len(reach.intersection(nodes.free)) + len(reach.intersection(nodes.others)) + len(ours):
                continue
            could[job.job] = self._since.get(job.job, now)
            waited_s = now - could[job.job]
            if waited_s >= COURTESY_S:
                continue
            more += max(0, (len(reach.intersection(nodes.free)) if job.several else job.nodes) - len(meant))
            mine = sorted(reach & spare)[: job.nodes]
            spare.difference_update(mine)
            lacking = job.nodes - len(mine)
            if waited_s < GIVE_WAY_S:
                give.update(dict.fromkeys([node for node in ours if node not in give][:lacking]))
        self._since = could
        again = any(now - since < GIVE_WAY_S for since in could.values())
        return YieldPlan(frozenset(spoken), more, tuple(give), again)


def choose(free: Sequence[str], spoken: Collection[str], more: int, reserve: int) -> tuple[str, ...]:
    """Return the free nodes to use, in order: not those in `spoken`, and only so many that enough others stay free."""
    left = [node for node in free if node not in spoken]
    return tuple(left[: max(0, len(left) - max(more, reserve - (len(free) - len(left))))])


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
