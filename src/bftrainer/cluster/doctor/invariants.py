"""Invariant checks find contradictions in the rows and events of the database.

`doctor.py` reads the rows and passes them in; findings come out. All functions are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from bftrainer.cluster.launchers.base import HEAD
from bftrainer.cluster.spec.states import FINISHED, STATES
from bftrainer.cluster.store.events import (
    Decided,
    Rescaled,
    StateChanged,
    TrainerSubmitted,
    WorkerStarted,
    kinds_of,
)
from bftrainer.cluster.store.replay import PoolReplay
from bftrainer.cluster.store.rows import EventRow, EventSpan, NodeRow, TrainerRow, WorkerRow

EVENT_KINDS = kinds_of(TrainerSubmitted, StateChanged, Rescaled, WorkerStarted, Decided)
"""Kinds of events that `history` checks."""

LAG_S = 60.0
"""Seconds that workers may take to end after their trainer is done: it is done as soon as they report it."""

MOST = 10
"""Limit of findings of one kind that are shown."""

_RESTORE = "restore a back-up, or keep the state folder and report this"

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """Result of one check: its subject, whether it is in order, and what to do if not."""

    level: Level
    what: str
    advice: str = ""


def summed(good: str, findings: Iterable[DoctorFinding]) -> list[DoctorFinding]:
    """Return the first `MOST` findings and the number of further ones; `good` if there are none."""
    rest = iter(findings)
    shown = list(islice(rest, MOST))
    more = [finding.level for finding in rest]
    if more:
        level: Level = "error" if "error" in more else "warning"
        shown.append(DoctorFinding(level, f"and {len(more)} more of this kind", shown[-1].advice))
    return shown or [DoctorFinding("ok", good)]


def trainers_agree(trainers: Sequence[TrainerRow]) -> Iterator[DoctorFinding]:
    """Check each trainer's row by itself, and that no two unfinished trainers of an owner share a name."""
    names = Counter((trainer.owner, trainer.name) for trainer in trainers if not trainer.finished)
    for (owner, name), count in names.items():
        if count > 1:
            yield _error(
                f"{count} unfinished trainers are named {name!r}, all of {owner}", "cancel all but one by their ids"
            )
    for trainer in trainers:
        who = _who(trainer)
        if trainer.state not in STATES:
            yield _error(f"{who} is in a state that does not exist, {trainer.state!r}")
        elif trainer.finished and trainer.ended is None:
            yield _error(f"{who} is {trainer.state}, but has no time of its end")
        elif not trainer.finished and trainer.ended is not None:
            yield _error(f"{who} has ended, but is {trainer.state}")
        if trainer.state == "done" and trainer.total is not None and trainer.samples != trainer.total:
            yield _error(
                f"{who} is done with {trainer.samples:,} samples of {trainer.total:,}",
                "samples were lost or counted twice: do not trust its result",
            )


def workers_agree(
    trainers: Sequence[TrainerRow], workers: Sequence[WorkerRow], here: Sequence[NodeRow], now: float
) -> Iterator[DoctorFinding]:
    """Check that each running worker has an unfinished trainer and its own present node; ids are in order."""
    by_id = {trainer.id: trainer for trainer in trainers}
    nodes = {node.node for node in here}
    running = [worker for worker in workers if worker.ended is None]
    for worker in running:
        trainer = by_id.get(worker.trainer)
        if trainer is None:
            yield _error(f"worker {worker.worker} runs for trainer {worker.trainer}, which does not exist")
        elif trainer.finished and trainer.ended is not None and now - trainer.ended > LAG_S:
            yield _error(
                f"worker {worker.worker} still runs on {worker.node}, but {_who(trainer)} is {trainer.state}",
                "restart the controller, which ends it",
            )
        if worker.node not in nodes:
            yield _error(
                f"worker {worker.worker} runs on {worker.node}, which is not here",
                "restart the controller, which ends it",
            )
    for name, count in Counter(worker.node for worker in running if worker.node != HEAD).items():
        if count > 1:
            who = ", ".join(worker.worker for worker in running if worker.node == name)
            yield _error(f"{count} workers run on {name}: {who}", "restart the controller")
    for worker in workers:
        prefix, _, number = worker.worker.rpartition("-")
        trainer = by_id.get(worker.trainer)
        if prefix != worker.trainer or not (number.isascii() and number.isdigit()):
            yield _error(f"worker {worker.worker} is not named after its trainer, {worker.trainer}")
        elif trainer is not None and int(number) >= trainer.next_worker:
            yield _error(
                f"{_who(trainer)} would reuse the number of worker {worker.worker} (next is {trainer.next_worker})"
            )


