"""Knowledge: what the scheduler is told about trainers while a replay runs.

The replay itself always goes by the true curves and costs. `KnownTruth` tells them to the scheduler, as the paper
assumes. `LearnedTruth` hides them: trainers report noisy rates, pauses and starts, as in the live system, and the
scheduler gets what the package `learning` makes of them. Another `Knowledge` can be passed to `replay`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError
from bftrainer.learning.costs import Kind
from bftrainer.learning.rates import Stay
from bftrainer.learning.trials import AssumedCosts, ScriptBelief, TrialLearning
from bftrainer.scheduler import Scheduler, State
from bftrainer.simulate.accounting import SimulatedTrainer

UNMEASURED_S = 1.0
"""Cost of a rescale that is assumed until one was measured, as in the live system."""
LEARN_S = 1.0
"""The least time between decisions that follow only from what was learned, as in the live system."""
_WARM_UP_S = 2.0
"""Seconds from the first step on other nodes to the first report of a rate."""
_OFTEN, _SELDOM, _MOST_OFTEN = 9, 20, 80
"""A stay has a report each second up to the first number, each 5 s up to the second, then each minute. At a size that
had the third number of reports before, there is none each second any more."""
_LASTING = 0.5
"""The share of the variance of noise that stays the same over a stay."""
_FLOOR = 1e-5
"""Relative noise that there always is."""


class Knowledge(Protocol):
    """What the scheduler knows. The replay calls these in the order of its clock."""

    def next_moment(self, now: float, jobs: Mapping[str, SimulatedTrainer]) -> float:
        """Return when to call `observe` next, if nothing happens until then."""

    def observe(self, now: float, jobs: Mapping[str, SimulatedTrainer]) -> bool:
        """Look at the trainers that are considered. Returns whether a decision may be worthwhile."""

    def submitted(self, trainers: Sequence[Trainer]) -> Sequence[Trainer]:
        """Return the scheduler's descriptions of trainers that are submitted now."""

    def refreshed(self, state: State, scheduler: Scheduler) -> State:
        """Return a state with present descriptions, for a decision of `scheduler`."""

    def finished(self, name: str) -> None:
        """Record that a trainer is done."""


class KnownTruth:
    """The scheduler knows all curves and costs."""

    def next_moment(self, now: float, jobs: Mapping[str, SimulatedTrainer]) -> float:
        """Return never."""
        return math.inf

    def observe(self, now: float, jobs: Mapping[str, SimulatedTrainer]) -> bool:
        """Learn nothing."""
        return False

    def submitted(self, trainers: Sequence[Trainer]) -> Sequence[Trainer]:
        """Return the trainers themselves."""
        return trainers

    def refreshed(self, state: State, scheduler: Scheduler) -> State:
        """Return the state itself."""
        return state

    def finished(self, name: str) -> None:
        """Forget nothing."""


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of reported rates: relative standard deviation of one report, and the seed of all random numbers."""

    sigma: float = 0.03
    seed: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise InputError(f"noise of rates must be a number, 0 or more, but got {self.sigma}")


class ReportListener(Protocol):
    """Hears what trainers measure."""

    def rescaled(self, trainer: str, kind: Kind, pause_s: float) -> None:
        """Take the pause of a rescale."""

    def started(self, trainer: str, seconds: float) -> None:
        """Take the start of nodes."""

    def reported(self, trainer: str, stay: int, nodes: int, rate: float) -> bool:
        """Take a report: the stay's number, its nodes, samples per second. Returns whether to decide."""


@dataclass(slots=True)
class _Visit:
    """A trainer's present stay: on how many nodes it computes, until when it stalls, and when it reports next."""

    computing: int
    stalled_until: float
    number: int
    next_report: float = math.inf
    lasting: float = 0.0
    """The part of the noise that stays the same, in standard deviations."""
    reports: int = 0


class NoisyReports:
    """Follows the trainers of a replay, and reports what their workers would report in the live system."""

    def __init__(self, noise: Noise, listener: ReportListener) -> None:
        self._noise, self._listener = noise, listener
        self._random = random.Random(noise.seed)  # noqa: S311 - it must be repeatable
        self._visits: dict[str, _Visit] = {}
        self._reports: dict[tuple[str, int], int] = {}
        """How many reports each trainer made at each size."""

    def next_moment(self, jobs: Mapping[str, SimulatedTrainer]) -> float:
        """Return when the next report is due or the next node is ready."""
        reports = (visit.next_report for visit in self._visits.values())
        ready = (min(job.starting.values()) for job in jobs.values() if job.starting)
        return min(min(reports, default=math.inf), min(ready, default=math.inf))

    def observe(self, now: float, jobs: Mapping[str, SimulatedTrainer]) -> bool:
        """Report what happened up to now. Returns whether the listener wants a decision."""
        wanted = False
        for name, job in jobs.items():
            visit = self._visits.get(name)
            if visit is None or (visit.computing, visit.stalled_until) != (job.computing, job.stalled_until):
                self._visits[name] = self._moved(job, visit or _Visit(0, -math.inf, 0), now)
            elif visit.next_report <= now:
                wanted |= self._report(job, visit, now)
        return wanted

    def finished(self, trainer: str) -> None:
        """Forget a trainer."""
        self._visits.pop(trainer, None)

    def _moved(self, job: SimulatedTrainer, before: _Visit, now: float) -> _Visit:
        trainer = job.trainer
        if before.computing and job.computing:
            grows = job.computing > before.computing
            self._listener.rescaled(trainer.name, "up" if grows else "down", trainer.up_s if grows else trainer.down_s)
        if job.computing > before.computing:
            self._listener.started(trainer.name, trainer.start_s)
        visit = _Visit(job.computing, job.stalled_until, before.number + 1)
        if job.rate_on(job.computing) > 0:
            visit.lasting = self._random.gauss(0, 1)
            visit.next_report = math.ceil(max(now, job.stalled_until) + _WARM_UP_S)
        return visit

    def _report(self, job: SimulatedTrainer, visit: _Visit, now: float) -> bool:
        sigma, name, size = self._noise.sigma, job.trainer.name, visit.computing
        passing = self._random.gauss(0, 1)
        noise = sigma * (math.sqrt(_LASTING) * visit.lasting + math.sqrt(1 - _LASTING) * passing)
        noise += _FLOOR * self._random.gauss(0, 1)
        visit.reports += 1
        count = self._reports[name, size] = self._reports.get((name, size), 0) + 1
        often = visit.reports < _OFTEN and count < _MOST_OFTEN
        visit.next_report = now + (1.0 if often else 5.0 if visit.reports < _SELDOM else 60.0)
        return self._listener.reported(name, visit.number, size, job.rate_on(size) * math.exp(noise))


