"""Reads Slurm's output: text in, nodes, pilots and waiting jobs out.

`commands.py` runs the commands that print it, and calls these functions in a thread; `decide.py` and `yielding.py`
decide on the result. Unexpected output is a `ValueError` or `InputError`: what cannot be parsed must not look like a
change.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bftrainer.cluster.pools.keeper import NODE_NAME
from bftrainer.cluster.pools.slurm.hardware import JobRequest
from bftrainer.cluster.pools.slurm.naming import PREFIX, PilotComment, read_comment
from bftrainer.cluster.pools.slurm.settings import read_duration
from bftrainer.core.hostlist import expand
from bftrainer.slurm.gres import UNKNOWN, Gres, read_gres
from bftrainer.traces.recorder.states import is_idle, sinfo_rows
from bftrainer.util.text import natural

JOB_FIELDS = (
    *("JobArrayID", "JobID", "UserID", "State", "Partition", "NumNodes", "NumCPUs", "MinCpus", "MinMemory"),
    *("TimeLimit", "MinTime", "TimeLeft", "PriorityLong", "StartTime", "PreemptTime", "Reason", "SchedNodes"),
    *("ReqNodes", "NodeList", "tres-per-node", "tres-per-job", "tres-per-task"),
    *("Dependency", "Reservation", "Feature", "Name", "Comment"),
)
"""The columns that squeue prints, in the order of `_JobRow`."""
TEXT_WIDTHS: Mapping[str, int] = {"Reason": 96, "Name": 64, "Comment": 256}
"""The columns that may contain whatever a user writes, with the bytes that squeue prints of each: no more, no less."""

OwnerOf = Callable[[str, PilotComment], str | None]
"""Returns whose pilot a job is, from its user and its comment; None: it is no pilot of ours."""
Rank = tuple[int, int]
"""A job's place in the queue: its priority, then its age. The larger one goes first."""
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
"""Reasons of jobs that wait for nothing but nodes.

With others, such as `Dependency`, `BeginTime`, `QOS…`, `AssocGrp…` and `JobHeldUser`, Slurm does not look for nodes.
"""
_NODE_NOT_AVAILABLE = "ReqNodeNotAvail"
"""Reason of a job that asks for nodes by name. The nodes may be in use, also by pilots."""
_ARRAY = re.compile(r"\d+_\[([^\]%]*)(?:%(\d+))?\]?")
_TASKS = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
_STATE_WORD = re.compile(r"[A-Z_]+")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)")
_MEGABYTES = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}
_NO_TIME = ("UNLIMITED", "NOT_SET", "INVALID", *UNKNOWN)


class _JobRow(NamedTuple):
    """One job as squeue prints it."""

    array_id: str
    job: str
    user: str
    state: str
    partition: str
    nodes: str
    cpus: str
    min_cpus: str
    memory: str
    limit: str
    min_time: str
    left: str
    priority: str
    start: str
    preempted: str
    reason: str
    planned: str
    required: str
    given: str
    per_node: str
    per_job: str
    per_task: str
    dependency: str
    reservation: str
    feature: str
    name: str
    comment: str


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
    owner: str = ""
    """Where pilots have owners: whose it is."""
    id: str = ""
    """Where pilots have owners: its id."""

    @property
    def on_its_way_out(self) -> bool:
        """Whether the pilot still has its node, but is ending or preempted."""
        return self.state == "ending" or (self.preempted and self.state == "running")


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A pending job, or array of jobs, that waits only for nodes."""

    job: str
    request: JobRequest
    nodes: int
    tasks: int = 1
    """Number of jobs of an array that may start now, each on `nodes` nodes."""
    cpus: int = 0
    limit_s: float | None = None
    """Least running time that Slurm has to plan for; None if it is not known."""
    priority: int = 0
    required: frozenset[str] = frozenset()
    """Nodes that the job must have."""
    planned_on: frozenset[str] = frozenset()
    """Nodes on which Slurm plans to start it."""
    start: float | None = None
    """Time at which Slurm plans to start it, in Unix seconds."""

    @property
    def rank(self) -> Rank:
        """Its place in the queue."""
        number = self.job.partition("_")[0]
        return self.priority, -int(number) if number.isdigit() else 0


@dataclass(frozen=True, slots=True)
class Jobs:
    """Slurm's jobs: our pilots, including those that ended a moment ago, and the jobs of others that wait for nodes."""

    pilots: tuple[Pilot, ...]
    waiting: tuple[WaitingJob, ...]


