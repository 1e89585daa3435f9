"""What Slurm says, and what follows from it for the `slurm` pool: pure functions of text and values.

`slurm_commands.py` runs the commands whose output is read here; `slurm.py` carries out what is decided. Anything that
is not exactly as expected is a `ValueError` or `InputError`: what cannot be understood must not look like news.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bftrainer.cluster.pools.keeping import NODE_NAME
from bftrainer.cluster.pools.slurm_settings import SlurmSettings, read_duration
from bftrainer.core.hostlist import expand, natural
from bftrainer.traces.states import is_idle, sinfo_rows

PREFIX = "bftrainer-"
"""What the names of all pilots begin with."""
RETRY_S, LONGEST_RETRY_S = 5.0, 300.0
"""How long to wait after a pilot has failed, at first and at most."""
COURTESY_S = 60.0
"""A job that could have started for so long, and has not, is kept from it by something else than missing nodes."""

GIVE_WAY_S = 10.0
"""For how long nodes of ours are given up for a job that waits: if it has not started by then, that did not help."""

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
"""States of a node that somebody wants empty. Others say nothing: after a restart slurmctld knows no node's state."""
_ASKED_BACK_BY = frozenset("$@^!%")
"""Suffixes of a node that is wanted for maintenance, a reboot or to be switched off."""
_MAY_START = ("None", "Priority", "Resources", "")
_REFUSALS = 3
"""So many submissions refused in a row, or one twice for the same reason, and it is not because of the node."""
_ARRAY = re.compile(r"\d+_\[.*\]")
_STATE_WORD = re.compile(r"[A-Z_]+")
_UNKNOWN = ("", "N/A", "(null)", "None")


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A node of the partition."""

    name: str
    words: tuple[str, ...]
    """Its state, once for each partition that was asked for."""
    features: frozenset[str] = frozenset()

    def free(self, planned: bool = False) -> bool:
        """Whether anybody could have it now; with `planned` also if Slurm means it for a later job."""
        return is_idle(self.words) or (planned and all(_is_planned(word) for word in self.words))

    @property
    def may_stay(self) -> bool:
        """Whether a pilot that runs there may go on: nobody has asked for the node to become empty."""
        said = " ".join(self.words)
        return _ASKED_BACK.isdisjoint(_STATE_WORD.findall(said.upper())) and _ASKED_BACK_BY.isdisjoint(said)


@dataclass(frozen=True, slots=True)
class Pilot:
    """A job of ours, as Slurm knows it."""

    job: int
    node: str
    state: State
    left_s: float | None = None
    """How long until its time limit; None if there is none."""
    reason: str = ""
    """Why it waits, in Slurm's word."""
    mark: str = ""
    """Which controller, and where, its agent looks for; empty if that cannot be known."""
    preempted: bool = False
    how: str = ""
    """Slurm's word for its state."""

    @property
    def on_its_way_out(self) -> bool:
        """Whether it still has its node, but not for long."""
        return self.state == "ending" or (self.preempted and self.state == "running")


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A pending job that waits for nothing but nodes."""

    job: str
    partitions: tuple[str, ...]
    nodes: int
    several: bool = False
    """It is an array: there are more of the kind."""
    planned_on: frozenset[str] = frozenset()
    """Where Slurm means to start it."""
    start: float | None = None
    """When Slurm means to start it, in Unix seconds."""


def read_nodes(text: str) -> dict[str, SlurmNode]:
    """The nodes in the output of `sinfo -N`: name, perhaps features, state."""
    words: dict[str, list[str]] = {}
    features: dict[str, frozenset[str]] = {}
    for row in sinfo_rows(text):
        words.setdefault(row[0], []).append(row[-1])
        features[row[0]] = frozenset(row[1].split(",")) if len(row) > 2 else frozenset()
    names = sorted((name for name in words if NODE_NAME.fullmatch(name)), key=natural)
    return {name: SlurmNode(name, tuple(words[name]), features[name]) for name in names}


def read_pilots(text: str) -> tuple[Pilot, ...]:
    """The pilots in the output of `squeue -O`, with `PILOT_FIELDS` each followed by a bar."""
    pilots = []
    for row in _table(text, len(PILOT_FIELDS) + 1):
        job, word, asked, given, left, preempted, reason, comment, _ = row
        node = asked if NODE_NAME.fullmatch(asked) else given
        if not job.isdigit() or not _STATE_WORD.fullmatch(word):
            raise ValueError(f"no job and state in {'|'.join(row)[:80]!r}")
        if not NODE_NAME.fullmatch(node):
            continue  # one that has ended before it was given a node
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
    """The jobs in the output of `squeue -o` with `QUEUE_FORMAT` that wait for nodes. Pilots do not count."""
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
    """The nodes of each partition, from `sinfo -o '%R|%N'`."""
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
    """Rows of cells. The header must be there: without it, nothing printed would read as no job."""
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
    """Whether a node has the features that `constraint` asks for: names joined by `&`, which binds first, and `|`."""
    return any(set(each.split("&")) <= node.features for each in constraint.split("|")) if constraint else True


def usable(nodes: Mapping[str, SlurmNode], settings: SlurmSettings) -> dict[str, SlurmNode]:
    """The nodes that the settings allow."""
    only, never = settings.only, settings.never
    return {
        name: node
        for name, node in nodes.items()
        if name not in never and (not only or name in only) and has_features(node, settings.constraint)
    }


def fate(pilot: Pilot | None) -> tuple[str, bool]:
    """How a pilot came to its end, None standing for one that Slurm knows no more; and whether it did nothing wrong."""
    if pilot is None:
        return "its pilot has vanished", False
    if pilot.preempted or pilot.how == "PREEMPTED":
        return "its pilot was preempted", True
    return f"its pilot has ended: {pilot.how.lower()}", pilot.how == "TIMEOUT"


@dataclass(frozen=True, slots=True)
class Sorted:
    """Pilots by what is to be done with them."""

    kept: Mapping[str, Pilot]
    """One for each node."""
    cancel: tuple[tuple[Pilot, str], ...]
    """Those not to be kept, and why."""
    ended: Mapping[int, Pilot]


def sort_pilots(pilots: Iterable[Pilot], mark: str) -> Sorted:
    """One pilot a node, of those whose agents look for this controller; those that run before those that wait."""
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
    """Nodes of the partition by who has them."""

    free: Collection[str]
    ours: Sequence[str]
    """With pilots; those that it is best to give up come first."""
    others: Collection[str] = ()
    """That jobs can have, but we cannot: idle ones that are planned for a job, and those whose pilots are going."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What jobs that wait want of us."""

    spoken: frozenset[str]
    """The free nodes that are meant for one of them."""
    more: int
    """So many others must stay free for jobs that could start."""
    give: tuple[str, ...]
    """The nodes of ours to give up now."""
    again: bool
    """Whether to look again soon: a job waits that may not have to."""


