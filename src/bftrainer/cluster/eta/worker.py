"""The process that predicts finishing times: one question per line on its input, one answer per line on its output.

The service starts it as `python -m bftrainer.cluster.eta.worker`. It runs at the lowest priority, reads the
controller's database on its own read-only connection, and ends with its input.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bftrainer.allocate.quotas import Quota
from bftrainer.cluster.config.keys import Config
from bftrainer.cluster.config.policy import policy_of
from bftrainer.cluster.eta.beliefs import NO_RATE, Belief, believe
from bftrainer.cluster.eta.question import AskedTrainer, PredictorSettings, Question
from bftrainer.cluster.eta.records import PoolLog, read_beliefs, read_trainers
from bftrainer.cluster.store.database import Database
from bftrainer.core.trainer import Trainer
from bftrainer.errors import BFTrainerError
from bftrainer.forecast.estimate import FinishEstimate
from bftrainer.forecast.past import DAY_S, PoolPast, from_profile, steady
from bftrainer.forecast.predict import ARRIVALS_FROM_S, FEWEST_ARRIVALS, Situation, predict
from bftrainer.scheduler import Policy, PoolStatistics
from bftrainer.simulate.replay import ReplaySettings

FEWEST_DEPARTURES = 5
"""A short past with so many departures of nodes is no steady pool."""
NO_NODES = "no node has been in the pool yet"
LATE = "it is not done within the time that was looked at"


class Predictor:
    """Answers questions from one controller's database."""

    def __init__(self, path: Path, settings: PredictorSettings) -> None:
        self._path = path
        self._settings = settings
        self._log = PoolLog()
        self._policy: Policy = policy_of(Config(policy=settings.policy))

    def answer(self, question: Question) -> dict[str, Any]:
        """Return the estimate of each set that was asked for, or why there is none."""
        db = Database.open(self._path, read_only=True)
        try:
            earlier = read_trainers(db, question.now)
            recent = earlier.submitted if question.now - earlier.since >= ARRIVALS_FROM_S else ()
            scripts = read_beliefs(db, (one.belief for one in (*question.trainers, *recent)))
            own = self._log.trace(db, question.now)
        finally:
            db.close()
        beliefs = {one.id: believe(one, scripts[one.belief], earlier.runs, question.now) for one in question.trainers}
        past, basis = self._past(question, None if own is None else PoolPast(own))
        if past is None:
            return {"sets": {name: {"why": NO_NODES} for name in question.sets}, "basis": "", "futures": 0}
        expected = [believe(one, scripts[one.belief], earlier.runs, question.now) for one in recent]
        arrivals = tuple(belief.trainer for belief in expected if belief.why != NO_RATE)
        situation = self._situation(question, beliefs, arrivals, earlier.since)
        reasons = {one.id: beliefs[one.id].why or _too_few(one, question) for one in question.trainers}
        wanted = {id_ for ids in question.sets.values() if not any(reasons[one] for one in ids) for id_ in ids}
        began = time.process_time()
        found = predict(
            situation,
            past,
            question.futures,
            int(question.now) % 9973,
            wanted,
            lambda: time.process_time() - began > question.cpu_s,
        )
        count = max((len(times) for times in found.times.values()), default=0)
        deadlines = {one.id: one.deadline for one in question.trainers}
        sets = {}
        for name, ids in question.sets.items():
            why = next((reasons[one] for one in ids if reasons[one]), "")
            if why:
                sets[name] = {"why": why if len(ids) == 1 else f"of one of its trainers: {why}"}
                continue
            estimate = FinishEstimate.of(found.of(ids), question.now)
            limits = [limit for one in ids if (limit := deadlines[one]) is not None]
            sets[name] = _shown(estimate, question.now, max(limits) if limits else None)
        repeats = situation.arrivals and len(arrivals) >= FEWEST_ARRIVALS
        others = "with as many submissions as in the last days" if repeats else "if nothing else is submitted"
        return {"sets": sets, "basis": f"{basis}; {others}", "futures": count}

    def _past(self, question: Question, own: PoolPast | None) -> tuple[PoolPast | None, str]:
        """The past that futures are drawn from, and what it is in words."""
        profile = self._settings.profile
        moves = profile == "steady" and own is not None and own.departures >= FEWEST_DEPARTURES
        if own is not None and (own.is_long or moves):
            return own, f"as in the last {_span(own.trace.window.seconds)} of this pool"
        if profile == "steady":
            nodes = tuple(question.pool) or (own.trace.nodes if own is not None else ())
            words = "as long as the present nodes stay (the pool's own past is short)"
            return (PoolPast(steady(nodes, question.now)), words) if nodes else (None, "")
        size = max(len(question.pool), 1)
        words = f"as on a machine like {profile} (the pool's own past is short)"
        return PoolPast(from_profile(profile, size, question.now, seed=1)), words

    def _situation(
        self, question: Question, beliefs: dict[str, Belief], arrivals: tuple[Trainer, ...], since: float
    ) -> Situation:
        quotas = {owner: Quota(**quota) for owner, quota in question.quotas.items()}
        settings = ReplaySettings(
            policy=replace(self._policy, quotas=quotas), snapshot_every_s=self._settings.snapshot_every_s
        )
        situation = Situation.of(
            question.now,
            question.pool,
            [belief.trainer for belief in beliefs.values()],
            {name: tuple(nodes) for name, nodes in question.assigned.items()},
            question.considered,
            settings,
            None if question.seen is None else PoolStatistics(**question.seen),
        )
        sigma = {name: belief.sigma for name, belief in beliefs.items()}
        return replace(situation, rate_sigma=sigma, arrivals=arrivals, arrivals_since=since)


def _too_few(asked: AskedTrainer, question: Question) -> str:
    """Return that the limits of a trainer's owner keep the trainer from starting; empty if they do not."""
    most = question.quotas.get(asked.owner, {}).get("max_nodes")
    if most is None or most >= asked.min_nodes:
        return ""
    nodes = f"{most} node{'s' * (most != 1)}"
    return f"its owner may have {nodes} at present, and it needs at least {asked.min_nodes}"


def _shown(estimate: FinishEstimate | None, now: float, deadline: float | None) -> dict[str, Any]:
    """An estimate as JSON: times in seconds since 1970, None for those beyond the futures."""
    if estimate is None:
        return {"why": LATE}
    point, low, high = (
        now + seconds if math.isfinite(seconds) else None
        for seconds in (estimate.point_s, estimate.low_s, estimate.high_s)
    )
    likely = None if deadline is None else estimate.within(deadline - now)
    return {"point": point, "low": low, "high": high, "likely": likely, "why": "" if low is not None else LATE}


def _span(seconds: float) -> str:
    days, hours, minutes = seconds / DAY_S, seconds / 3600, seconds / 60
    if days >= 2:
        return f"{days:.0f} days"
    return f"{hours:.0f} hours" if hours >= 2 else f"{max(minutes, 1):.0f} minutes"


def main(words: Sequence[str] | None = None) -> None:
    """Answer questions until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("settings", type=PredictorSettings.from_text, help="as JSON")
    asked = parser.parse_args(words)
    os.nice(19)
    predictor = Predictor(asked.path, asked.settings)
    for line in sys.stdin:
        try:
            answer = predictor.answer(Question.from_line(line))
        except Exception as problem:  # the next question may be answered, and the controller logs this
            answer = {"problem": str(problem) if isinstance(problem, BFTrainerError) else repr(problem)}
        print(json.dumps({**answer, "cpu_s": time.process_time()}, allow_nan=False), flush=True)


if __name__ == "__main__":
    main()
