"""Beliefs: how fast a trainer is and how much it has to do, as a prediction assumes it.

`believe` is the only place that decides it. It takes a trainer's own measurements first. For one that has not trained
yet it takes those of the newest run of the same script, or else the user's curve.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bftrainer.cluster.eta.question import AskedTrainer
from bftrainer.cluster.jobs.learning import ENOUGH, Learned, Prior
from bftrainer.core.curve import Curve
from bftrainer.core.trainer import Trainer

MEASURED, HARDLY_MEASURED, OTHER_RUN, GIVEN, UNKNOWN = 0.03, 0.10, 0.10, 0.20, 0.0
"""Standard deviation of the logarithm of the true rate over the believed one: measured often, measured at all, measured
in another run, given by the user. Of a trainer of unknown speed nothing is predicted."""

NO_TOTAL = "its number of samples is not known: the script has not reported it; --work gives it"
NO_RATE = "its speed is not known: neither it nor an earlier run of its script has trained, and it has no --curve"


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """What is known of a run of a script, finished or not."""

    script: tuple[str, str]
    args: tuple[str, ...]
    group: str
    total: int | None
    learned: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Belief:
    """A trainer as a prediction assumes it."""

    trainer: Trainer
    """Its work is what is left; infinite: not known."""
    sigma: float
    why: str = ""
    """Why nothing can be predicted; empty if something can."""


def believe(asked: AskedTrainer, runs: Sequence[ScriptRun], now: float) -> Belief:
    """What to assume of a trainer. `runs` are the known runs of all scripts, the newest first."""
    same = [run for run in runs if run.script == asked.script]
    prior = None if asked.curve is None else Curve.through(asked.curve["nodes"], asked.curve["rates"])
    own = _learned(asked.learned or {}, asked, prior)
    other = next((run for run in same if run.learned.get("in_use")), None)
    learned, sigma = own, UNKNOWN
    if own.measured:
        sigma = MEASURED if _reports(asked.learned or {}) >= ENOUGH else HARDLY_MEASURED
    elif other is not None:
        learned, sigma = _learned(other.learned, asked, None), OTHER_RUN
    elif prior is not None:
        sigma = GIVEN
    total = asked.total if asked.total is not None else _usual_total(asked, same)
    why = NO_RATE if sigma == UNKNOWN else NO_TOTAL if total is None else ""
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


def _learned(found: Mapping[str, Any], asked: AskedTrainer, prior: Curve | None) -> Learned:
    prior_s = Prior(prior, asked.up_s, asked.down_s)
    return Learned.from_json(found, prior_s, asked.default_up_s, asked.default_down_s)


def _reports(found: Mapping[str, Any]) -> int:
    return max((len(reports) for reports in found.get("reports", {}).values()), default=0)


def _usual_total(asked: AskedTrainer, same: Sequence[ScriptRun]) -> int | None:
    """The samples of runs like this one: of its group, else with the same arguments, else of the script."""
    runs = [run for run in same if run.total]
    alike = [run for run in runs if run.group and run.group == asked.group]
    alike = alike or [run for run in runs if run.args == asked.args] or runs
    return round(statistics.median(run.total or 0 for run in alike)) if alike else None
