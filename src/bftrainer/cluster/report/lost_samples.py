"""Lost samples measure what preemptions and rescales cost, read from the event log.

Lost samples are those that were not made because nodes were taken or trainers rescaled. `daily.py` computes them for
the last day, in a separate process. Each loss is a time without training times the rate measured at the size before it.
Samples that had to be made again are not included: they are counted only for a whole training, and the time at which
they were lost is not known.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field

from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.events import (
    NodeLeaving,
    NodeLeft,
    Rescaled,
    StateChanged,
    WorkerEnded,
    WorkerStarted,
    kinds_of,
)
from bftrainer.cluster.store.replay import POOL_EVENTS, PoolReplay, Replayed
from bftrainer.cluster.store.store import Store

STANDS = ("queued", "starting", "waiting")
"""States in which an unfinished trainer does not train."""
KINDS = kinds_of(*POOL_EVENTS, WorkerStarted, WorkerEnded, StateChanged, Rescaled)


def read_costs(db: Database, start: float, end: float) -> dict[str, float]:
    """Return the cost of preemptions and of rescales from `start` to `end`, in samples."""
    with db.transaction():
        rates = {
            f"t{number}": {int(size): float(rate) for size, rate in json.loads(in_use or "{}").items()}
            for number, in_use in db.rows("SELECT number, json_extract(learned, '$.in_use') FROM trainers")
        }
        lost_samples = _LostSamples(start, end, rates)
        # From the beginning of the log: a trainer that lost nodes before the window may have none in it.
        for at in PoolReplay().read(row for row in Store(db).all_events(KINDS) if row.time <= end):
            lost_samples.take(at)
    return lost_samples.close()


@dataclass(slots=True)
class _TrainerRecord:
    """State of a trainer since its members last formed a generation."""

    size: int = 0
    """Size at which it trained last; 0: it never has."""
    standing_since: float | None = None
    node_taken_at: float | None = None
    """Time when a node with a worker of this trainer was taken, or announced to be taken."""


@dataclass(slots=True)
class _LostSamples:
    """Reads the log and adds up the lost samples within a window."""

    start: float
    end: float
    rates: dict[str, dict[int, float]]
    costs: dict[str, float] = field(default_factory=lambda: {"preemption": 0.0, "rescale": 0.0})
    trainers: defaultdict[str, _TrainerRecord] = field(default_factory=lambda: defaultdict(_TrainerRecord))
    on: dict[str, str] = field(default_factory=dict)
    """Trainer by node."""

    def take(self, at: Replayed) -> None:
        """Apply one event."""
        match at.event:
            case WorkerStarted(trainer=trainer, node=node):
                self.on[node] = trainer
            case WorkerEnded(trainer=trainer, node=node):
                if self.on.get(node) == trainer:
                    del self.on[node]
            case NodeLeaving(node=node) | NodeLeft(node=node):
                if at.lost:
                    self._note_taken_node(node, at.time)
                if isinstance(at.event, NodeLeft):
                    self.on.pop(node, None)
            case StateChanged(trainer=trainer, to=to):
                record = self.trainers[trainer]
                if to in STANDS and record.size and record.standing_since is None:
                    record.standing_since = at.time
                elif to in FINISHED:
                    self._count_standstill(trainer, at.time)
                    del self.trainers[trainer]
            case Rescaled() as rescale:
                self._count_rescale(at.time, rescale)

    def close(self) -> dict[str, float]:
        """End the window: a trainer that lost nodes and still does not train has lost all the time up to the end."""
        for trainer in self.trainers:
            self._count_standstill(trainer, self.end)
        return self.costs

    def _note_taken_node(self, node: str, time: float) -> None:
        trainer = self.on.get(node)
        if trainer is not None and self.trainers[trainer].node_taken_at is None:
            self.trainers[trainer].node_taken_at = time

    def _count_rescale(self, time: float, rescale: Rescaled) -> None:
        trainer, why, before = rescale.trainer, rescale.why, rescale.world_before
        record = self.trainers[trainer]
        if why == "start" or not before:
            self._count_standstill(trainer, time)
        elif time >= self.start:
            # An announced departure is logged as a shrink (or a move), but it is a preemption all the same.
            taken = why == "preempt" or (why != "grow" and record.node_taken_at is not None)
            pause_s = rescale.pause_s or 0.0
            self.costs["preemption" if taken else "rescale"] += pause_s * self._rate(trainer, before)
        self.trainers[trainer] = _TrainerRecord(rescale.world)

    def _count_standstill(self, trainer: str, until: float) -> None:
        """Count the time up to `until` in which a trainer did not train.

        It is a loss only if nodes were taken from the trainer before. It is no loss if the script failed or the nodes
        were given to other trainers.
        """
        record = self.trainers[trainer]
        if record.standing_since is not None and record.node_taken_at is not None:
            seconds = max(0.0, min(until, self.end) - max(record.standing_since, self.start))
            self.costs["preemption"] += seconds * self._rate(trainer, record.size)

    def _rate(self, trainer: str, size: int) -> float:
        rates = self.rates.get(trainer, {})
        if size in rates:
            return rates[size]
        near = min(rates, key=lambda other: abs(other - size), default=None)
        return rates[near] * size / near if near else 0.0
