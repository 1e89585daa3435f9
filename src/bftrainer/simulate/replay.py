"""Replay engine: runs a trace and a workload on a virtual clock, through the same scheduler as the live system.

It processes pool events, arrivals and completions in order of time. At each, it updates the accounts (`accounting.py`)
and asks the scheduler. Order at one instant: progress, preemption charges, completions, joins, admissions, decision.
`knowledge.py` says what the scheduler is told about trainers; if that is learned, there are also times of reports.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np

from bftrainer.core.pool import Event
from bftrainer.core.trace import Floats, Trace
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError
from bftrainer.scheduler import Plan, Policy, Scheduler, State
from bftrainer.simulate.accounting import Accounting, Books, Loss, SimulatedTrainer, copied
from bftrainer.simulate.best import BestValues
from bftrainer.simulate.knowledge import Knowledge, KnownTruth
from bftrainer.simulate.timeline import Timeline, TimelineStep, timeline_of

DecideOn = Literal["pool", "all"]


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Settings of a replay."""

    policy: Policy = field(default_factory=Policy)
    accounting: Accounting = "stall"
    decide_on: DecideOn = "all"
    """`pool`: only at changes of the pool, where completions and arrivals are noticed; `all`: at those too."""
    snapshot_every_s: float = 0.0
    """Seconds between snapshots of a trainer; 0: no work is lost when all its nodes go, as the paper assumes."""

    def __post_init__(self) -> None:
        if not self.snapshot_every_s >= 0:
            raise InputError(f"time between snapshots must be 0 seconds or more, but got {self.snapshot_every_s}")


@dataclass(frozen=True, slots=True)
class TrainerSummary:
    """Summary of one trainer. `start` is when it was first considered."""

    name: str
    model: str
    submit: float
    start: float | None
    end: float | None
    samples: float

    @property
    def run_hours(self) -> float | None:
        """Hours from the trainer's start to its end."""
        return None if self.start is None or self.end is None else (self.end - self.start) / 3600


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """Outcome of a replay."""

    start: float
    end: float
    finished: bool
    """Whether the workload ended before the trace did."""
    outcome: float
    lost: Mapping[Loss, float]
    """Samples not made, by reason."""
    value: float
    """The outcome in the objective's unit."""
    lost_value: Mapping[Loss, float]
    best_value: float
    """Best possible outcome of the pool for the trainers considered, at no cost, in the objective's unit."""
    pool_node_seconds: float
    used_node_seconds: float
    pool_events: int
    decisions: int
    decision_ms: Floats
    wall_s: float
    trainers: tuple[TrainerSummary, ...]
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Present:
    """Trainers and nodes in the middle of a run, from where a replay can go on."""

    state: State
    """Queue, assignments and statistics. The trace of the replay that goes on says which nodes are there."""
    jobs: Mapping[str, SimulatedTrainer]
    """The trainers that are considered, with what they have done so far."""


Watch = Callable[[float, Plan, State], None]
"""Called after each decision with its time, the plan and the state before it."""
Look = Callable[[float, Callable[[], Present]], None]
"""Called after each step with its time and a function that returns a copy of the present."""


def replay(
    trace: Trace,
    trainers: Sequence[Trainer],
    settings: ReplaySettings | None = None,
    watch: Watch | None = None,
    progress: Callable[[float], None] = lambda share: None,
    knowledge: Knowledge | None = None,
    *,
    present: Present | None = None,
    look: Look | None = None,
    until_done: Collection[str] = (),
) -> Replay:
    """Replay `trace` with `trainers`, submitted at their times, until all are done or the trace ends.

    `knowledge` is what the scheduler is told about them; None: all.

    With `present`, the replay goes on from there when the trace begins. `trainers` are then those of `present` that are
    not considered yet, and those that are submitted later. With `until_done`, it ends when these trainers are done.
    """
    engine = _Engine(trace, trainers, settings or ReplaySettings(), watch, progress, knowledge or KnownTruth())
    engine.present, engine.look, engine.until_done = present, look, frozenset(until_done)
    return engine.run()


