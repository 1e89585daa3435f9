"""Registry of all experiments, in the order of the paper."""

from __future__ import annotations

from collections.abc import Sequence

from bftrainer.errors import InputError
from bftrainer.paper import (
    costs_over_week,
    curve_approximation,
    efficiency_by_objective,
    efficiency_over_week,
    efficiency_vs_horizon,
    event_speedup,
    fragment_cdf,
    idle_stats,
    max_parallel,
    preemption_vs_horizon,
    rescale_cost,
    rescale_cost_vs_horizon,
    roi,
    runtime_by_objective,
    runtime_efficiency,
    runtime_throughput,
    scalability,
    solve_time,
    week,
)
from bftrainer.paper.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = tuple(
    module.EXPERIMENT
    for module in (
        idle_stats,
        fragment_cdf,
        curve_approximation,
        solve_time,
        week,
        preemption_vs_horizon,
        rescale_cost_vs_horizon,
        roi,
        efficiency_vs_horizon,
        efficiency_over_week,
        costs_over_week,
        event_speedup,
        runtime_by_objective,
        efficiency_by_objective,
        max_parallel,
        runtime_throughput,
        runtime_efficiency,
        scalability,
        rescale_cost,
    )
)
ALL = "all"


def find_experiments(names: Sequence[str]) -> tuple[Experiment, ...]:
    """The experiments with these names, in the order of the paper; no name, or `all`: all of them."""
    known = [experiment.name for experiment in EXPERIMENTS]
    unknown = next((name for name in names if name not in (*known, ALL)), None)
    if unknown is not None:
        raise InputError(f"NAME must be all or some of {', '.join(known)}, but got {unknown!r}")
    if not names or ALL in names:
        return EXPERIMENTS
    return tuple(experiment for experiment in EXPERIMENTS if experiment.name in names)
