"""Efficiency compares a live run, or a part of it, with the best possible and with other allocators.

The run is read from its event log (`rerun.as_study`), and the simulator replays it with the measured curves, pauses and
starts. Every replay is charged the starts and pauses that its own decisions cause. `judge` gives two figures:

- The makespan ratio U: the share of the time in which a static pool of the same node-hours would have made the same
  samples. Where the work of trainers ends, U tells how soon all of it was done, so a policy that leaves the shortest
  trainer for the end loses.
- The work done: what the trainers made, as a share of the best that the pool allowed at every instant to the trainers
  of that instant, at no cost. It tells how well the nodes were used.

`bftrainer report` and the dashboard ask for the figures of a span of time (`efficiency_of`). An `Excerpt` presents that
part of the run as a complete run: trainers count with what they made in it, and nodes that were present at its
beginning count as if they had joined then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from bftrainer.allocate.registry import make_allocator
from bftrainer.cluster.report.rerun import EventSource, Recorded, as_study
from bftrainer.cluster.report.usage import UsageReport
from bftrainer.cluster.store.event_columns import columns_of
from bftrainer.cluster.store.events import (
    Decided,
    ExcerptEnd,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    Rescaled,
    TrainerLearned,
    WorkerStarted,
    kinds_of,
)
from bftrainer.cluster.store.replay import POOL_EVENTS, PoolReplay
from bftrainer.cluster.store.rows import EventRow, TrainerRow
from bftrainer.cluster.store.store import Store
from bftrainer.core.trace import Trace
from bftrainer.errors import BFTrainerError
from bftrainer.scheduler import Policy
from bftrainer.simulate.metrics import measure, static_time
from bftrainer.simulate.replay import Replay, ReplaySettings, replay

MOST_EVENTS = 200_000
MOST_TRAINERS = 2_000
"""Limit of trainers; more take minutes, and the user must ask for that."""
_KINDS = kinds_of(*POOL_EVENTS, TrainerLearned, Rescaled, Decided, WorkerStarted)


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Work done as a share of the best possible, in the objective's unit: of the run, and of two replays of it."""

    live: float
    simulated: float
    equal: float


@dataclass(frozen=True, slots=True)
class LiveEfficiency:
    """Efficiency of a live run, compared with what was possible. All but `work` are makespan ratios, or sizes."""

    efficiency: float
    """U of the live run."""
    bound: float
    """Upper limit of U for any allocator."""
    simulated: float
    """U of the same events in the simulator, with the same policy."""
    equal: float
    """U of the same events in the simulator, with equal shares."""
    work: WorkDone
    outcome_samples: float
    simulated_samples: float
    """Samples by the end of the live run, or when all trainers were done."""
    simulated_s: float
    """Duration of the simulated run."""
    seconds: float
    node_hours: float
    eq_nodes: float
    start_s: float
    """Mean time from when a node is given to a trainer to when it can join the others."""


def judge(
    source: EventSource,
    policy: Policy,
    idle: Trace | None = None,
    *,
    snapshot_every_s: float = 0.0,
    endless: bool = False,
) -> LiveEfficiency:
    """Compute the efficiency of the run of a store.

    `idle` is a trace of idle nodes that was recorded during the run, if there is one; its nodes are then used.
    `snapshot_every_s` is the time between snapshots: what a replay loses when all nodes of a trainer go unannounced.
    `endless`: no trainer runs out of work in the replays, for a run in which none did.
    """
    run, late = as_study(source, idle=idle, lag=False), as_study(source, idle=idle)
    trainers = [replace(trainer, work=math.inf) for trainer in run.trainers] if endless else list(run.trainers)
    seconds, outcome = run.end - run.start, sum(run.made.values())
    # The simulator loses the work since the last snapshot at every such loss; live, only where nothing announced it.
    snapshot_every_s *= run.unannounced

    def node_seconds(took_s: float) -> float:
        """Return the node-seconds of the pool in the first `took_s` seconds of the run."""
        ends = np.minimum(run.trace.end, run.start + took_s)
        return float(np.maximum(ends - run.trace.start, 0.0).sum())

    def efficiency(outcome: float, took_s: float) -> float:
        if took_s <= 0:
            return 0.0
        return static_time(trainers, policy, node_seconds(took_s) / took_s, run.start, outcome) / took_s

    def replayed(policy: Policy) -> Replay:
        return replay(late.trace, trainers, ReplaySettings(policy, "stall", "all", snapshot_every_s))

    again, equal = replayed(policy), replayed(replace(policy, allocator=make_allocator("equal")))
    free = [replace(trainer, up_s=0.0, down_s=0.0, start_s=0.0) for trainer in trainers]
    best = replay(run.trace, free, ReplaySettings(policy, "stall", "all"))
    shift = late.start - run.start
    return LiveEfficiency(
        efficiency=efficiency(outcome, seconds),
        bound=measure(best, free, policy).bound,
        simulated=efficiency(again.outcome, again.end - again.start + shift),
        equal=efficiency(equal.outcome, equal.end - equal.start + shift),
        work=WorkDone(
            live=_share(_value_made(run, policy), again.best_value * seconds / (again.end - again.start)),
            simulated=_share(again.value, again.best_value),
            equal=_share(equal.value, equal.best_value),
        ),
        outcome_samples=outcome,
        simulated_samples=again.outcome,
        simulated_s=again.end - again.start + shift,
        seconds=seconds,
        node_hours=node_seconds(seconds) / 3600,
        eq_nodes=node_seconds(seconds) / seconds,
        start_s=run.start_s,
    )


