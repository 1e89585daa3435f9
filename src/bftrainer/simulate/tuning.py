"""Tuning: sweeps horizon and max parallel over a machine's own history, and recommends values.

`bftrainer tune` calls this. Every combination is a separate simulation; they run on all cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context

from bftrainer.core.trace import Trace
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError
from bftrainer.simulate.study import Study, simulate

WORTH_WAITING = 0.01
"""Efficiency that may be given up for shorter run times: settings this close to the best count as equally efficient."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A combination of horizon and max parallel, and its results."""

    horizon_s: float
    max_parallel: int
    efficiency: float
    bound: float
    mean_run_hours: float | None
    completed: int
    resource_integral_node_hours: float
    unoccupied_share: float


@dataclass(frozen=True, slots=True)
class Advice:
    """Outcome of a sweep."""

    trials: tuple[Trial, ...]
    best: Trial
    """The most efficient trial."""
    recommended: Trial
    """The trial with the shortest run times among those nearly as efficient; among equals the shorter horizon."""
    reasoning: str


def sweep(
    trace: Trace,
    trainers: Sequence[Trainer],
    study: Study,
    horizons_s: Sequence[float],
    parallels: Sequence[int],
    progress: Callable[[float], None] = lambda share: None,
    workers: int | None = None,
) -> Advice:
    """Try every combination of horizon and max parallel."""
    if not horizons_s or not parallels:
        raise InputError("a sweep needs at least one horizon and one max parallel")
    studies = [replace(study, horizon_s=h, max_parallel=p) for h in horizons_s for p in parallels]
    workers = min(workers or os.cpu_count() or 1, len(studies))
    trials: dict[int, Trial] = {}
    # A fresh process imports the same code and shares nothing: its result depends on its arguments only.
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start, initargs=(trace, trainers)) as pool:
        futures = {pool.submit(_try, one): i for i, one in enumerate(studies)}
        for done in as_completed(futures):
            trials[futures[done]] = done.result()
            progress(len(trials) / len(studies))
    return advise([trials[i] for i in range(len(studies))])


def advise(trials: Sequence[Trial]) -> Advice:
    """The recommendation, given the results of every combination."""
    best = max(trials, key=lambda trial: trial.efficiency)
    close = [trial for trial in trials if trial.efficiency >= best.efficiency - WORTH_WAITING]
    chosen = min(close, key=lambda t: (t.mean_run_hours or float("inf"), t.horizon_s))
    reasoning = (
        f"horizon {best.horizon_s:g} s and max parallel {best.max_parallel} are the most efficient, "
        f"with U {best.efficiency:.3f}"
    )
    if chosen is best:
        reasoning += ", and nothing within a hundredth of that trains faster"
    else:
        reasoning += (
            f"; horizon {chosen.horizon_s:g} s and max parallel {chosen.max_parallel} give up "
            f"{best.efficiency - chosen.efficiency:.3f} of it and "
        )
        if chosen.mean_run_hours is not None and best.mean_run_hours:
            reasoning += f"a trainer takes {chosen.mean_run_hours:.2f} h instead of {best.mean_run_hours:.2f} h"
    return Advice(tuple(trials), best, chosen, reasoning)


_work: tuple[Trace, Sequence[Trainer]] | None = None


def _start(trace: Trace, trainers: Sequence[Trainer]) -> None:
    """Set up a process: the trace and trainers are sent once, not with every combination."""
    global _work
    _work = (trace, trainers)


def _try(study: Study) -> Trial:
    assert _work is not None
    metrics = simulate(*_work, study).metrics
    assert study.horizon_s is not None
    assert study.max_parallel is not None
    return Trial(
        study.horizon_s,
        study.max_parallel,
        metrics.efficiency,
        metrics.bound,
        metrics.mean_run_hours,
        metrics.completed,
        metrics.resource_integral_node_hours,
        metrics.unoccupied_share,
    )
