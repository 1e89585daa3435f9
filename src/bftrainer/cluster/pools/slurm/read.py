"""Reads Slurm's output: text in, nodes, pilots and waiting jobs out.

`commands.py` runs the commands that print it; `decide.py` decides on the result. Unexpected output is a `ValueError` or
`InputError`: what cannot be parsed must not look like a change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bftrainer.cluster.pools.keeper import NODE_NAME
from bftrainer.cluster.pools.slurm.settings import read_duration
from bftrainer.core.hostlist import expand
from bftrainer.traces.recorder.states import is_idle, sinfo_rows
from bftrainer.util.text import natural

PREFIX = "bftrainer-"
"""Prefix of the names of all pilots."""
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
        words = " ".join(self.words)
        return _ASKED_BACK.isdisjoint(_STATE_WORD.findall(words.upper())) and _ASKED_BACK_BY.isdisjoint(words)


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