def _value_made(run: Recorded, policy: Policy) -> float:
    """Return what the trainers made in the objective's unit: samples by their value on the fewest nodes."""
    value = 0.0
    for trainer in run.trainers:
        rate = trainer.curve.rate(trainer.min_nodes)
        worth = policy.objective(trainer).rate(trainer.min_nodes)
        value += run.made[trainer.name] * worth / rate if rate > 0 else 0.0
    return value


def _share(made: float, best: float) -> float:
    return made / best if best > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Efficiency:
    """U, the bound and the work done, or the reason why they are not known."""

    efficiency: float | None = None
    bound: float | None = None
    work: float | None = None
    """Work done, as a share of the best possible."""
    equal_work: float | None = None
    """The same for equal shares in the simulator."""
    why: str = ""


def efficiency_of(store: Store, account: UsageReport, policy: Policy, *, at_any_cost: bool = False) -> Efficiency:
    """Return the efficiency of the span of a usage report. This may take many seconds."""
    if not account.samples:
        return Efficiency(why="no sample was made")
    large = store.event_span().count > MOST_EVENTS or len(account.trainers) > MOST_TRAINERS
    if large and not at_any_cost:
        return Efficiency(why="the log is long: ask for it with --efficiency, and wait some minutes")
    try:
        judged = judge(Excerpt(store, account), policy)
    except BFTrainerError as problem:
        return Efficiency(why=str(problem))
    except (KeyError, ZeroDivisionError):
        return Efficiency(why="too little has happened")
    if not (math.isfinite(judged.efficiency) and math.isfinite(judged.bound)):
        return Efficiency(why="too little has happened")
    return Efficiency(judged.efficiency, judged.bound, judged.work.live, judged.work.equal)


class Excerpt:
    """A store restricted to the window of a usage report, as if the run had begun and ended with it."""

    def __init__(self, store: Store, account: UsageReport) -> None:
        self._store = store
        self._window = account.window
        self._samples = {usage.trainer: usage.samples for usage in account.trainers}

    def all_events(self) -> Iterator[EventRow]:
        """Yield the state at the beginning of the window as events, then the events in the window."""
        start, end = self._window.start, self._window.end
        joined: dict[str, EventRow] = {}
        learned: dict[str, EventRow] = {}
        within: list[EventRow] = []
        for at in PoolReplay().read(self._store.all_events(_KINDS)):
            if at.time > end:
                break
            if at.time >= start:
                within.append(at.row)
                continue
            match at.event:
                case NodeJoined(node=node):
                    joined[node] = at.row
                case NodeLeaving(node=node) | NodeLeft(node=node):
                    joined.pop(node, None)
                case TrainerLearned(trainer=trainer):
                    learned[trainer] = at.row
        yield from (replace(row, time=start) for row in (*joined.values(), *learned.values()))
        yield from within
        yield EventRow(within[-1].seq + 1 if within else 1, end, *columns_of(ExcerptEnd()))

    def trainers(self) -> list[TrainerRow]:
        """Return the trainers that made samples in the window, with only those samples."""
        found = []
        for row in self._store.trainers():
            made = round(self._samples.get(row.id, 0))
            if not made:
                continue
            over = row.ended is not None and row.ended <= self._window.end
            # The simulator needs an amount of work. Trainers that do not state theirs get more than they could do.
            left = 100 * made if row.total is None else max(row.total - row.samples, 0) + made
            state = row.state if over else "running"
            found.append(replace(row, samples=made, total=left, state=state, ended=row.ended if over else None))
        return found
