"""Are predicted finishing times right? Trainers replayed on the Summit trace, predicted at submission and half time.

    python benchmarks/eta.py --data ../shared/data/summit [--json] [--nodes 1024] [--trainers 300] [--futures 16]

Two weeks of the trace, each with a workload of its own: sweeps of 8 to 16 trials of one model, submitted minutes apart.
The true run of a week is a replay of the trace. At the submission and at half the time of each trainer, what a
controller would know then is taken from it: the nodes and the queue of that moment, the past of the pool and of the
submissions up to then, and the speeds with an error of 3 %. From that `forecast.predict` makes the point and the 80 %
interval. The first week is for fitting one number, `forecast.estimate.SPREAD`: the factor printed as `fitted_spread`
gives 80 % there. The predictions of the second week are used for nothing else than these figures.

The exit status is 1 if in the second week less than 75 % or more than 85 % of the intervals hold the true time, or the
median error of the point at half time is above 10 % of the trainer's time from submission to end.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
from bftrainer.simulate.replay import Present, Replay, ReplaySettings, replay
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
    """Measure both weeks and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/summit"))
    parser.add_argument("--nodes", type=int, default=1024, help="the first nodes of the machine")
    parser.add_argument("--trainers", type=int, default=300, help="trainers in each week")
    parser.add_argument("--futures", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--week", type=int, choices=(1, 2), action="append", help="only this week")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    whole = load_trace(args.data / "fragments.parquet")
    trace = whole.select(whole.nodes[: args.nodes])
    began = time.process_time()
    found: dict[str, Any] = {f"week_{week}": measure(trace, week, args) for week in args.week or (1, 2)}
    found["cpu_s"] = round(time.process_time() - began, 1)
    print(json.dumps(found) if args.json else _table(found))
    judged = found.get("week_2")
    sys.exit(judged is not None and not (LEAST <= judged["holds"] <= MOST and judged["error_at_half_time"] <= ERROR))


def measure(trace: Trace, week: int, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one week."""
    # The first three days are the past that the first predictions need.
    start, middle = trace.window.start + 3 * DAY_S, trace.window.start + 8.5 * DAY_S
    begin, end = (start, middle) if week == 1 else (middle, trace.window.end)
    trainers = workload(begin, (end - begin) * 0.9, args.trainers, args.seed + week)
    cases = cases_of(trace, Window(begin, trace.window.end), trainers, args.futures, args.seed)
    half = [case for case in cases if case.when == "half time"]
    first = [case for case in cases if case.when == "submission"]
    return {
        "from": utc(begin),
        "to": utc(end),
        "trainers": len(half),
        "predictions": len(cases),
        "spread": SPREAD,
        "holds": _share(cases, SPREAD),
        "holds_at_submission": _share(first, SPREAD),
        "holds_at_half_time": _share(half, SPREAD),
        "fitted_spread": _fitted(cases),
        "holds_by_spread": {str(spread): _share(cases, spread) for spread in SPREADS},
        "error_at_half_time": round(statistics.median(case.error_s / case.whole_s for case in half), 4),
        "error_at_half_time_of_rest": round(statistics.median(case.error_s / case.left_s for case in half), 4),
        "error_at_submission": round(statistics.median(case.error_s / case.whole_s for case in first), 4),
        "median_hours": round(statistics.median(case.whole_s for case in half) / 3600, 2),
        "median_interval_of_rest": round(statistics.median(map(_width, half)), 3),
    }


def workload(begin: float, seconds: float, count: int, seed: int) -> list[Trainer]:
    """Sweeps of trials, submitted over a time."""
    rng = np.random.Generator(np.random.PCG64(seed))
    found: list[Trainer] = []
    models = list(PAPER_CURVES)
    while len(found) < count:
        model = models[rng.integers(len(models))]
        at = begin + rng.random() * seconds
        most = int(rng.choice(SIZES))
        work = HOURS * 3600 * PAPER_CURVES[model].rate(most) * rng.lognormal(0.0, 0.4)
        for trial in range(min(int(rng.integers(8, 17)), count - len(found))):
            name, size = f"s{len(found)}-{trial}", work * rng.lognormal(0.0, 0.2)
            found.append(Trainer(name, PAPER_CURVES[model], 1, most, 5.0, 3.0, size, at, start_s=15.0, model=model))
            at += 30 + rng.exponential(120.0)
    return found


def cases_of(trace: Trace, window: Window, trainers: Sequence[Trainer], futures: int, seed: int) -> list[Case]:
    """Predictions for all trainers that end in the trace, and what became of each."""
    actual = trace.clip(window)
    ends = {row.name: row.end for row in replay(actual, trainers, SETTINGS).trainers if row.end is not None}
    asked: dict[float, list[tuple[Trainer, When]]] = {}
    for trainer in trainers:
        if trainer.name in ends:
            half = (trainer.submit + ends[trainer.name]) / 2
            for moment, when in ((trainer.submit, "submission"), (half, "half time")):
                grid = math.ceil(moment / GRID_S) if when == "submission" else round(moment / GRID_S)
                if trainer.submit < grid * GRID_S < ends[trainer.name]:
                    asked.setdefault(grid * GRID_S, []).append((trainer, when))  # type: ignore[arg-type]
    rng = np.random.Generator(np.random.PCG64(seed))
    error = {trainer.name: math.exp(RATE_SIGMA * rng.standard_normal()) for trainer in trainers}
    found: list[Case] = []

    def at(moment: float, present: Present, step: float) -> None:
        past = PoolPast(trace.clip(Window(trace.window.start, moment)))
        situation = _situation(moment, step, present, past, trainers, error, ends)
        wanted = {trainer.name for trainer, _ in asked[moment]}
        predicted = predict(situation, past, futures, seed + int(moment) % 9973, wanted)
        for trainer, when in asked[moment]:
            end = ends[trainer.name]
            found.append(Case(when, end - moment, end - trainer.submit, predicted.times[trainer.name] - moment))

    _look_at(actual, trainers, sorted(asked), at)
    return found


def _look_at(
    trace: Trace, trainers: Sequence[Trainer], moments: Sequence[float], at: Callable[[float, Present, float], None]
) -> Replay:
    """Replay the true run once more, and show it at each moment as it was since the step before."""
    todo = list(moments)
    last: list[tuple[float, Present]] = []

    def look(now: float, copy: Callable[[], Present]) -> None:
        while todo and last and todo[0] < now:
            at(todo[0], last[0][1], last[0][0])
            todo.pop(0)
        if todo:
            last[:] = [(now, copy())]

    return replay(trace, trainers, SETTINGS, look=look)


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


def _fitted(cases: Sequence[Case]) -> float:
    """The spread with which 80 % of the intervals hold the true time."""
    spreads: list[float] = [0.5 + 0.05 * step for step in range(51)]
    best: float = min(spreads, key=lambda spread: abs(_share(cases, spread) - 0.8))
    return round(best, 2)


def _width(case: Case) -> float:
    estimate = FinishEstimate.of(case.times, 0.0)
    return math.inf if estimate is None else (estimate.high_s - estimate.low_s) / case.left_s


def _table(found: dict[str, Any]) -> str:
    weeks = [name for name in found if name.startswith("week")]
    keys = found[weeks[0]]
    rows = [f"{key:>28}  " + "  ".join(f"{found[week][key]!s:>22}" for week in weeks) for key in keys]
    return "\n".join(
        [f"{'':>28}  " + "  ".join(f"{week:>22}" for week in weeks), *rows, f"{'cpu_s':>28}  {found['cpu_s']}"]
    )


if __name__ == "__main__":
    main()
