"""Predictions: when trainers will be done, as samples from replays of the trainers in futures of the pool.

A `Situation` comes in: the trainers with what they have still to do, their nodes and the policy. `predict` replays it
in futures that `futures.py` draws, through the same scheduler as the live system, and returns the finishing times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from bftrainer.core.pool import Node
from bftrainer.core.trace import Floats
from bftrainer.core.trainer import Trainer
from bftrainer.forecast.futures import BLOCK_S, draw_future
from bftrainer.forecast.past import DAY_S, Draw, PoolPast
from bftrainer.scheduler import PoolStatistics, Scheduler, State
from bftrainer.simulate.accounting import SimulatedTrainer, copied
from bftrainer.simulate.replay import Present, ReplaySettings, replay

SHORTEST_S, LONGEST_S = 600.0, 60 * DAY_S
"""How far futures reach."""
ROOM = 6.0
"""A future is so many times as long as the trainers' work takes at the present speed of the pool."""
STEPS, COARSEST_S = 60, 300.0
"""The time that the work takes at the present speed has so many steps, and a step is at most so long: nodes join and
leave at its ends, which makes replays short."""
LATER = "later-"
"""The names of trainers that may be submitted later begin with it."""
ARRIVALS_FROM_S, FEWEST_ARRIVALS = DAY_S, 5
"""Later submissions are expected once submissions are known for a day, and so many."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that a prediction depends on, but for the past of the pool."""

    now: float
    pool: Mapping[Node, float]
    """The nodes that are there, and when each one joined."""
    present: Present
    """The trainers that are considered, with what they have done and their nodes."""
    waiting: tuple[Trainer, ...] = ()
    """The trainers that wait for the first time to be considered."""
    settings: ReplaySettings = field(default_factory=ReplaySettings)
    rate_sigma: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """By trainer: standard deviation of the logarithm of its true rate over the believed one."""
    arrivals: tuple[Trainer, ...] = ()
    """Trainers that were submitted before, with their work; empty: nothing else will be submitted."""
    arrivals_since: float = math.inf
    """When the earliest of them could have been submitted."""

    @classmethod
    def of(
        cls,
        now: float,
        pool: Mapping[Node, float],
        trainers: Sequence[Trainer],
        assigned: Mapping[str, tuple[Node, ...]],
        considered: Collection[str],
        settings: ReplaySettings,
        seen: PoolStatistics | None = None,
    ) -> Situation:
        """A situation of trainers whose `work` is what is left of it. Those on nodes all compute."""
        scheduler = Scheduler(settings.policy)
        jobs: dict[str, SimulatedTrainer] = {}
        for trainer in trainers:
            if trainer.name not in considered:
                continue
            nodes = assigned.get(trainer.name, ())
            worth = scheduler.value_of(trainer)
            jobs[trainer.name] = SimulatedTrainer(
                *(trainer, worth, now, 0.0, len(nodes), trainer.curve.rate(len(nodes)), worth.rate(len(nodes))),
                held=frozenset(nodes) if trainer.start_s else frozenset(),
            )
        waiting = tuple(trainer for trainer in trainers if trainer.name not in jobs)
        state = State(assigned=MappingProxyType(dict(assigned)), seen=seen or PoolStatistics())
        return cls(now, pool, Present(state, jobs), waiting, settings)

    @property
    def trainers(self) -> tuple[Trainer, ...]:
        """All trainers."""
        return (*(job.trainer for job in self.present.jobs.values()), *self.waiting)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Samples of finishing times, by trainer: one per future, infinite where a trainer was not done in it."""

    now: float
    seconds: float
    """How far the futures reach."""
    times: Mapping[str, Floats]

    def of(self, names: Iterable[str]) -> Floats:
        """When all of these trainers are done."""
        columns = [self.times[name] for name in names]
        return np.max(columns, axis=0) if columns else np.zeros(0)


def predict(
    situation: Situation,
    past: PoolPast,
    futures: int,
    seed: int,
    wanted: Collection[str] | None = None,
    enough: Callable[[], bool] = lambda: False,
) -> Prediction:
    """Predict when trainers are done: those `wanted`, or all whose work is known.

    `enough` is asked after each future whether to stop; there is at least one.
    """
    finite = [trainer.name for trainer in situation.trainers if math.isfinite(trainer.work)]
    names = finite if wanted is None else [name for name in finite if name in wanted]
    seconds = horizon_s(situation, past)
    rows: list[list[float]] = []
    rng = np.random.Generator(np.random.PCG64(seed))
    first = rng.random()
    for place in range(futures if names else 0):
        # Any number of futures begins like all the different moments that resemble the present.
        draw = Draw((first + evenly(place)) % 1.0, seconds / ROOM)
        ends = _one(situation, past, seconds, names, rng, draw)
        rows.append([ends.get(name, math.inf) for name in names])
        if enough():
            break
    columns = np.array(rows).reshape(len(rows), len(names)).T
    return Prediction(situation.now, seconds, dict(zip(names, columns, strict=True)))


def evenly(place: int) -> float:
    """A sequence of numbers from 0 to 1 of which any first part is spread evenly: van der Corput's."""
    found, share = 0.0, 0.5
    while place:
        found += share * (place & 1)
        place, share = place >> 1, share / 2
    return found


