"""A rerun repeats a live run from its event log.

`check` feeds the recorded events to a new scheduler and compares its decisions with the recorded ones. Live and
simulated decisions use the same code, and this check shows it. `as_study` turns the run into a trace and trainers with
the measured curves and pauses, so that `simulate` can tell what another policy would have made of the same nodes.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from bftrainer.cluster.jobs.learning import Learned, Prior
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.events import limits_from_json, trainer_from_json
from bftrainer.cluster.store.schema import EventRow
from bftrainer.cluster.store.store import Store
from bftrainer.core.pool import Event, Fragment
from bftrainer.core.trace import Trace, Window
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError
from bftrainer.scheduler import Policy, Scheduler, State

KINDS = ("node.joined", "node.leaving", "node.left", "trainer.learned", "trainer.state", "decision")
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


def check(events: Iterable[EventRow], policy: Policy) -> Checked:
    """Repeat every recorded decision."""
    scheduler, state = Scheduler(policy), State()
    known: set[str] = set()
    leaving: set[str] = set()
    count, wrong = 0, []
    for event in events:
        data = event.data
        match event.kind:
            case "node.joined":
                state, _ = state.pool_changed(Event(event.time, joined=(event.node,)))
            case "node.leaving":
                leaving.add(event.node)
                state, _ = state.pool_changed(Event(event.time, left=(event.node,)))
            case "node.left":
                if event.node in leaving:
                    leaving.discard(event.node)
                else:
                    state, _ = state.pool_changed(Event(event.time, left=(event.node,)))
            case "trainer.learned":
                trainer = trainer_from_json(data)
                state = state.relearned(trainer) if trainer.name in known else state.submitted(trainer)
                known.add(trainer.name)
            case "trainer.state":
                if data["to"] in FINISHED and event.trainer in known:
                    known.discard(event.trainer)
                    state = state.finished(event.trainer)
            case "decision":
                plan = scheduler.decide(state, limits_from_json(data.get("limits")))
                state = state.after(plan)
                count += 1
                made = {name: list(nodes) for name, nodes in state.assigned.items()}
                if dict(plan.counts) != data["counts"] or made != data["nodes"]:
                    wrong.append(Mismatch(event.seq, data["nodes"], made))
    return Checked(count, tuple(wrong))


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


def as_study(store: Store, *, lag: bool = True, idle: Trace | None = None) -> Recorded:
    """Return the run in a store.

    With `lag`, a node counts from the measured time when it could compute, not from its join.

    `idle` is a trace of idle nodes that was recorded during the run. If it is given, the nodes are those of the trace.
    The lag then counts from when a node became idle, and idle nodes that never joined the pool are included.
    """
    events = list(store.all_events())
    if not any(event.kind == "node.joined" for event in events):
        raise InputError("no node has joined yet: there is nothing to replay")
    rows = [row for row in store.trainers() if row.started is not None or row.samples]
    last = {event.trainer: event.data for event in events if event.kind == "trainer.learned"}
    ends = [row.ended for row in rows if row.ended is not None]
    end = max(ends) if len(ends) == len(rows) and ends else events[-1].time
    lag_s = _lag(events) if lag else 0.0
    moved_s = lag_s * _moved_share(events)
    if idle is None:
        fragments = list(_fragments(events, end, lag_s))
    else:
        lag_s += _join_lag(events, idle) if lag else 0.0
        fragments = list(_later(idle, end, lag_s))
    if not fragments:
        raise InputError("no node was there long enough to compute: there is nothing to replay")
    nodes = tuple(dict.fromkeys(fragment.node for fragment in fragments))
    start = min(fragment.start for fragment in fragments)
    trace = Trace.from_fragments(fragments, nodes, Window(start, end))
    trainers = []
    for row in rows:
        work = row.samples if row.state == "done" else row.total or math.inf
        found = trainer_from_json(last[row.id])
        spec = TrainerSpec.model_validate(row.spec)
        learned = Learned.from_json(row.learned or {}, Prior(spec.prior_curve(), spec.up_s, spec.down_s))
        found = replace(found, work=float(work) if work else math.inf, submit=max(row.submitted, start))
        # A node that another trainer gives up cannot compute either until its new worker is up.
        up_s = learned.up_s + moved_s / max(_mean_size(events, row.id), 1.0)
        trainers.append(replace(found, up_s=up_s, down_s=learned.down_s))
    return Recorded(trace, tuple(trainers), float(sum(row.samples for row in rows)), start, end, lag_s)


def _fragments(events: Iterable[EventRow], end: float, lag_s: float) -> Iterator[Fragment]:
    since: dict[str, float] = {}
    for event in events:
        if event.kind == "node.joined" and event.time < end:
            since[event.node] = event.time
        elif event.kind in ("node.leaving", "node.left") and event.node in since:
            start = since.pop(event.node) + lag_s
            if min(event.time, end) > start:
                yield Fragment(event.node, start, min(event.time, end))
    for node, joined in since.items():
        if end > joined + lag_s:
            yield Fragment(node, joined + lag_s, end, open=True)


def _later(idle: Trace, end: float, lag_s: float) -> Iterator[Fragment]:
    """Yield the fragments of a trace, each beginning `lag_s` later."""
    for one in idle.fragments():
        last = min(one.end, end)
        if last > one.start + lag_s:
            yield Fragment(one.node, one.start + lag_s, last, one.open or one.end > end)


def _join_lag(events: Iterable[EventRow], idle: Trace) -> float:
    """Return the median time from when a node became idle to its join.

    Nodes that were idle before the trace began are not counted.
    """
    spells: dict[str, list[Fragment]] = {}
    for fragment in idle.fragments():
        spells.setdefault(fragment.node, []).append(fragment)
    seen: set[tuple[str, float]] = set()
    lags = []
    for event in events:
        if event.kind == "node.joined":
            for spell in spells.get(event.node, ()):
                key = (spell.node, spell.start)
                if idle.window.start < spell.start <= event.time < spell.end and key not in seen:
                    seen.add(key)
                    lags.append(event.time - spell.start)
    return statistics.median(lags) if lags else 0.0


def _moved_share(events: Iterable[EventRow]) -> float:
    """Return the share of started workers whose node had not just joined the pool."""
    kinds = Counter(event.kind for event in events)
    return max(1.0 - kinds["node.joined"] / kinds["worker.started"], 0.0) if kinds["worker.started"] else 0.0


def _mean_size(events: Iterable[EventRow], trainer: str) -> float:
    """Return the mean size from which a trainer grew."""
    sizes = [e.data["world_before"] for e in events if e.kind == "rescale" and e.trainer == trainer]
    grown = [size for size in sizes if size > 0]
    return statistics.fmean(grown) if grown else 1.0


def _lag(events: Iterable[EventRow]) -> float:
    """Return the median time from the start of a worker to its first step."""
    lags = [start_s for event in events if event.kind == "rescale" for start_s in event.data.get("start_s", ())]
    return statistics.median(lags) if lags else 0.0
