"""A rerun repeats a live run from its event log.

`check` feeds the recorded events to a new scheduler and compares its decisions with the recorded ones. Live and
simulated decisions use the same code, and this check shows it. `as_study` turns the run into a trace and trainers with
the measured curves and pauses, so that `simulate` can tell what another policy would have made of the same nodes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from bftrainer.cluster.jobs.learning import Learned, Prior
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.events import (
    Decided,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    Rescaled,
    StateChanged,
    TrainerLearned,
    WorkerStarted,
    kinds_of,
)
from bftrainer.cluster.store.replay import POOL_EVENTS, PoolReplay
from bftrainer.cluster.store.rows import EventRow, TrainerRow
from bftrainer.cluster.store.scheduling_events import decision_limits, learned_trainer
from bftrainer.core.pool import Event, Fragment
from bftrainer.core.trace import Trace, Window
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError
from bftrainer.scheduler import Policy, Scheduler, State

KINDS = kinds_of(*POOL_EVENTS, TrainerLearned, StateChanged, Decided)
"""The events that decisions depend on, and the decisions."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A decision that differs from the recorded one."""

    seq: int
    recorded: Any
    made: Any


@dataclass(frozen=True, slots=True)
class Checked:
    """Number of decisions that were repeated, and those that differ."""

    decisions: int
    mismatches: tuple[Mismatch, ...]


def check(rows: Iterable[EventRow], policy: Policy) -> Checked:
    """Repeat every recorded decision."""
    scheduler, state = Scheduler(policy), State()
    known: set[str] = set()
    count, wrong = 0, []
    for at in PoolReplay().read(rows):
        match at.event:
            case NodeJoined(node=node):
                state, _ = state.pool_changed(Event(at.time, joined=(node,)))
            case NodeLeaving(node=node) | NodeLeft(node=node) if at.lost:
                state, _ = state.pool_changed(Event(at.time, left=(node,)))
            case TrainerLearned() as learned:
                trainer = learned_trainer(learned)
                state = state.relearned(trainer) if trainer.name in known else state.submitted(trainer)
                known.add(trainer.name)
            case StateChanged(trainer=name, to=to) if to in FINISHED and name in known:
                known.discard(name)
                state = state.finished(name)
            case Decided() as recorded:
                plan = scheduler.decide(state, decision_limits(recorded))
                state = state.after(plan)
                count += 1
                made = {name: list(nodes) for name, nodes in state.assigned.items()}
                if dict(plan.counts) != recorded.counts or made != recorded.nodes:
                    wrong.append(Mismatch(at.seq, recorded.nodes, made))
    return Checked(count, tuple(wrong))


class EventSource(Protocol):
    """Something that tells a run: a store, or an excerpt of one."""

    def all_events(self) -> Iterator[EventRow]:
        """Yield the events in order."""
        ...

    def trainers(self) -> list[TrainerRow]:
        """Return the trainers, as they are at the end of the run."""
        ...


@dataclass(frozen=True, slots=True)
class Recorded:
    """A live run in the form that the simulator takes."""

    trace: Trace
    trainers: tuple[Trainer, ...]
    """Trainers with their measured curves and pauses, and their work."""
    outcome: float
    """Samples that the trainers made."""
    start: float
    end: float
    lag_s: float
    """Median time from a node's join to its first step. The trace's fragments begin when nodes could compute."""