def log_is_whole(span: EventSpan) -> Iterator[DoctorFinding]:
    """Check that no event is missing except trimmed ones."""
    if span.count and span.last - span.first + 1 != span.count:
        missing = span.last - span.first + 1 - span.count
        yield _error(f"{missing:,} events are missing between number {span.first} and {span.last}")
    if span.ever > max(span.last, span.trimmed):
        yield _error(f"the events after number {max(span.last, span.trimmed)} are missing, up to {span.ever}")
    if span.count and span.first > span.trimmed + 1:
        yield _error(f"the events from number {span.trimmed + 1} to {span.first - 1} are missing")


def history(rows: Iterable[EventRow], trainers: Sequence[TrainerRow], trimmed: bool) -> Iterator[DoctorFinding]:
    """Check that the events are continuous and end in the state that is stored now.

    In a trimmed log, the events of a trainer may begin with any state, unless its submission is still there.
    """
    states: dict[str, str] = {} if trimmed else {trainer.id: "queued" for trainer in trainers}
    moved: set[str] = set()
    generations: dict[str, int] = {}
    workers: set[str] = set()
    for at in PoolReplay().read(rows):
        match at.event:
            case TrainerSubmitted(trainer=name):
                states[name] = "queued"
            case StateChanged(trainer=name, to=after):
                stored = at.row.data.get("from")
                before = stored if isinstance(stored, str) else repr(stored)  # a damaged row
                expected = states.get(name, before)
                if before == "" and name not in moved:
                    before = expected  # the first change may be logged with an empty `from`
                moved.add(name)
                if before != expected or not isinstance(stored, str):
                    yield _error(f"event {at.seq}: trainer {name} goes from {stored!r}, but was {expected}")
                elif before in FINISHED:
                    yield _error(f"event {at.seq}: trainer {name} continues after it was {before}")
                if after not in STATES:
                    yield _error(f"event {at.seq}: trainer {name} changes to {after!r}, which is not a state")
                states[name] = after
            case Rescaled(trainer=name, generation=generation):
                newest = generations.get(name, 0)
                if generation < newest:
                    falls = f"falls from generation {newest} to {generation}"
                    yield _error(f"event {at.seq}: trainer {name} {falls}")
                generations[name] = max(generation, newest)
            case WorkerStarted(worker=worker):
                if worker and worker in workers:
                    yield _error(f"event {at.seq}: the worker id {worker} is used a second time")
                workers.add(worker)
            case Decided(nodes=nodes):
                yield from _decision(at.seq, nodes)
    for trainer in trainers:
        told = states.get(trainer.id, trainer.state)
        if told != trainer.state:
            yield _error(f"{_who(trainer)} is {trainer.state}, but by its events it is {told}")
        if generations.get(trainer.id, 0) > trainer.generation:
            yield _error(
                f"{_who(trainer)} is in generation {trainer.generation}, but has been in {generations[trainer.id]}"
            )


def _decision(seq: int, nodes: Mapping[str, Any]) -> Iterator[DoctorFinding]:
    holders: dict[str, str] = {}
    for trainer, given in nodes.items():
        for node in given if isinstance(given, list) else ():
            if node in holders:
                yield _error(f"event {seq}: a decision gives {node} to {holders[node]} and to {trainer}")
            holders[node] = trainer


def _who(trainer: TrainerRow) -> str:
    return f"trainer {trainer.id} ({trainer.name})"


def _error(what: str, advice: str = _RESTORE) -> DoctorFinding:
    return DoctorFinding("error", what, advice)