def read_nodes(text: str) -> dict[str, SlurmNode]:
    """Parse the nodes in the output of `sinfo -N`: name, optional features, state."""
    words: dict[str, list[str]] = {}
    features: dict[str, frozenset[str]] = {}
    for row in sinfo_rows(text):
        words.setdefault(row[0], []).append(row[-1])
        features[row[0]] = frozenset(row[1].split(",")) if len(row) > 2 else frozenset()
    names = sorted((name for name in words if NODE_NAME.fullmatch(name)), key=natural)
    return {name: SlurmNode(name, tuple(words[name]), features[name]) for name in names}


def new_separator() -> str:
    """Return what follows each field of a job.

    `commands.py` passes it to squeue where other users cannot read it. No field but those of `TEXT_WIDTHS` may contain
    it, so even a user who knows it cannot make a job look like another one.
    """
    return f"\x1f{secrets.token_hex(4)}"


def job_format(separator: str) -> str:
    """Return the format for `squeue -O`."""
    return ",".join(f"{name}:{TEXT_WIDTHS.get(name, '')}{separator}" for name in JOB_FIELDS)


def read_jobs(text: str, name: str, user: int, separator: str, owner_of: OwnerOf | None = None) -> Jobs:
    """Parse the output of `squeue -O` with `job_format(separator)`. Jobs of `user` called `name` are our pilots.

    `text` has one character per byte of the output (Latin-1), because squeue counts the width of a column in bytes.
    Where pilots have owners, those jobs are pilots for which `owner_of` returns an owner.
    """
    row = _row_pattern(separator)
    header = row.match(text)
    if not text.startswith("JOBID") or header is None:
        raise ValueError(f"a table of jobs must begin with its header, but got {text[:80]!r}")
    pilots, waiting, uid, at = dict[int, Pilot](), list[WaitingJob](), str(user), header.end()
    while match := row.match(text, at):
        at = match.end()
        job = _JobRow._make(cell.rstrip(" ") for cell in match.groups())
        if not _STATE_WORD.fullmatch(job.state):
            raise ValueError(f"no job and state in {' '.join(job)[:80]!r}")
        comment = read_comment(job.comment) if job.name == name else None
        owner = _owner(job, comment, uid, owner_of) if job.name == name else None
        if owner is not None:
            if (pilot := _pilot(job, comment, owner)) is not None:
                if pilot.job in pilots:
                    raise ValueError(f"job {pilot.job} is listed twice")
                pilots[pilot.job] = pilot
        elif job.state == "PENDING" and not job.name.startswith(PREFIX) and _waits_for_nodes(job):
            waiting.append(_waiting(job))
    if text[at:].strip():
        raise ValueError(f"a table of jobs goes on with {text[at : at + 80]!r}, no job")
    return Jobs(tuple(pilots.values()), tuple(waiting))


def _row_pattern(separator: str) -> re.Pattern[str]:
    """Return the pattern of a row. Texts of users are skipped by their width: rows that they contain do not count."""
    cells = (f"(.{{{TEXT_WIDTHS[name]}}})" if name in TEXT_WIDTHS else f"([^{separator[0]}\n]*)" for name in JOB_FIELDS)
    return re.compile("".join(cell + re.escape(separator) for cell in cells) + "\n", re.DOTALL)


def _owner(job: _JobRow, comment: PilotComment | None, uid: str, owner_of: OwnerOf | None) -> str | None:
    """Return whose pilot a job is, empty if pilots have no owners; None if it is no pilot of ours."""
    if owner_of is None:
        return "" if job.user == uid else None
    # A pilot is for the node that it asks for. A job with several nodes, or for another one, is no pilot.
    ours = comment is not None and comment.node in (job.required, job.given)
    return owner_of(job.user, comment) if ours and comment is not None else None