def horizon_s(situation: Situation, past: PoolPast) -> float:
    """How far futures must reach: several times as long as the work takes on half of the usual number of nodes."""
    nodes = max(float(past.sizes.mean()), float(len(situation.pool)), 2.0) / 2
    jobs = situation.present.jobs
    node_s = longest_s = 0.0
    for trainer in situation.trainers:
        if math.isfinite(trainer.work):
            left = trainer.work - (jobs[trainer.name].done if trainer.name in jobs else 0.0)
            node_s += left * trainer.min_nodes / max(trainer.curve.rate(trainer.min_nodes), 1e-9)
            longest_s = max(longest_s, left / max(trainer.curve.rate(min(trainer.max_nodes, nodes)), 1e-9))
    return min(max(ROOM * max(node_s / nodes, longest_s), SHORTEST_S), LONGEST_S)


def _one(
    situation: Situation, past: PoolPast, seconds: float, names: Collection[str], rng: np.random.Generator, first: Draw
) -> dict[str, float]:
    """The finishing times in one future."""
    future = draw_future(past, situation.pool, seconds, rng, min(seconds / (ROOM * STEPS), COARSEST_S), first)
    sigma = situation.rate_sigma

    def varied(trainer: Trainer, done: float = 0.0) -> Trainer:
        """The trainer with more or less work: as if it were slower or faster than believed."""
        factor = math.exp(sigma.get(trainer.name, 0.0) * rng.standard_normal())
        return replace(trainer, work=done + max(trainer.work - done, 1e-9) * factor)

    room = len(future.nodes)
    jobs = {}
    for name, job in situation.present.jobs.items():
        if job.trainer.min_nodes <= room:  # a trainer that needs more nodes than there ever were is never done
            jobs[name] = copied(job)
            jobs[name].trainer = varied(job.trainer, job.done)
    arrivals = [varied(trainer) for trainer in situation.waiting]
    arrivals += later_arrivals(situation, seconds, rng)
    arrivals = [replace(trainer, submit=max(trainer.submit, situation.now)) for trainer in arrivals]
    fitting = [trainer for trainer in arrivals if trainer.min_nodes <= room]
    if not jobs and not fitting:
        return {}
    present = replace(situation.present, jobs=jobs)
    done = replay(future, fitting, situation.settings, present=present, until_done=names)
    return {trainer.name: trainer.end for trainer in done.trainers if trainer.end is not None}


def later_arrivals(situation: Situation, seconds: float, rng: np.random.Generator) -> list[Trainer]:
    """Draw trainers that are submitted later: blocks of earlier submissions, from the same time of day if possible."""
    now, arrivals = situation.now, situation.arrivals
    span = now - situation.arrivals_since
    if span < ARRIVALS_FROM_S or len(arrivals) < FEWEST_ARRIVALS:
        return []
    found: list[Trainer] = []
    at = 0.0
    while at < seconds:
        begin = now - span + rng.random() * (span - BLOCK_S)
        same_hour = begin + (now + at - begin + DAY_S / 2) % DAY_S - DAY_S / 2
        begin = same_hour if now - span <= same_hour <= now - BLOCK_S else begin
        for trainer in arrivals:
            after = trainer.submit - begin
            if 0 <= after < min(BLOCK_S, seconds - at):
                name = f"{LATER}{len(found)}-{trainer.name}"
                found.append(replace(trainer, name=name, submit=now + at + after))
        at += BLOCK_S
    return found