class _Engine:
    def __init__(
        self,
        trace: Trace,
        trainers: Sequence[Trainer],
        settings: ReplaySettings,
        watch: Watch | None,
        progress: Callable[[float], None],
        knowledge: Knowledge,
    ) -> None:
        self.trace, self.settings, self.watch, self.progress = trace, settings, watch, progress
        self.knowledge = knowledge
        self.arrivals = sorted(trainers, key=lambda trainer: trainer.submit)
        self.present: Present | None = None
        self.look: Look | None = None
        self.until_done: frozenset[str] = frozenset()
        self.truth = {trainer.name: trainer for trainer in self.arrivals}
        self.true_scheduler = Scheduler(settings.policy)
        self.considered: tuple[Trainer, ...] = ()
        self.only_learns = False
        """Whether the present step may be only for what is learned in it, and leads to no decision without news."""
        self.scheduler = Scheduler(settings.policy)
        self.books = Books(settings.accounting, settings.snapshot_every_s)
        self.best = BestValues(self.true_scheduler.value_of)
        self.state = State()
        self.jobs: dict[str, SimulatedTrainer] = {}
        self.summaries: dict[str, TrainerSummary] = {}
        self.next_arrival = 0
        self.now = trace.window.start
        self.steps: list[TimelineStep] = []
        self.pool_node_s = self.used_node_s = self.best_made = 0.0
        self.value = self.best_value = 0.0
        self.used = self.pool_events = 0
        self.solve_ms: list[float] = []

    def run(self) -> Replay:
        began = time.perf_counter()
        window = self.trace.window
        resumed = () if self.present is None else tuple(job.trainer for job in self.present.jobs.values())
        _check(self.trace, (*resumed, *self.arrivals))
        for event in self._events():
            self._step(event)
            if self.look is not None:
                self.look(self.now, self._present)
            if self._all_done():
                break
            self.progress((self.now - window.start) / window.seconds)
        else:
            self._advance(window.end)
            self._complete()
        finished = self._all_done()
        wall_s = time.perf_counter() - began
        return Replay(
            start=window.start,
            end=self.now,
            finished=finished,
            outcome=self.books.outcome,
            lost=dict(self.books.lost),
            value=self.books.value,
            lost_value=dict(self.books.lost_value),
            best_value=self.best_made,
            pool_node_seconds=self.pool_node_s,
            used_node_seconds=self.used_node_s,
            pool_events=self.pool_events,
            decisions=len(self.solve_ms),
            decision_ms=np.array(self.solve_ms),
            wall_s=wall_s,
            trainers=tuple(self._summary(trainer) for trainer in (*resumed, *self.arrivals)),
            timeline=timeline_of([*self.steps, self._row(decided=False, pool_event=False)]),
        )

    def _events(self) -> Iterator[Event]:
        """Pool events and, where they count, completions and arrivals in between (as events that change nothing)."""
        for event in self.trace.events():
            if self.settings.decide_on == "all":
                while (moment := self._next_moment()) < event.time:
                    yield Event(moment)
                    if self._all_done():
                        return
            self.only_learns = False
            yield event
        if self.settings.decide_on == "all":
            while (moment := self._next_moment()) < self.trace.window.end:
                yield Event(moment)
                if self._all_done():
                    return

    def _next_moment(self) -> float:
        """The next completion, arrival of a trainer for which there is room, or time when something is learned."""
        moment = min((job.finish_time(self.now) for job in self.jobs.values()), default=math.inf)
        if self.next_arrival < len(self.arrivals):
            arrival = self.arrivals[self.next_arrival]
            if arrival.submit < moment and self.scheduler.would_consider(self.state, arrival):
                moment = max(arrival.submit, self.now)
        learns_at = self.knowledge.next_moment(self.now, self.jobs)
        self.only_learns = learns_at < moment
        return min(moment, learns_at)

    def _step(self, event: Event) -> None:
        self._advance(event.time)
        changes_pool = bool(event.joined or event.left)
        if changes_pool:
            self.pool_events += 1
            self.state, lost = self.state.pool_changed(event)
            for name, nodes in lost.items():
                self.books.preempted(self.jobs[name], self.now, nodes, self.state.assigned.get(name, ()))
        if self.present is not None:
            self._resume(self.present)
            self.present = None
        completed = self._complete()
        has_news = self.knowledge.observe(self.now, self.jobs)
        self._admit_arrivals()
        decided = bool(self.state.admitted or self.state.waiting)
        if self.only_learns and not (completed or has_news):
            decided = False
        if decided:
            self._decide()
        else:
            self._measure()
        self.steps.append(self._row(decided=decided, pool_event=changes_pool))

    def _present(self) -> Present:
        return Present(self.state, {name: copied(job) for name, job in self.jobs.items()})

    def _resume(self, present: Present) -> None:
        """Take up the trainers of a present, on those of their nodes that are there."""
        before, here = present.state, self.state.pool
        self.jobs = {name: copied(job) for name, job in present.jobs.items()}
        self.truth |= {name: job.trainer for name, job in self.jobs.items()}
        held = {name: tuple(node for node in before.assigned.get(name, ()) if node in here) for name in self.jobs}
        assigned = {name: held[name] for name, job in self.jobs.items() if len(held[name]) >= job.trainer.min_nodes}
        for name, job in self.jobs.items():
            if job.nodes != len(assigned.get(name, ())):
                gone = [node for node in before.assigned.get(name, ()) if node not in here]
                self.books.preempted(job, self.now, gone, assigned.get(name, ()))
        admitted = tuple(job.trainer for job in self.jobs.values())
        self.state = State(here, admitted, self.state.waiting, MappingProxyType(assigned), before.seen)

    def _advance(self, to: float) -> None:
        passed = to - self.now
        if passed > 0:
            for job in self.jobs.values():
                self.books.progress(job, self.now, to)
            self.pool_node_s += passed * len(self.state.pool)
            self.used_node_s += passed * self.used
            self.best_made += passed * self.best_value
        self.now = to

    def _complete(self) -> bool:
        """End the trainers that are done. Returns whether there are any."""
        done = [name for name, job in self.jobs.items() if job.is_done()]
        for name in done:
            job = self.jobs.pop(name)
            self.books.finished(job)
            self.state = self.state.finished(name)
            self.knowledge.finished(name)
            self.summaries[name] = self._summary_of(job, self.now)
        return bool(done)

    def _admit_arrivals(self) -> None:
        first = self.next_arrival
        while self.next_arrival < len(self.arrivals) and self.arrivals[self.next_arrival].submit <= self.now:
            self.next_arrival += 1
        if self.next_arrival > first:
            self.state = self.state.submitted(*self.knowledge.submitted(self.arrivals[first : self.next_arrival]))

    def _decide(self) -> None:
        before = self.knowledge.refreshed(self.state, self.scheduler)
        began = time.perf_counter()
        plan = self.scheduler.decide(before)
        self.solve_ms.append((time.perf_counter() - began) * 1e3)
        self.state = before.after(plan)
        for trainer, change in zip(plan.considered, plan.changes, strict=True):
            job = self.jobs.get(trainer.name)
            if job is None:
                truth = self.truth[trainer.name]
                job = SimulatedTrainer(truth, self.true_scheduler.value_of(truth), self.now)
                self.jobs[trainer.name] = job
            self.books.rescaled(job, self.now, plan.placed.nodes.get(change.trainer, ()))
        self.knowledge.observe(self.now, self.jobs)
        self._measure()
        if self.watch is not None:
            self.watch(self.now, plan, before)

    def _measure(self) -> None:
        """Record the values in force from now on."""
        self.used = sum(job.nodes for job in self.jobs.values())
        self.value = sum(job.value for job in self.jobs.values())
        considered = tuple(self.truth[trainer.name] for trainer in self.state.admitted)
        if considered != self.considered:
            self.considered = considered
        self.best_value = self.best.total(self.considered, len(self.state.pool))

    def _row(self, *, decided: bool, pool_event: bool) -> TimelineStep:
        return TimelineStep(
            time=self.now,
            pool=len(self.state.pool),
            used=self.used,
            value=self.value,
            best_value=self.best_value,
            outcome=self.books.outcome,
            preemption=self.books.lost["preemption"],
            rescale=self.books.lost["rescale"],
            decided=decided,
            pool_event=pool_event,
        )

    def _all_done(self) -> bool:
        if self.present is not None:
            return False
        if self.until_done:
            return self.until_done <= self.summaries.keys()
        return not self.jobs and not self.state.waiting and self.next_arrival == len(self.arrivals)

    def _summary(self, trainer: Trainer) -> TrainerSummary:
        if trainer.name in self.summaries:
            return self.summaries[trainer.name]
        job = self.jobs.get(trainer.name)
        if job is not None:
            return self._summary_of(job, None)
        return TrainerSummary(trainer.name, trainer.model, trainer.submit, None, None, 0.0)

    @staticmethod
    def _summary_of(job: SimulatedTrainer, end: float | None) -> TrainerSummary:
        trainer = job.trainer
        return TrainerSummary(trainer.name, trainer.model, trainer.submit, job.admitted_at, end, job.done)


def _check(trace: Trace, trainers: Sequence[Trainer]) -> None:
    if not trainers:
        raise InputError("the workload has no trainer")
    late = next((t for t in trainers if t.submit >= trace.window.end), None)
    if late is not None:
        raise InputError(f"trainer {late.name!r} is submitted at or after the end of the trace ({trace.window})")
    large = next((t for t in trainers if t.min_nodes > len(trace.nodes)), None)
    if large is not None:
        raise InputError(
            f"trainer {large.name!r} needs at least {large.min_nodes} nodes, but the machine has {len(trace.nodes)}"
        )
