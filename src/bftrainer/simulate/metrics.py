"""Metrics of a replay, each defined once. docs/simulation.md has the formulas.

Efficiency U is t_s / t: t is the replay's time and t_s the time a static pool of eq-nodes needs for the same outcome,
with the same workload, allocator, objective and max parallel, and no cost of any kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bftrainer.allocate.admission import admit
from bftrainer.allocate.problem import Claim, Problem
from bftrainer.core.curve import Curve
from bftrainer.core.pool import Pool
from bftrainer.core.trainer import Trainer
from bftrainer.scheduler import DEFAULT_HORIZON_S, Policy, Scheduler, State
from bftrainer.simulate.replay import Replay


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Losses that separate U from the bound, in the unit of U. The parts add up to bound − U."""

    allocation: float
    """Rates below the best: sizes kept because changing them would have cost more, or decided on too late."""
    preemption: float
    rescale: float
    waiting: float
    """Starting up, and nodes held by trainers that were done but not noticed yet."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """The figures of one replay."""

    efficiency: float
    bound: float
    outcome_samples: float
    resource_integral_node_hours: float
    eq_nodes: float
    hours: float
    completed: int
    events: int
    decisions: int
    preemption_cost_samples: float
    rescale_cost_samples: float
    waiting_cost_samples: float
    unoccupied_share: float
    """Share of the pool's node-time that no trainer held."""
    roi: float | None
    """Return on investment: samples made for each sample that rescaling cost."""
    mean_run_hours: float | None
    run_hours_spread: float | None
    """Fairness: standard deviation of run times over their mean."""
    breakdown: Breakdown
    decision_ms: dict[str, float]
    wall_s: float
    finished: bool


def measure(replay: Replay, trainers: Sequence[Trainer], policy: Policy) -> Metrics:
    """Compute all metrics of a replay of `trainers` under `policy`."""
    seconds = replay.end - replay.start
    eq_nodes = replay.pool_node_seconds / seconds if seconds > 0 else 0.0
    static_s = static_time(trainers, policy, eq_nodes, replay.start, replay.outcome)
    efficiency = static_s / seconds if seconds > 0 else 0.0
    unit = efficiency / replay.value if replay.value > 0 else 0.0
    bound = replay.best_value * unit
    lost = replay.lost
    preemption, rescale, waiting = (replay.lost_value[why] * unit for why in ("preemption", "rescale", "waiting"))
    run_hours = np.array([row.run_hours for row in replay.trainers if row.run_hours is not None])
    return Metrics(
        efficiency=efficiency,
        bound=bound,
        outcome_samples=replay.outcome,
        resource_integral_node_hours=replay.pool_node_seconds / 3600,
        eq_nodes=eq_nodes,
        hours=seconds / 3600,
        completed=len(run_hours),
        events=replay.pool_events,
        decisions=replay.decisions,
        preemption_cost_samples=lost["preemption"],
        rescale_cost_samples=lost["rescale"],
        waiting_cost_samples=lost["waiting"],
        unoccupied_share=1 - replay.used_node_seconds / replay.pool_node_seconds if replay.pool_node_seconds else 0.0,
        roi=replay.outcome / lost["rescale"] if lost["rescale"] > 0 else None,
        mean_run_hours=float(run_hours.mean()) if len(run_hours) else None,
        run_hours_spread=float(run_hours.std() / run_hours.mean()) if len(run_hours) else None,
        breakdown=Breakdown((bound - efficiency) - preemption - rescale - waiting, preemption, rescale, waiting),
        decision_ms=_latency(replay),
        wall_s=replay.wall_s,
        finished=replay.finished,
    )