class LearnedTruth:
    """The scheduler knows what trainers reported: one belief per model."""

    def __init__(self, noise: Noise | None = None) -> None:
        self._reports = NoisyReports(noise or Noise(), self)
        self._truth: dict[str, Trainer] = {}
        self._beliefs: dict[str, ScriptBelief] = {}
        self._trials: dict[str, TrialLearning] = {}
        self._stays: dict[str, tuple[int, Stay]] = {}
        self._told: dict[str, Trainer] = {}
        self._wanted, self._learned_at = False, -math.inf

    # What the replay asks for.

    def next_moment(self, now: float, jobs: Mapping[str, SimulatedTrainer]) -> float:
        """Return when the next report is due, the next node is ready, or a decision may be made."""
        due = max(now, self._learned_at + LEARN_S) if self._wanted else math.inf
        return min(self._reports.next_moment(jobs), due)

    def observe(self, now: float, jobs: Mapping[str, SimulatedTrainer]) -> bool:
        """Learn. Returns whether a decision may be worthwhile now."""
        self._wanted |= self._reports.observe(now, jobs)
        if not self._wanted or now < self._learned_at + LEARN_S:
            return False
        self._learned_at = now
        return True

    def submitted(self, trainers: Sequence[Trainer]) -> Sequence[Trainer]:
        """Return what is known of trainers that are submitted now."""
        for trainer in trainers:
            script = self._beliefs.setdefault(trainer.model or trainer.name, ScriptBelief())
            self._truth[trainer.name] = trainer
            self._trials[trainer.name] = TrialLearning(trainer.name, script, AssumedCosts(UNMEASURED_S, UNMEASURED_S))
        return [self._describe(trainer.name, 1.0) for trainer in trainers]

    def refreshed(self, state: State, scheduler: Scheduler) -> State:
        """Return a state with present descriptions of those considered and of the next in the queue."""
        self._wanted = False
        usual_rate = self._usual_rate(state)
        admitted = tuple(self._describe(trainer.name, usual_rate) for trainer in state.admitted)
        following = max(scheduler.max_parallel(state) - len(state.admitted), 0)
        if scheduler.policy.max_parallel is None:  # more may be admitted while nodes are idle
            following += len(state.pool)
        soon = tuple(self._describe(trainer.name, usual_rate) for trainer in state.waiting[:following])
        return replace(state, admitted=admitted, waiting=(*soon, *state.waiting[following:]) if soon else state.waiting)

    def finished(self, name: str) -> None:
        """Forget a trainer, but not what was learned from it."""
        self._reports.finished(name)
        self._trials.pop(name).ended()
        for known in (self._truth, self._stays, self._told):
            known.pop(name, None)

    # What trainers report.

    def rescaled(self, trainer: str, kind: Kind, pause_s: float) -> None:
        """Take the pause of a rescale."""
        self._trials[trainer].rescaled(kind, pause_s)

    def started(self, trainer: str, seconds: float) -> None:
        """Take the start of nodes."""
        self._trials[trainer].started(seconds)

    def reported(self, trainer: str, stay: int, nodes: int, rate: float) -> bool:
        """Take a report."""
        number, known = self._stays.get(trainer, (0, None))
        now = known.then(rate) if known is not None and number == stay else Stay.first(nodes, rate)
        self._stays[trainer] = stay, now
        return self._trials[trainer].reported(stay, now)

    def _usual_rate(self, state: State) -> float:
        """Return the best measured rate per node, for scripts of which nothing is known."""
        if all(script.rates.is_known for script in self._beliefs.values()):
            return 1.0  # no one needs it
        scripts = {id(script): script for script in (self._trials[trainer.name].script for trainer in state.admitted)}
        return max((script.best_rate_per_node for script in scripts.values()), default=0.0) or 1.0

    def _describe(self, name: str, usual_rate: float) -> Trainer:
        truth, trial, before = self._truth[name], self._trials[name], self._told.get(name)
        curve = trial.curve(truth.min_nodes, truth.max_nodes, usual_rate)
        costs = (trial.up_s, trial.down_s, trial.start_s)
        if before is not None and before.curve is curve and (before.up_s, before.down_s, before.start_s) == costs:
            return before
        up_s, down_s, start_s = costs
        told = self._told[name] = replace(truth, curve=curve, up_s=up_s, down_s=down_s, start_s=start_s)
        return told
