"""`LiveEfficiency` compares a live run with the bound and with other allocators.

It holds the U of the live run, the bound, and the U of the simulated run and of equal shares. The run is read from its
event log (`rerun.as_study`), and the simulator replays it with the measured curves and pauses. All figures are in one
unit: the share of the time in which a static pool of the same node-hours would have made the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bftrainer.allocate.registry import make_allocator
from bftrainer.cluster.report.rerun import Recorded, as_study
from bftrainer.cluster.store.store import Store
from bftrainer.core.trace import Trace
from bftrainer.core.trainer import Trainer
from bftrainer.scheduler import Policy
from bftrainer.simulate.metrics import measure, static_time
from bftrainer.simulate.replay import Replay, ReplaySettings, replay


@dataclass(frozen=True, slots=True)
class LiveEfficiency:
    """Efficiency of a live run, compared with what was possible."""

    efficiency: float
    """U of the live run."""
    bound: float
    """Upper limit of U for any allocator."""
    simulated: float
    """U of the same events in the simulator, with the same policy."""
    equal: float
    """U of the same events in the simulator, with equal shares."""
    outcome_samples: float
    simulated_samples: float
    """Samples by the end of the live run, or when all trainers were done."""
    simulated_s: float
    """Duration of the simulated run."""
    seconds: float
    node_hours: float
    eq_nodes: float
    lag_s: float


def judge(store: Store, policy: Policy, idle: Trace | None = None) -> LiveEfficiency:
    """Compute the efficiency of the run in a store.

    `idle` is a trace of idle nodes that was recorded during the run, if there is one; its nodes are then used.
    """
    run, late = as_study(store, lag=False, idle=idle), as_study(store, idle=idle)
    seconds = run.end - run.start

    def node_seconds(took_s: float) -> float:
        """Return the node-seconds of the pool in the first `took_s` seconds of the run."""
        ends = np.minimum(run.trace.end, run.start + took_s)
        return float(np.maximum(ends - run.trace.start, 0.0).sum())

    def efficiency(outcome: float, took_s: float) -> float:
        if took_s <= 0:
            return 0.0
        return static_time(run.trainers, policy, node_seconds(took_s) / took_s, run.start, outcome) / took_s

    again = _replay(late, late.trainers, policy)
    equal = _replay(late, late.trainers, replace(policy, allocator=make_allocator("equal")))
    free = [replace(trainer, up_s=0.0, down_s=0.0) for trainer in run.trainers]
    best = measure(_replay(run, free, policy), free, policy)
    shift = late.start - run.start
    return LiveEfficiency(
        efficiency=efficiency(run.outcome, seconds),
        bound=best.bound,
        simulated=efficiency(again.outcome, again.end - again.start + shift),
        equal=efficiency(equal.outcome, equal.end - equal.start + shift),
        outcome_samples=run.outcome,
        simulated_samples=again.outcome,
        simulated_s=again.end - again.start + shift,
        seconds=seconds,
        node_hours=node_seconds(seconds) / 3600,
        eq_nodes=node_seconds(seconds) / seconds,
        lag_s=late.lag_s,
    )


def _replay(run: Recorded, trainers: Sequence[Trainer], policy: Policy) -> Replay:
    return replay(run.trace, trainers, ReplaySettings(policy, "stall", "all"))