def static_time(trainers: Sequence[Trainer], policy: Policy, nodes: float, start: float, outcome: float) -> float:
    """Seconds in which a static pool of `nodes` makes `outcome` samples at no cost.

    For a fraction of a node, every trainer's rate is interpolated between the pools of the next smaller and the next
    larger whole number of nodes.
    """
    if outcome <= 0:
        return 0.0
    static = _StaticRates(policy, nodes)
    arrivals = sorted(trainers, key=lambda trainer: trainer.submit)
    running: list[tuple[Trainer, float]] = []  # trainers with the samples left
    waiting: list[Trainer] = []
    pool = math.ceil(nodes)
    parallel = Scheduler(policy).max_parallel(_static_state(nodes, arrivals))
    # Seconds since the start: seconds since 1970 would be too coarse for the rest of a trainer's work.
    now, made, following = 0.0, 0.0, 0
    while True:
        while following < len(arrivals) and arrivals[following].submit - start <= now:
            waiting.append(arrivals[following])
            following += 1
        considered = [trainer for trainer, _ in running]
        for trainer in admit(considered, waiting, parallel - len(running), policy.limits, pool):
            running.append((trainer, trainer.work))
            waiting.remove(trainer)
        rates = static.rates([trainer for trainer, _ in running])
        total = math.fsum(rates)
        spans = [left / rate if rate > 0 else math.inf for (_, left), rate in zip(running, rates, strict=True)]
        passed = min(spans, default=math.inf)
        if following < len(arrivals):
            arrival, considered = arrivals[following], [trainer for trainer, _ in running]
            if arrival in admit(considered, (*waiting, arrival), parallel - len(running), policy.limits, pool):
                passed = min(passed, arrival.submit - start - now)
        if math.isinf(passed) or made + total * passed >= outcome * (1 - 1e-12):
            return now + ((outcome - made) / total if total > 0 else 0.0)
        made += total * passed
        now += passed
        # Trainers whose span has passed are done, whatever rounding leaves of their work.
        running = [
            (trainer, left - rate * passed)
            for (trainer, left), rate, span in zip(running, rates, spans, strict=True)
            if span > passed
        ]


def _static_state(nodes: float, arrivals: Sequence[Trainer]) -> State:
    """A state with a pool that never changes, for a max parallel that depends on the pool."""
    return State(Pool({f"node{i}": 0.0 for i in range(round(nodes))}), waiting=tuple(arrivals))


class _StaticRates:
    """Rates of trainers in a pool that never changes, without costs. The same set of kinds gets the same rates."""

    def __init__(self, policy: Policy, nodes: float) -> None:
        self._policy = policy
        self._sizes = (math.floor(nodes), math.ceil(nodes))
        self._fraction = nodes - math.floor(nodes)
        self._known: dict[tuple[int, ...], list[float]] = {}
        self._values: dict[str, Curve] = {}
        self._kinds: dict[tuple[Curve, Curve, int, int], int] = {}
        self._kind_of: dict[str, int] = {}

    def rates(self, trainers: Sequence[Trainer]) -> list[float]:
        """Samples per second of each trainer."""
        key = tuple(self._kind(t) for t in trainers)
        found = self._known.get(key) if not self._policy.limits else None
        if found is None:
            low, high = (self._counts(trainers, size) for size in self._sizes)
            found = self._known[key] = [
                (1 - self._fraction) * t.curve.rate(a) + self._fraction * t.curve.rate(b)
                for t, a, b in zip(trainers, low, high, strict=True)
            ]
        return found

    def _counts(self, trainers: Sequence[Trainer], pool: int) -> tuple[int, ...]:
        horizon_s = self._policy.horizon_s or DEFAULT_HORIZON_S
        claims = tuple(Claim(t.name, 0, t.min_nodes, t.max_nodes, self._value(t), 0.0, 0.0, t.owner) for t in trainers)
        return self._policy.allocator.allocate(Problem(pool, horizon_s, claims, self._policy.limits)).counts

    def _kind(self, trainer: Trainer) -> int:
        """A number for all that the rates depend on: trainers with the same number are interchangeable."""
        kind = self._kind_of.get(trainer.name)
        if kind is None:
            what = (trainer.curve, self._value(trainer), trainer.min_nodes, trainer.max_nodes)
            kind = self._kind_of[trainer.name] = self._kinds.setdefault(what, len(self._kinds))
        return kind

    def _value(self, trainer: Trainer) -> Curve:
        value = self._values.get(trainer.name)
        if value is None:
            value = self._values[trainer.name] = self._policy.objective(trainer)
        return value


def _latency(replay: Replay) -> dict[str, float]:
    if not len(replay.decision_ms):
        return {"p50": 0.0, "p99": 0.0, "max": 0.0}
    p50, p99 = np.percentile(replay.decision_ms, [50, 99])
    return {"p50": float(p50), "p99": float(p99), "max": float(replay.decision_ms.max())}


def as_json(metrics: Metrics, replay: Replay) -> dict[str, Any]:
    """Metrics by the JSON keys that users rely on, and more."""
    rows = [
        {
            "name": row.name,
            "model": row.model,
            "submit": row.submit,
            "start": row.start,
            "end": row.end,
            "run_hours": row.run_hours,
            "samples": row.samples,
        }
        for row in replay.trainers
    ]
    return {**asdict(metrics), "trainers": rows}
