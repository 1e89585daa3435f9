"""Rigid baseline: what a killable (scavenger) queue achieves on the same idle nodes, with jobs of a fixed size.

A trace and a workload come in. The work that the jobs did, lost and held up comes out, for comparison with BFTrainer.
A job starts when enough nodes are idle, dies when the main queue wants one of them back, and starts again from its
last checkpoint. If the queue guarantees a run time, the main queue waits instead: that delay is counted.

Order at one instant: jobs finish, nodes leave, guarantees end, nodes join, jobs are submitted, jobs start.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bftrainer.core.pool import Node
from bftrainer.core.trace import Trace
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError

# Kinds of events, in their order within one instant. Jobs finish first: a job that is done has nothing left to lose.
_FINISH, _LEAVE, _GUARANTEE, _JOIN, _SUBMIT = range(5)


@dataclass(frozen=True, slots=True)
class RigidRow:
    """Outcome of one trainer."""

    name: str
    start: float | None
    """Time of the trainer's first run; None if it never ran."""
    end: float | None
    """Time at which the trainer finished; None if it did not."""
    samples: float
    """Useful samples: checkpointed, finished, or of a run still alive at the end."""


@dataclass(frozen=True, slots=True)
class RigidRun:
    """One run of a trainer, from its start until it finishes, is killed or the simulation ends."""

    name: str
    nodes: tuple[Node, ...]
    start: float
    end: float
    killed: bool


@dataclass(frozen=True, slots=True)
class RigidResult:
    """Outcome of a killable queue on a trace's idle nodes."""

    outcome_samples: float
    """Useful samples of all trainers."""
    lost_samples: float
    """Samples done since the last checkpoint of runs that were killed."""
    completed: int
    hours: float
    """Hours from the start of the trace's window to the end of the workload or of the trace."""
    node_seconds_held: float
    """Node-seconds held by jobs, start-up and delays included."""
    node_seconds_offered: float
    """Node-seconds idle in the trace during `hours`."""
    kills: int
    delayed_leaves: int
    """How often the main queue wanted a node back and had to wait for a guarantee."""
    delay_node_seconds: float
    """How long the main queue waited, summed over those nodes."""
    trainers: tuple[RigidRow, ...]
    """One row per trainer, in the order of submission."""
    runs: tuple[RigidRun, ...]
    """Every run, in the order they ended."""


def simulate_rigid(
    trace: Trace,
    trainers: Sequence[Trainer],
    *,
    nodes: int,
    max_parallel: int,
    checkpoint_s: float,
    guaranteed: Sequence[tuple[int, float]] = (),
) -> RigidResult:
    """Run `trainers` first come, first served on the idle nodes of `trace`, each on `nodes` nodes as its limits allow.

    `checkpoint_s` is the producing time between (free) checkpoints; 0: no work is lost. `guaranteed` lists the queue's
    steps: (largest job size, seconds for which a run of up to that size may not be killed); larger jobs have no
    guarantee. A killed job waits again at the place of its submission, which is before every job that has not run yet.
    """
    _check(nodes, max_parallel, checkpoint_s, guaranteed)
    jobs: list[_Job] = []
    for trainer in sorted(trainers, key=lambda trainer: trainer.submit):
        size = min(max(nodes, trainer.min_nodes), trainer.max_nodes)
        guarantee_s = next((seconds for top, seconds in guaranteed if size <= top), 0.0)
        jobs.append(_Job(trainer, len(jobs), size, trainer.curve.rate(size), guarantee_s))
    return _Queue(trace, jobs, max_parallel, checkpoint_s).run()


def _check(nodes: int, max_parallel: int, checkpoint_s: float, guaranteed: Sequence[tuple[int, float]]) -> None:
    for name, value in (("nodes", nodes), ("max_parallel", max_parallel)):
        if value < 1:
            raise InputError(f"`{name}` must be 1 or more, but got {value}")
    if not checkpoint_s >= 0:
        raise InputError(f"`checkpoint_s` must be a number of seconds, 0 or more, but got {checkpoint_s}")
    below = 0
    for size, seconds in guaranteed:
        if not size > below:
            raise InputError(f"`guaranteed` must have job sizes that rise from 1, but got {size} after {below}")
        if not seconds >= 0:
            raise InputError(f"`guaranteed` must have seconds of 0 or more, but got {seconds} for {size} nodes")
        below = size


