"""Are predicted finishing times right? Trainers replayed on the Summit trace, predicted at submission and half time.

    python benchmarks/eta.py --data ../shared/data/summit [--json] [--nodes 1024] [--trainers 300] [--futures 32]
    python benchmarks/eta.py --trace theta.parquet [--json] [--week 2 --week 3]

Two weeks of the trace, each with a workload of its own: sweeps of 8 to 16 trials of one model, submitted minutes apart.
The true run of a week is a replay of the trace. At the submission and at half the time of each trainer, what a
controller would know then is taken from it: the nodes and the queue of that moment, the past of the pool and of the
submissions up to then, and the speeds with an error of 3 %. From that `forecast.predict` makes the point and the 80 %
interval. The first week is for fitting one number, `forecast.estimate.SPREAD`: the factor printed as `fitted_spread`
gives 80 % there. docs/eta.md says what else was chosen, and on which week. With other `--nodes`, the sizes of the
trainers grow or shrink likewise. `--workers` processes predict at the same time.

`--trace` replays another machine, on which nothing was fitted: all its weeks but the first count together, each with a
workload of its own. The sizes of the trainers grow or shrink with the mean number of idle nodes.

The exit status is 1 if in the weeks that were not used for fitting less than 75 % or more than 85 % of the intervals
hold the true time, or the median error of the point at half time is above 10 % of the trainer's time from submission to
end.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bftrainer.core.models import PAPER_CURVES
from bftrainer.core.objective import find_objective
from bftrainer.core.trace import Trace, Window, utc
from bftrainer.core.trainer import Trainer
from bftrainer.forecast.estimate import SPREAD, FinishEstimate
from bftrainer.forecast.past import DAY_S, PoolPast
from bftrainer.forecast.predict import Situation, predict
from bftrainer.scheduler import Policy
from bftrainer.simulate.accounting import Books, copied
from bftrainer.simulate.replay import Present, ReplaySettings, replay
from bftrainer.traces.files import load_trace

SETTINGS = ReplaySettings(
    policy=Policy(objective=find_objective("weighted-efficiency"), max_parallel=None), snapshot_every_s=30.0
)
"""As in the live system by default."""
RATE_SIGMA = 0.03
"""Error of the believed speeds."""
GRID_S = 3600.0
"""Predictions are made at multiples of this time, so that one set of futures serves several trainers."""
SIZES = (1, 1, 2, 2, 4, 8)
"""Largest numbers of nodes of the trials of a sweep, of which one is drawn."""
FOR_NODES = 1024
"""Size of the machine that `SIZES` are for. On another one they grow or shrink with it, and so does the load."""
IDLE_OF_SUMMIT = 88.0
"""Mean number of idle nodes on `FOR_NODES` nodes of Summit."""
WEEK_S = 7 * DAY_S
HOURS = 3.0
"""Usual time that a trial takes on its largest number of nodes."""
SPREADS = (0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0)
LEAST, MOST, ERROR = 0.75, 0.85, 0.10

When = Literal["submission", "half time"]


@dataclass(frozen=True, slots=True)
class Case:
    """A prediction and what became of it, in seconds from the moment of the prediction."""

    when: When
    left_s: float
    whole_s: float
    """Time from the submission to the end."""
    times: np.ndarray[tuple[int], np.dtype[np.float64]]
    cpu_s: float = 0.0
    """CPU time of the prediction."""

    def holds(self, spread: float) -> bool:
        """Whether the interval holds the true time."""
        estimate = FinishEstimate.of(self.times, 0.0, spread)
        return estimate is not None and estimate.low_s <= self.left_s <= estimate.high_s

    @property
    def error_s(self) -> float:
        """Error of the point."""
        estimate = FinishEstimate.of(self.times, 0.0)
        return math.inf if estimate is None else abs(estimate.point_s - self.left_s)


def main() -> None:
    """Measure all weeks and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/summit"))
    parser.add_argument("--trace", type=Path, help="another machine, on which nothing was fitted")
    parser.add_argument("--nodes", type=int, help="the first nodes of the machine (Summit: 1024, others: all)")
    parser.add_argument("--trainers", type=int, default=300, help="trainers in each week")
    parser.add_argument("--futures", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes that predict")
    parser.add_argument("--week", type=int, action="append", help="only this week")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    machine = summit(args.data, args.nodes or FOR_NODES) if args.trace is None else other(args.trace, args.nodes)
    weeks = args.week or sorted(machine.weeks)
    if unknown := set(weeks) - set(machine.weeks):
        parser.error(f"there is no week {min(unknown)}: the weeks are {min(machine.weeks)} to {max(machine.weeks)}")
    cases: dict[int, list[Case]] = {}
    found: dict[str, Any] = {}
    for week in weeks:
        cases[week] = cases_of_week(machine, week, args)
        begin, end = machine.weeks[week]
        found[f"week_{week}"] = {"from": utc(begin), "to": utc(end), **figures(cases[week])}
    judged = [week for week in weeks if week not in machine.fitted]
    together = figures([case for week in judged for case in cases[week]]) if judged else {}
    if len(judged) > 1:
        begin, end = machine.weeks[judged[0]][0], machine.weeks[judged[-1]][1]
        found["together"] = {"from": utc(begin), "to": utc(end), **together}
    found["cpu_s"] = round(sum(os.times()[:4]), 1)
    print(json.dumps(found) if args.json else _table(found))
    if together:
        sys.exit(not (LEAST <= together["holds"] <= MOST and together["error_at_half_time"] <= ERROR))


@dataclass(frozen=True, slots=True)
class Machine:
    """A trace, and the weeks of it that have a workload each."""

    trace: Trace
    scale: float
    """How many times as large the trainers are as on `FOR_NODES` nodes of Summit."""
    weeks: Mapping[int, tuple[float, float]]
    fitted: frozenset[int] = frozenset()
    """The weeks on which settings of the forecast were chosen."""


def summit(data: Path, nodes: int) -> Machine:
    """The first nodes of Summit in two weeks."""
    whole = load_trace(data / "fragments.parquet")
    trace = whole.select(whole.nodes[:nodes])
    # The first three days are the past that the first predictions need.
    start, middle = trace.window.start + 3 * DAY_S, trace.window.start + 8.5 * DAY_S
    weeks = {1: (start, middle), 2: (middle, trace.window.end)}
    return Machine(trace, nodes / FOR_NODES, weeks, frozenset({1}))


def other(path: Path, nodes: int | None) -> Machine:
    """Another machine: its first week is the past that the first predictions need."""
    trace = load_trace(path)
    trace = trace.select(trace.nodes[:nodes]) if nodes else trace
    window = trace.window
    whole_weeks = int(window.seconds // WEEK_S)
    weeks = {n: (window.start + (n - 1) * WEEK_S, window.start + n * WEEK_S) for n in range(2, whole_weeks + 1)}
    return Machine(trace, float(trace.lengths.sum()) / window.seconds / IDLE_OF_SUMMIT, weeks)


def cases_of_week(machine: Machine, week: int, args: argparse.Namespace) -> list[Case]:
    """The predictions of one week."""
    begin, end = machine.weeks[week]
    sizes = [max(round(size * machine.scale), 1) for size in SIZES]
    trainers = workload(begin, (end - begin) * 0.9, args.trainers, args.seed + week, sizes)
    window = Window(begin, machine.trace.window.end)
    return cases_of(machine.trace, window, trainers, args.futures, args.seed, args.workers)


def figures(cases: Sequence[Case]) -> dict[str, Any]:
    """How often and how closely predictions were right."""
    half = [case for case in cases if case.when == "half time"]
    first = [case for case in cases if case.when == "submission"]
    return {
        "trainers": len(half),
        "predictions": len(cases),
        "spread": SPREAD,
        "holds": _share(cases, SPREAD),
        "holds_at_submission": _share(first, SPREAD),
        "holds_at_half_time": _share(half, SPREAD),
        "fitted_spread": _fitted(cases),
        "holds_by_spread": {str(spread): _share(cases, spread) for spread in SPREADS},
        "error_at_half_time": _median(case.error_s / case.whole_s for case in half),
        "error_at_half_time_of_rest": _median(case.error_s / case.left_s for case in half),
        "error_at_submission": _median(case.error_s / case.whole_s for case in first),
        "cpu_s_per_prediction": round(statistics.mean(case.cpu_s for case in cases), 4),
        "median_hours": round(statistics.median(case.whole_s for case in half) / 3600, 2),
        "median_interval_of_rest": round(statistics.median(map(_width, half)), 3),
    }


def workload(begin: float, seconds: float, count: int, seed: int, sizes: Sequence[int] = SIZES) -> list[Trainer]:
    """Sweeps of trials, submitted over a time."""
    rng = np.random.Generator(np.random.PCG64(seed))
    found: list[Trainer] = []
    models = list(PAPER_CURVES)
    while len(found) < count:
        model = models[rng.integers(len(models))]
        at = begin + rng.random() * seconds
        most = int(rng.choice(sizes))
        work = HOURS * 3600 * PAPER_CURVES[model].rate(most) * rng.lognormal(0.0, 0.4)
        for trial in range(min(int(rng.integers(8, 17)), count - len(found))):
            name, size = f"s{len(found)}-{trial}", work * rng.lognormal(0.0, 0.2)
            found.append(Trainer(name, PAPER_CURVES[model], 1, most, 5.0, 3.0, size, at, start_s=15.0, model=model))
            at += 30 + rng.exponential(120.0)
    return found


@dataclass(frozen=True, slots=True)
class TrueRun:
    """What became of the trainers of a week, and what was the case at each multiple of `GRID_S`."""

    ends: Mapping[str, float]
    seen: Mapping[float, tuple[float, Present]]
    """By moment: the time of the last step before it, and the trainers as they were since then."""


def true_run(trace: Trace, trainers: Sequence[Trainer]) -> TrueRun:
    """Replay the trace, and keep what a controller would see at each moment."""
    seen: dict[float, tuple[float, Present]] = {}
    last: list[tuple[float, Present]] = []

    def look(now: float, copy: Callable[[], Present]) -> None:
        if last:
            step = last[0][0]
            for grid in range(math.ceil(step / GRID_S), math.ceil(now / GRID_S)):
                seen[grid * GRID_S] = last[0]
        last[:] = [(now, copy())]

    done = replay(trace, trainers, SETTINGS, look=look)
    return TrueRun({row.name: row.end for row in done.trainers if row.end is not None}, seen)


def asked_of(trainers: Sequence[Trainer], run: TrueRun) -> dict[float, list[tuple[Trainer, When]]]:
    """By moment, which trainers are predicted then."""
    asked: dict[float, list[tuple[Trainer, When]]] = {}
    for trainer in trainers:
        if trainer.name in run.ends:
            end = run.ends[trainer.name]
            half = round((trainer.submit + end) / 2 / GRID_S) * GRID_S
            moments: tuple[tuple[float, When], ...] = (
                (math.ceil(trainer.submit / GRID_S) * GRID_S, "submission"),
                (half, "half time"),
            )
            for moment, when in moments:
                if trainer.submit < moment < end and moment in run.seen:
                    asked.setdefault(moment, []).append((trainer, when))
    return asked


def cases_of(
    trace: Trace, window: Window, trainers: Sequence[Trainer], futures: int, seed: int, workers: int = 1
) -> list[Case]:
    """Predictions for all trainers that end in the trace, and what became of each."""
    run = true_run(trace.clip(window), trainers)
    asked = asked_of(trainers, run)
    rng = np.random.Generator(np.random.PCG64(seed))
    error = {trainer.name: math.exp(RATE_SIGMA * rng.standard_normal()) for trainer in trainers}
    predictor = Predictor(trace, tuple(trainers), run, asked, error, futures, seed)
    moments = sorted(asked)
    if workers == 1:
        return [case for moment in moments for case in predictor(moment)]
    # Processes that are forked have the predictor without a copy of it being sent.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, context, _take, (predictor,)) as pool:
        return [case for cases in pool.map(_predicted, moments) for case in cases]


@dataclass(frozen=True, slots=True)
class Predictor:
    """Makes the predictions of one moment."""

    trace: Trace
    trainers: tuple[Trainer, ...]
    run: TrueRun
    asked: Mapping[float, Sequence[tuple[Trainer, When]]]
    error: Mapping[str, float]
    futures: int
    seed: int

    def __call__(self, moment: float) -> list[Case]:
        """Predict the trainers that are asked for at a moment."""
        began = time.process_time()
        step, present = self.run.seen[moment]
        past = PoolPast(self.trace.clip(Window(self.trace.window.start, moment)))
        situation = _situation(moment, step, present, past, self.trainers, self.error, self.run.ends)
        wanted = {trainer.name for trainer, _ in self.asked[moment]}
        predicted = predict(situation, past, self.futures, self.seed + int(moment) % 9973, wanted)
        used = (time.process_time() - began) / len(self.asked[moment])
        cases = []
        for trainer, when in self.asked[moment]:
            end = self.run.ends[trainer.name]
            times = predicted.times[trainer.name] - moment
            cases.append(Case(when, end - moment, end - trainer.submit, times, used))
        return cases


_taken: list[Predictor] = []


def _take(predictor: Predictor) -> None:
    _taken[:] = [predictor]


def _predicted(moment: float) -> list[Case]:
    return _taken[0](moment)


def _situation(
    moment: float,
    step: float,
    present: Present,
    past: PoolPast,
    trainers: Sequence[Trainer],
    error: Mapping[str, float],
    ends: Mapping[str, float],
) -> Situation:
    """What a controller would know at a moment, from what was the case since the step before it."""
    rows = np.flatnonzero(past.trace.open)
    pool = {past.trace.nodes[past.trace.node[row]]: float(past.trace.start[row]) for row in rows}
    books = Books("stall", SETTINGS.snapshot_every_s)
    jobs = {}
    for name, before in present.jobs.items():
        job = copied(before)
        books.progress(job, step, moment)
        left = max(job.trainer.work - job.done, 0.0) * error[name]
        job.trainer = replace(job.trainer, work=job.done + max(left, 1.0))
        jobs[name] = job
    submitted = tuple(trainer for trainer in trainers if trainer.submit < moment)
    since = min(trainer.submit for trainer in trainers)
    queued = [trainer for trainer in submitted if trainer.name not in jobs and ends.get(trainer.name, moment) >= moment]
    waiting = tuple(replace(trainer, work=trainer.work * error[trainer.name]) for trainer in queued)
    sigma = dict.fromkeys(error, RATE_SIGMA)
    return Situation(moment, pool, replace(present, jobs=jobs), waiting, SETTINGS, sigma, submitted, since)


def _share(cases: Sequence[Case], spread: float) -> float:
    return round(sum(case.holds(spread) for case in cases) / max(len(cases), 1), 4)


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)


def _fitted(cases: Sequence[Case]) -> float:
    """The spread with which 80 % of the intervals hold the true time."""
    spreads: list[float] = [0.5 + 0.05 * step for step in range(51)]
    best: float = min(spreads, key=lambda spread: abs(_share(cases, spread) - 0.8))
    return round(best, 2)


def _width(case: Case) -> float:
    estimate = FinishEstimate.of(case.times, 0.0)
    return math.inf if estimate is None else (estimate.high_s - estimate.low_s) / case.left_s


def _table(found: dict[str, Any]) -> str:
    weeks = [name for name in found if name != "cpu_s"]
    keys = found[weeks[0]]
    rows = [f"{key:>28}  " + "  ".join(f"{found[week][key]!s:>22}" for week in weeks) for key in keys]
    return "\n".join(
        [f"{'':>28}  " + "  ".join(f"{week:>22}" for week in weeks), *rows, f"{'cpu_s':>28}  {found['cpu_s']}"]
    )


if __name__ == "__main__":
    main()
