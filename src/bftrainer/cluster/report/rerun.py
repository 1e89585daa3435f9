"""A rerun repeats a live run from its event log.

`check` feeds the recorded events to a new scheduler and compares its decisions with the recorded ones. Live and
simulated decisions use the same code, and this check shows it. `as_study` turns the run into a trace and trainers with
the measured curves and pauses, so that `simulate` can tell what another policy would have made of the same nodes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from bftrainer.cluster.agent.signals import SIGNALS
from bftrainer.cluster.jobs.learning import Learned, Prior
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.events import (
    Decided,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodeOwned,
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

KINDS = kinds_of(*POOL_EVENTS, NodeOwned, TrainerLearned, StateChanged, Decided)
"""The events that decisions depend on, and the decisions."""
_SIGNALLED = frozenset(number.name for number in SIGNALS)
"""Reasons of agents that leave because of a signal, as pilots do: their workers have saved the state before."""


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
            case NodeOwned(node=node, owner=owner):
                state = state.owned(node, owner)
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
    made: Mapping[str, float]
    """Samples that each trainer made."""
    start: float
    end: float
    start_s: float
    """Mean time from when a node is given to a trainer to when it can join the others."""
    unannounced: float
    """Share of the losses of nodes that came without announcement or signal, and so left no time for a snapshot."""


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
    losses: int = 0
    announced: int = 0
    waits: dict[str, list[float]] = field(default_factory=dict)
    """How long each worker of a trainer was not started yet: its node still had the worker of another one."""

    @classmethod
    def read(cls, rows: Iterable[EventRow]) -> _RunLog:
        """Read a log from its beginning."""
        pool = PoolReplay()
        found = cls(here=pool.here)
        given: dict[tuple[str, str], float] = {}
        """When each node was given to the trainer that has it."""
        for at in pool.read(rows):
            found.end = at.time
            match at.event:
                case NodeJoined(node=node):
                    found.joins.append((at.time, node))
                case NodeLeaving(node=node) | NodeLeft(node=node) if at.lost and at.since is not None:
                    found.stays.append((node, at.since, at.time))
                    found.losses += 1
                    found.announced += isinstance(at.event, NodeLeaving) or at.event.reason in _SIGNALLED
                case TrainerLearned() as learned:
                    found.learned[learned.trainer] = learned
                case Rescaled() as rescale:
                    found.rescales.append(rescale)
                case Decided(nodes=nodes):
                    pairs = ((trainer, node) for trainer, names in nodes.items() for node in names)
                    given = {pair: given.get(pair, at.time) for pair in pairs}
                case WorkerStarted(trainer=trainer, node=node):
                    wait_s = max(at.time - given.get((trainer, node), at.time), 0.0)
                    found.waits.setdefault(trainer, []).append(wait_s)
        return found

    @property
    def unannounced(self) -> float:
        """The share of lost nodes whose agents did not know it before."""
        return 1.0 - self.announced / self.losses if self.losses else 1.0

    def start_s(self, trainer: str | None = None) -> float:
        """Return the mean time from when a node was given to a trainer, or to any, to when it could join the others.

        It is a mean, because the sum of the starts is what a run loses. The nodes of a trainer without measured starts
        are assumed to take as long as those of all.
        """
        lags = [
            max(start_s - (rescale.pause_s or 0.0), 0.0)
            for rescale in self.rescales
            if trainer in (None, rescale.trainer)
            for start_s in rescale.start_s
        ]
        if not lags:
            return self.start_s() if trainer is not None else 0.0
        waits = [wait_s for name, found in self.waits.items() if trainer in (None, name) for wait_s in found]
        return statistics.fmean(lags) + (statistics.fmean(waits) if waits else 0.0)

    def fragments(self, end: float) -> Iterator[Fragment]:
        """Yield the stays up to `end`."""
        for node, joined, lost in self.stays:
            if joined < min(lost, end):
                yield Fragment(node, joined, min(lost, end))
        for node, joined in self.here.items():
            if joined < end:
                yield Fragment(node, joined, end, open=True)


def as_study(source: EventSource, *, idle: Trace | None = None, lag: bool = True) -> Recorded:
    """Return the run of a store.

    Trainers have their measured curves, pauses and starts. So every policy is charged the starts that it causes.

    `idle` is a trace of idle nodes that was recorded during the run. If it is given, the nodes are those of the trace,
    and idle nodes that never joined the pool are included. With `lag`, a node counts only after the median time that
    nodes took from when they became idle to their join.
    """
    log = _RunLog.read(source.all_events())
    if not log.joins:
        raise InputError("no node has joined yet: there is nothing to replay")
    rows = [row for row in source.trainers() if row.started is not None or row.samples]
    ends = [row.ended for row in rows if row.ended is not None]
    end = max(ends) if len(ends) == len(rows) and ends else log.end
    if idle is None:
        fragments = list(log.fragments(end))
    else:
        fragments = list(_later(idle, end, _join_lag(log.joins, idle) if lag else 0.0))
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
        learned = Learned.from_json(row.learned or {}, Prior(known.curve, spec.up_s, spec.down_s))
        if learned.measured:  # the scheduler is not told all of it: later windows of a stay lead to no decision
            known = replace(known, curve=learned.curve(known.min_nodes, known.max_nodes, 1.0))
        known = replace(known, work=float(work) if work else math.inf, submit=max(row.submitted, start))
        trainers.append(replace(known, up_s=learned.up_s, down_s=learned.down_s, start_s=log.start_s(row.id)))
    made = {row.id: float(row.samples) for row in rows}
    return Recorded(trace, tuple(trainers), made, start, end, log.start_s(), log.unannounced)


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