@dataclass(slots=True, eq=False)
class _Job:
    """A trainer at its fixed size, and its progress."""

    trainer: Trainer
    rank: int
    """Index of the job in the order of submission."""
    size: int
    rate: float
    guarantee_s: float
    done: float = 0.0
    """Samples that a kill cannot lose."""
    first_start: float | None = None
    end: float | None = None
    runs: int = 0
    """Number of runs that are over. Tells the events of this run from those of an earlier one."""
    start: float = 0.0
    nodes: list[int] = field(default_factory=list)
    overdue: dict[int, float] = field(default_factory=dict)
    """Nodes kept although the main queue wants them, and since when."""

    @property
    def guaranteed_until(self) -> float:
        return self.start + self.guarantee_s

    @property
    def finish(self) -> float:
        """The time at which the run will be done if it is not killed."""
        producing_s = (self.trainer.work - self.done) / self.rate if self.rate else math.inf
        return self.start + self.trainer.start_s + self.trainer.up_s + producing_s

    def produced(self, time: float, period_s: float = 0.0) -> float:
        """Samples of this run at `time`; with a period, those of whole periods, which are in checkpoints."""
        seconds = max(0.0, time - self.start - self.trainer.start_s - self.trainer.up_s)
        if period_s:
            # The quotient of an infinite period is 0, but 0 times infinity is not a number.
            seconds = period_s * periods if (periods := seconds // period_s) else 0.0
        # Rounding must not carry a run past its work just before it finishes.
        return min(seconds * self.rate, self.trainer.work - self.done)


class _Queue:
    """State of the simulation: the nodes by number, the jobs by order of submission, the future events."""

    def __init__(self, trace: Trace, jobs: list[_Job], max_parallel: int, checkpoint_s: float) -> None:
        self.trace, self.jobs = trace, jobs
        self.max_parallel, self.checkpoint_s = max_parallel, checkpoint_s
        self.waiting: list[int] = []
        self.running = 0
        self.idle = [False] * len(trace.nodes)
        self.since = [0.0] * len(trace.nodes)
        self.holder: list[_Job | None] = [None] * len(trace.nodes)
        self.idle_count = self.free_count = 0
        # Free nodes, idle longest first. Entries of nodes that have left are dropped when they come up: see `_take`.
        self.free: list[tuple[float, int]] = []
        self.events = self._known_events()
        self.completed = self.delayed_leaves = 0
        self.lost = self.offered_s = self.delay_s = 0.0
        self.runs: list[RigidRun] = []

    def _known_events(self) -> list[tuple[float, int, int, int]]:
        """All events of the trace and all submissions: time, kind, number of the node or job, number of the run."""
        trace, seen = self.trace, ~self.trace.open  # a node whose fragment is open was not seen to leave
        changes = (_JOIN, trace.start, trace.node), (_LEAVE, trace.end[seen], trace.node[seen])
        events = [(t, kind, n, 0) for kind, ts, ns in changes for t, n in zip(ts.tolist(), ns.tolist(), strict=True)]
        events += [(max(job.trainer.submit, trace.window.start), _SUBMIT, job.rank, 0) for job in self.jobs]
        heapq.heapify(events)
        return events

    def run(self) -> RigidResult:
        now, closing = self.trace.window.start, self.trace.window.end
        while self.completed < len(self.jobs) and self.events and self.events[0][0] <= closing:
            now = self._pass(now, self.events[0][0])
            while self.events and self.events[0][0] == now:
                _, kind, number, run = heapq.heappop(self.events)
                self._happen(now, kind, number, run)
            if now < closing:
                self._start_jobs(now)
        if self.completed < len(self.jobs):
            now = self._pass(now, closing)
            for job in self.jobs:
                if job.nodes:
                    job.done += job.produced(now)
                    self._release(job, now, killed=False)
        rows = tuple(RigidRow(j.trainer.name, j.first_start, j.end, j.done) for j in self.jobs)
        return RigidResult(
            outcome_samples=sum(row.samples for row in rows),
            lost_samples=self.lost,
            completed=self.completed,
            hours=(now - self.trace.window.start) / 3600,
            node_seconds_held=sum(len(run.nodes) * (run.end - run.start) for run in self.runs),
            node_seconds_offered=self.offered_s,
            kills=sum(run.killed for run in self.runs),
            delayed_leaves=self.delayed_leaves,
            delay_node_seconds=self.delay_s,
            trainers=rows,
            runs=tuple(self.runs),
        )

    def _pass(self, since: float, until: float) -> float:
        self.offered_s += self.idle_count * (until - since)
        return until

    def _happen(self, now: float, kind: int, number: int, run: int) -> None:
        if kind == _JOIN:
            self._join(number, now)
        elif kind == _LEAVE:
            self._leave(number, now)
        elif kind == _SUBMIT:
            heapq.heappush(self.waiting, number)
        elif (job := self.jobs[number]).runs == run:  # otherwise it was killed meanwhile
            if kind == _FINISH:
                job.done, job.end = job.trainer.work, now
                self.completed += 1
                self._release(job, now, killed=False)
            elif job.overdue:
                self._kill(job, now)

    def _join(self, node: int, now: float) -> None:
        if self.idle[node]:
            return  # an open fragment never ended, so the node is here already
        self.idle[node] = True
        self.since[node] = now
        self.idle_count += 1
        job = self.holder[node]
        if job is None:
            self._free(node)
        else:
            self.delay_s += now - job.overdue.pop(node)

    def _leave(self, node: int, now: float) -> None:
        self.idle[node] = False
        self.idle_count -= 1
        job = self.holder[node]
        if job is None:
            self.free_count -= 1
        elif now < job.guaranteed_until:
            job.overdue[node] = now
            self.delayed_leaves += 1
        else:
            self._kill(job, now)

    def _kill(self, job: _Job, now: float) -> None:
        saved = job.produced(now, self.checkpoint_s)
        self.lost += job.produced(now) - saved
        job.done += saved
        self._release(job, now, killed=True)
        heapq.heappush(self.waiting, job.rank)

    def _release(self, job: _Job, now: float, killed: bool) -> None:
        """End a run: its nodes become free, except those that the main queue was waiting for."""
        self.running -= 1
        self.delay_s += sum(now - left for left in job.overdue.values())
        names = tuple(self.trace.nodes[node] for node in job.nodes)
        self.runs.append(RigidRun(job.trainer.name, names, job.start, now, killed))
        for node in job.nodes:
            self.holder[node] = None
            if self.idle[node]:
                self._free(node)
        job.runs += 1
        job.nodes, job.overdue = [], {}

    def _free(self, node: int) -> None:
        self.free_count += 1
        heapq.heappush(self.free, (self.since[node], node))

    def _take(self) -> int:
        """The free node that has been idle longest."""
        while True:
            since, node = heapq.heappop(self.free)
            if self.idle[node] and self.since[node] == since:
                self.free_count -= 1
                return node

    def _start_jobs(self, now: float) -> None:
        while self.waiting and self.running < self.max_parallel and self.jobs[self.waiting[0]].size <= self.free_count:
            job = self.jobs[heapq.heappop(self.waiting)]
            self.running += 1
            job.start = now
            job.first_start = now if job.first_start is None else job.first_start
            job.nodes = [self._take() for _ in range(job.size)]
            for node in job.nodes:
                self.holder[node] = job
            for time, kind in ((job.finish, _FINISH), (job.guaranteed_until, _GUARANTEE)):
                if time < math.inf:
                    heapq.heappush(self.events, (time, kind, job.rank, job.runs))