def _pilot(job: _JobRow, comment: PilotComment | None, owner: str) -> Pilot | None:
    """Return a pilot; None if it ended before it was given a node."""
    if not job.job.isdigit():
        raise ValueError(f"no job number in {job.job!r:.80}")
    node = job.required if NODE_NAME.fullmatch(job.required) else job.given
    if not NODE_NAME.fullmatch(node):
        return None
    left, reason = job.left, job.reason
    return Pilot(
        int(job.job),
        node,
        _STATES.get(job.state, "ended"),
        None if left in _NO_TIME else read_duration(left.lstrip("-")),
        "" if reason in UNKNOWN else reason,
        comment.mark if comment is not None else "",
        job.preempted not in UNKNOWN,
        job.state,
        owner,
        comment.id if comment is not None and owner else "",
    )


def _waits_for_nodes(job: _JobRow) -> bool:
    """Return whether a pending job would start if it had nodes."""
    if job.dependency not in UNKNOWN:  # Slurm lists those that are not fulfilled
        return False
    return job.reason in _MAY_START or (job.reason.startswith(_NODE_NOT_AVAILABLE) and job.required not in UNKNOWN)


def _waiting(job: _JobRow) -> WaitingJob:
    if not job.nodes.isdigit():
        raise ValueError(f"no number of nodes in {job.nodes!r:.80}")
    constraint, reservation, start = job.feature, job.reservation, job.start
    request = JobRequest(
        frozenset(job.partition.split(",")),
        "" if constraint in UNKNOWN else constraint,
        (*read_gres(job.per_node), *_one_of_each(job.per_job), *_one_of_each(job.per_task)),
        _memory_mb(job.memory),
        _whole(job.min_cpus),
        "" if reservation in UNKNOWN else reservation,
    )
    return WaitingJob(
        job.array_id,
        request,
        int(job.nodes),
        _tasks(job.array_id),
        _whole(job.cpus),
        _limit_s(job.min_time) or _limit_s(job.limit),
        _whole(job.priority),
        _nodes(job.required),
        _nodes(job.planned),
        float(start) if start.isdigit() else None,
    )


def _tasks(job: str) -> int:
    """Return how many jobs of an array may start now, from an id such as `12_[2-9,15%3]`."""
    match = _ARRAY.match(job)
    if match is None:
        return 1
    number = 0
    for part in match[1].split(","):
        tasks = _TASKS.match(part)  # the last part may be cut off, as in `7,8,...`
        if tasks is not None:
            first, last, step = int(tasks[1]), int(tasks[2] or tasks[1]), int(tasks[3] or 1)
            number += max(1, (last - first) // max(step, 1) + 1)
    return max(1, min(number, int(match[2]) if match[2] and int(match[2]) else number))


def _one_of_each(text: str) -> Gres:
    """Return what each node must at least have of the resources of a whole job."""
    return tuple((name, kind, 1) for name, kind, _ in read_gres(text))


def _whole(text: str) -> int:
    """Return a whole number; 0 if there is none."""
    return int(text) if text.isdigit() else 0


def _memory_mb(text: str) -> int:
    """Return a memory size such as `4000M` in megabytes; 0 if there is none."""
    match = _MEMORY.fullmatch(text)
    return int(float(match[1]) * _MEGABYTES[match[2]]) if match else 0


def _limit_s(text: str) -> float | None:
    if text == "UNLIMITED":
        return float("inf")
    try:
        return None if text in _NO_TIME else read_duration(text) or None
    except ValueError:
        return None


def _nodes(text: str) -> frozenset[str]:
    return frozenset() if text in UNKNOWN else frozenset(expand(text))


def _is_planned(word: str) -> bool:
    return word.upper() in ("PLANNED", "PLND", "IDLE-", "IDLE+PLANNED", "IDLE")