@dataclass(slots=True)
class Courtesy:
    """Leaves idle nodes to jobs that wait and could start on them; remembers since when they could.

    Slurm takes nodes back by itself, but not twice for the same job within `KillWait` and `MessageTimeout`: where one
    job is given nodes that were cleared for another, that one would wait for 10 to 40 s. So what is missing is given
    as soon as it is seen: a job that finds free nodes at Slurm's next look does not wait for a preemption at all.
    """

    partitions: Collection[str] = ()
    """Whose jobs count; empty: all."""
    _since: dict[str, float] = field(default_factory=dict)

    def wishes(
        self,
        now: float,
        wall: float,
        queue: Sequence[WaitingJob],
        nodes: Nodes,
        layout: Mapping[str, frozenset[str]],
        soon_s: float,
    ) -> Wishes:
        """What the jobs in the `queue` want. `soon_s`: how near a planned start must be.

        A job could start if the nodes that are idle, those with pilots of ours and those that these leave are enough
        for it. `now` is monotonic, `wall` the time of day.
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
            # Also if it is planned for later: then Slurm has not reckoned with the nodes that it could take from us.
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
        return Wishes(frozenset(spoken), more, tuple(give), again)


def choose(free: Sequence[str], spoken: Collection[str], more: int, reserve: int) -> tuple[str, ...]:
    """The free nodes to have, in order: not those spoken for, and so many of the others that enough stay free."""
    left = [node for node in free if node not in spoken]
    return tuple(left[: max(0, len(left) - max(more, reserve - (len(free) - len(left))))])


@dataclass(slots=True)
class Refusals:
    """Submissions that failed: how many in a row, why the last one did, and until when to submit nothing."""

    count: int = 0
    problem: str = ""
    until: float = -math.inf

    def refused(self, problem: str, now: float) -> bool:
        """One has failed. Whether the reason is news."""
        news = problem != self.problem
        self.count, self.problem = self.count + 1, problem
        if self.count >= _REFUSALS or not news:
            self.until = now + min(RETRY_S * 2.0 ** min(self.count - 2, 10), LONGEST_RETRY_S)
        return news

    def forget(self) -> None:
        """One has not failed, or whatever was the reason may be over."""
        self.count, self.problem, self.until = 0, "", -math.inf