@dataclass(slots=True)
class _RunLog:
    """The facts of a log that a study needs."""

    end: float = 0.0
    joins: list[tuple[float, str]] = field(default_factory=list)
    stays: list[tuple[str, float, float]] = field(default_factory=list)
    """Node, join and loss of each stay in the pool that is over."""
    here: dict[str, float] = field(default_factory=dict)
    """When the nodes joined that are still there."""
    learned: dict[str, TrainerLearned] = field(default_factory=dict)
    rescales: list[Rescaled] = field(default_factory=list)
    workers: int = 0

    @classmethod
    def read(cls, rows: Iterable[EventRow]) -> _RunLog:
        """Read a log from its beginning."""
        pool = PoolReplay()
        found = cls(here=pool.here)
        for at in pool.read(rows):
            found.end = at.time
            match at.event:
                case NodeJoined(node=node):
                    found.joins.append((at.time, node))
                case NodeLeaving(node=node) | NodeLeft(node=node) if at.lost and at.since is not None:
                    found.stays.append((node, at.since, at.time))
                case TrainerLearned() as learned:
                    found.learned[learned.trainer] = learned
                case Rescaled() as rescale:
                    found.rescales.append(rescale)
                case WorkerStarted():
                    found.workers += 1
        return found

    @property
    def lag_s(self) -> float:
        """The median time from the start of a worker to its first step."""
        lags = [start_s for rescale in self.rescales for start_s in rescale.start_s]
        return statistics.median(lags) if lags else 0.0

    @property
    def moved_share(self) -> float:
        """The share of started workers whose node had not just joined the pool."""
        return max(1.0 - len(self.joins) / self.workers, 0.0) if self.workers else 0.0

    def mean_size(self, trainer: str) -> float:
        """Return the mean size from which a trainer grew."""
        sizes = [each.world_before for each in self.rescales if each.trainer == trainer and each.world_before > 0]
        return statistics.fmean(sizes) if sizes else 1.0

    def fragments(self, end: float, lag_s: float) -> Iterator[Fragment]:
        """Yield the stays up to `end`, each beginning `lag_s` later."""
        for node, joined, lost in self.stays:
            if joined < end and min(lost, end) > joined + lag_s:
                yield Fragment(node, joined + lag_s, min(lost, end))
        for node, joined in self.here.items():
            if end > joined + lag_s:
                yield Fragment(node, joined + lag_s, end, open=True)


def as_study(source: EventSource, *, lag: bool = True, idle: Trace | None = None) -> Recorded:
    """Return the run of a store.

    With `lag`, a node counts from the measured time when it could compute, not from its join.

    `idle` is a trace of idle nodes that was recorded during the run. If it is given, the nodes are those of the trace.
    The lag then counts from when a node became idle, and idle nodes that never joined the pool are included.
    """
    log = _RunLog.read(source.all_events())
    if not log.joins:
        raise InputError("no node has joined yet: there is nothing to replay")
    rows = [row for row in source.trainers() if row.started is not None or row.samples]
    ends = [row.ended for row in rows if row.ended is not None]
    end = max(ends) if len(ends) == len(rows) and ends else log.end
    lag_s = log.lag_s if lag else 0.0
    moved_s = lag_s * log.moved_share
    if idle is None:
        fragments = list(log.fragments(end, lag_s))
    else:
        lag_s += _join_lag(log.joins, idle) if lag else 0.0
        fragments = list(_later(idle, end, lag_s))
    if not fragments:
        raise InputError("no node was there long enough to compute: there is nothing to replay")
    nodes = tuple(dict.fromkeys(fragment.node for fragment in fragments))
    start = min(fragment.start for fragment in fragments)
    trace = Trace.from_fragments(fragments, nodes, Window(start, end))
    trainers = []
    for row in rows:
        work = row.samples if row.state == "done" else row.total or math.inf
        known = learned_trainer(log.learned[row.id])
        spec = TrainerSpec.model_validate(row.spec)
        learned = Learned.from_json(row.learned or {}, Prior(spec.prior_curve(), spec.up_s, spec.down_s))
        known = replace(known, work=float(work) if work else math.inf, submit=max(row.submitted, start))
        # A node that another trainer gives up cannot compute either until its new worker is up.
        up_s = learned.up_s + moved_s / max(log.mean_size(row.id), 1.0)
        trainers.append(replace(known, up_s=up_s, down_s=learned.down_s, start_s=0.0))  # the start is in the trace
    return Recorded(trace, tuple(trainers), float(sum(row.samples for row in rows)), start, end, lag_s)


def _later(idle: Trace, end: float, lag_s: float) -> Iterator[Fragment]:
    """Yield the fragments of a trace, each beginning `lag_s` later."""
    for spell in idle.fragments():
        last = min(spell.end, end)
        if last > spell.start + lag_s:
            yield Fragment(spell.node, spell.start + lag_s, last, spell.open or spell.end > end)


def _join_lag(joins: Iterable[tuple[float, str]], idle: Trace) -> float:
    """Return the median time from when a node became idle to its join.

    Nodes that were idle before the trace began are not counted.
    """
    spells: dict[str, list[Fragment]] = {}
    for fragment in idle.fragments():
        spells.setdefault(fragment.node, []).append(fragment)
    seen: set[tuple[str, float]] = set()
    lags = []
    for time, node in joins:
        for spell in spells.get(node, ()):
            key = (spell.node, spell.start)
            if idle.window.start < spell.start <= time < spell.end and key not in seen:
                seen.add(key)
                lags.append(time - spell.start)
    return statistics.median(lags) if lags else 0.0
