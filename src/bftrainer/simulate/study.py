"""Study: one simulation from a trace, a workload and settings as text, for a whole machine or logical clusters.

`bftrainer simulate`, `tune` and the experiments of the paper call this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from bftrainer.allocate.registry import make_allocator
from bftrainer.core.objective import find_objective
from bftrainer.core.pool import Node
from bftrainer.core.trace import Trace
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError
from bftrainer.scheduler import DEFAULT_HORIZON_S, Policy
from bftrainer.simulate.accounting import Accounting
from bftrainer.simulate.knowledge import Knowledge, KnownTruth, LearnedTruth, Noise
from bftrainer.simulate.metrics import Metrics, measure, static_time
from bftrainer.simulate.replay import DecideOn, Replay, ReplaySettings, Watch, replay
from bftrainer.simulate.rigid import simulate_rigid

Curves = Literal["known", "learned"]

RATE_NOISE = 0.03
SNAPSHOT_EVERY_S = 30.0
"""Time between snapshots in the live system by default, and of `bftrainer simulate`. In the paper no work is lost."""


@dataclass(frozen=True, slots=True)
class Study:
    """Settings by name, so that they can be sent to another process, stored and shown."""

    allocator: str = "exact"
    objective: str = "throughput"
    horizon_s: float | None = DEFAULT_HORIZON_S
    max_parallel: int | None = 10
    accounting: Accounting = "stall"
    decide_on: DecideOn = "all"
    snapshot_every_s: float = 0.0
    curves: Curves = "known"
    """`learned`: curves and costs are hidden from the scheduler, which learns them from noisy reports."""
    rate_noise: float = RATE_NOISE
    """Relative standard deviation of one reported rate, where curves are learned."""
    seed: int = 1
    """Seed of that noise."""

    def settings(self) -> ReplaySettings:
        """The settings as values."""
        policy = Policy(
            make_allocator(self.allocator), find_objective(self.objective), self.horizon_s, self.max_parallel
        )
        return ReplaySettings(policy, self.accounting, self.decide_on, self.snapshot_every_s)

    def knowledge(self) -> Knowledge:
        """What the scheduler knows when a replay begins."""
        if self.curves == "known":
            return KnownTruth()
        if self.decide_on == "pool":
            raise InputError("curves are learned between changes of the pool: decide on all, not only on the pool")
        return LearnedTruth(Noise(self.rate_noise, self.seed))


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """A replay and its metrics."""

    replay: Replay
    metrics: Metrics


def simulate(
    trace: Trace,
    trainers: Sequence[Trainer],
    study: Study,
    watch: Watch | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Result:
    """Replay and measure."""
    settings = study.settings()
    run = replay(trace, trainers, settings, watch, progress, study.knowledge())
    return Result(run, measure(run, trainers, settings.policy))


def simulate_parts(
    trace: Trace,
    trainers: Sequence[Trainer],
    study: Study,
    parts: int,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Result]:
    """The paper's logical clusters: independent schedulers on disjoint ranges of nodes, trainers dealt in turn."""
    if parts > len(trainers):
        raise InputError(f"--parts must be at most the number of trainers ({len(trainers)}), but got {parts}")
    ranges, hands = split_nodes(trace.nodes, parts), deal_trainers(trainers, parts)
    results: list[Result] = []
    for nodes, some in zip(ranges, hands, strict=True):
        before = len(results)

        def so_far(share: float, before: int = before) -> None:
            progress((before + share) / parts)

        results.append(simulate(trace.select(nodes), some, study, progress=so_far))
    return results


def split_nodes(nodes: Sequence[Node], parts: int) -> list[tuple[Node, ...]]:
    """Split a machine's nodes into `parts` disjoint ranges of nearly equal size, for independent schedulers."""
    if not 1 <= parts <= len(nodes):
        raise InputError(f"parts must be from 1 to the number of nodes ({len(nodes)}), but got {parts}")
    bounds = [len(nodes) * i // parts for i in range(parts + 1)]
    return [tuple(nodes[a:b]) for a, b in pairwise(bounds)]


def deal_trainers(trainers: Sequence[Trainer], parts: int) -> list[tuple[Trainer, ...]]:
    """Deal trainers to `parts` queues in turn, in order of submission."""
    ordered = sorted(trainers, key=lambda trainer: trainer.submit)
    return [tuple(ordered[i::parts]) for i in range(parts)]


@dataclass(frozen=True, slots=True)
class RigidFigures:
    """Figures of fixed-size jobs in a killable queue on the same pool."""

    nodes: int
    efficiency: float
    """In the unit of U: what a static pool of the same node-hours, shared by the allocator, needs for the outcome."""
    outcome_samples: float
    lost_samples: float
    completed: int
    trainers: int
    hours: float
    resource_integral_node_hours: float
    eq_nodes: float
    kills: int
    delayed_leaves: int
    delay_node_seconds: float
    """Node-seconds that the main queue waited because of guarantees."""


def rigid_baseline(
    trace: Trace,
    trainers: Sequence[Trainer],
    study: Study,
    nodes: int,
    checkpoint_s: float | None,
    guaranteed: Sequence[tuple[int, float]],
) -> RigidFigures:
    """The baseline on the same trace and workload, in the same unit.

    `checkpoint_s` None: jobs lose as much as the study's trainers do when all nodes go, by the time between snapshots.
    """
    policy = study.settings().policy
    parallel = policy.max_parallel or max(1, len(trace.nodes) // nodes)
    period_s = study.snapshot_every_s if checkpoint_s is None else checkpoint_s
    result = simulate_rigid(
        trace, trainers, nodes=nodes, max_parallel=parallel, checkpoint_s=period_s, guaranteed=guaranteed
    )
    seconds = result.hours * 3600
    eq_nodes = result.node_seconds_offered / seconds if seconds else 0.0
    static_s = static_time(trainers, policy, eq_nodes, trace.window.start, result.outcome_samples)
    return RigidFigures(
        nodes=nodes,
        efficiency=static_s / seconds if seconds else 0.0,
        outcome_samples=result.outcome_samples,
        lost_samples=result.lost_samples,
        completed=result.completed,
        trainers=len(trainers),
        hours=result.hours,
        resource_integral_node_hours=result.node_seconds_offered / 3600,
        eq_nodes=eq_nodes,
        kills=result.kills,
        delayed_leaves=result.delayed_leaves,
        delay_node_seconds=result.delay_node_seconds,
    )
