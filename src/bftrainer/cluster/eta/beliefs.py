"""Beliefs: how fast a trainer is and how much it has to do, as a prediction assumes it.

`believe` is the only place that decides it. Speed and costs are those that the scheduler decides with: what the belief
of the trainer's script says of it, or else the user's curve.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bftrainer.cluster.eta.question import AskedTrainer
from bftrainer.core.curve import Curve
from bftrainer.core.trainer import Trainer
from bftrainer.learning.trials import AssumedCosts, ScriptBelief, TrialLearning

MEASURED, HARDLY_MEASURED, OTHER_RUN, GIVEN, UNKNOWN = 0.03, 0.10, 0.10, 0.20, 0.0
"""Standard deviation of the logarithm of the true rate over the believed one: measured often, measured at all, measured
in another run, given by the user. Of a trainer of unknown speed nothing is predicted."""
ENOUGH = 7
"""A trainer whose longest stay had so many windows is measured often."""

NO_TOTAL = "its number of samples is not known: the script has not reported it; --work gives it"
NO_RATE = "its speed is not known: neither it nor an earlier run of its script has trained, and it has no --curve"
STILL_MEASURED = "its speed is still being measured"


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """What is known of a run of a script, finished or not."""

    script: tuple[str, str]
    args: tuple[str, ...]
    group: str
    total: int | None


@dataclass(frozen=True, slots=True)
class Belief:
    """A trainer as a prediction assumes it."""

    trainer: Trainer
    """Its work is what is left; infinite: not known."""
    sigma: float
    why: str = ""
    """Why nothing can be predicted; empty if something can."""


def believe(asked: AskedTrainer, script: ScriptBelief, runs: Sequence[ScriptRun], now: float) -> Belief:
    """What to assume of a trainer. `runs` are the known runs of all scripts, the newest first.

    The trainer's curve, if it has one, becomes part of the belief of its script, as when it is submitted.
    """
    same = [run for run in runs if run.script == asked.script]
    if asked.curve is not None:
        script.rates.take_prior(Curve.through(asked.curve["nodes"], asked.curve["rates"]))
    assumed_up_s = asked.default_up_s if asked.up_s is None else asked.up_s
    assumed_down_s = asked.default_down_s if asked.down_s is None else asked.down_s
    learned = TrialLearning(asked.id, script, AssumedCosts(assumed_up_s, assumed_down_s))
    sigma = _sigma(asked.id, script)
    total = asked.total if asked.total is not None else _usual_total(asked, same)
    no_rate = STILL_MEASURED if asked.samples else NO_RATE
    why = no_rate if sigma == UNKNOWN else NO_TOTAL if total is None else ""
    trainer = Trainer(
        asked.id,
        learned.curve(asked.min_nodes, asked.max_nodes, 1.0),
        asked.min_nodes,
        asked.max_nodes,
        learned.up_s,
        learned.down_s,
        math.inf if why or total is None else max(float(total - asked.samples), 1.0),
        min(asked.submitted, now),
        asked.owner,
        asked.weight,
        start_s=learned.start_s,
    )
    return Belief(trainer, sigma, why)


def _sigma(trainer: str, script: ScriptBelief) -> float:
    """How sure the speed of a trainer is."""
    rates = script.rates
    windows = max((stay.windows for _, stay in rates.stays(trainer)), default=0)
    if windows:
        return MEASURED if windows >= ENOUGH else HARDLY_MEASURED
    if rates.is_measured:
        return OTHER_RUN
    return GIVEN if rates.is_known else UNKNOWN


def _usual_total(asked: AskedTrainer, same: Sequence[ScriptRun]) -> int | None:
    """The samples of runs like this one: of its group, else with the same arguments, else of the script."""
    runs = [run for run in same if run.total]
    alike = [run for run in runs if run.group and run.group == asked.group]
    alike = alike or [run for run in runs if run.args == asked.args] or runs
    return round(statistics.median(run.total or 0 for run in alike)) if alike else None
