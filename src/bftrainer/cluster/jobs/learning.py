"""Learning measures one trainer's speed and rescale costs while it trains.

The controller passes the workers' reports to `Learned`, which passes them on to the belief of the trainer's script
(`learning.trials`). From there come the scaling curve and the costs that the scheduler decides with. What the trainer
measured itself is kept beside it, for the figures of this trainer: `as_json` and `from_json` carry it over a restart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from bftrainer.cluster.config.keys import UNMEASURED_S
from bftrainer.cluster.wire.worker_messages import MOST
from bftrainer.core.curve import Curve
from bftrainer.core.trainer import Trainer
from bftrainer.learning.costs import NO_PARTS, Kind, MeasuredCosts
from bftrainer.learning.rates import NOISE, Estimate, Stay
from bftrainer.learning.trials import AssumedCosts, ScriptBelief, TrialLearning

MOST_WINDOWS = 61
"""The most windows of a stay that count."""
NEWS = 0.002
"""Relative change of a rate, by what other trials of the script measured, that the scheduler is told."""
MOST_NODES = 1 << 20
USUAL_WINDOWS = 7
"""How many windows a rate counts for whose worker, or earlier version, does not say it."""


@dataclass(frozen=True, slots=True)
class Prior:
    """The user's own estimates of a trainer, given before it runs. None: not given."""

    curve: Curve | None = None
    up_s: float | None = None
    down_s: float | None = None


class Learned:
    """The measurements of one trainer, and what its script's belief says of it."""

    __slots__ = ("_compared", "_default_s", "_in_use", "costs", "prior", "trial")

    def __init__(
        self,
        prior: Prior | None = None,
        default_up_s: float = UNMEASURED_S,
        default_down_s: float = UNMEASURED_S,
        *,
        name: str = "",
        script: ScriptBelief | None = None,
    ) -> None:
        self.prior = prior or Prior()
        self._default_s: Mapping[Kind, float] = {"up": default_up_s, "down": default_down_s}
        up_s = default_up_s if self.prior.up_s is None else self.prior.up_s
        down_s = default_down_s if self.prior.down_s is None else self.prior.down_s
        script = ScriptBelief() if script is None else script
        script.rates.take_prior(self.prior.curve)
        self.trial = TrialLearning(name, script, AssumedCosts(up_s, down_s))
        self.costs = MeasuredCosts()
        """The pauses and starts of this trainer alone."""
        self._in_use: dict[int, float] = {}
        self._compared: tuple[int, int] | None = None
        """The state of the script's belief when the scheduler's description was compared with it."""

    # Input.

    def reported(self, generation: int, rates: Mapping[int, float], stay: Stay | None) -> bool:
        """Add a worker's report. Returns whether a new decision may be worthwhile.

        `rates` are samples per second by size, of all that the worker has measured; `stay` is what it measured in this
        generation.
        """
        for size, rate in rates.items():
            if size >= 1 and math.isfinite(rate) and rate > 0:
                self._in_use[size] = rate
        return stay is not None and self.trial.reported(generation, stay)

    def rescaled(
        self, kind: Kind, pause_s: float, form_s: float, sync_s: float, parts: Mapping[str, float] = NO_PARTS
    ) -> None:
        """Add a rescale: the time that earlier members lost, from their last step to the next generation."""
        for costs in (self.costs, self.trial.script.costs):
            costs.rescaled(kind, pause_s, form_s, sync_s, parts)

    def started(self, seconds: float) -> None:
        """Add the seconds from a node's assignment to the trainer to its first computation."""
        for costs in (self.costs, self.trial.script.costs):
            costs.started(seconds)

    def first_step(self, parts: Mapping[str, float]) -> None:
        """Add how long the parts of a worker's start took, up to its first step."""
        self.costs.first_step(parts)

    # Results.

    @property
    def script(self) -> ScriptBelief:
        """What is known of the trainer's script."""
        return self.trial.script

    @property
    def start_s(self) -> float:
        """The median seconds from a node's assignment to its first step; 0 before the first measurement."""
        return self.trial.start_s

    def start_parts(self) -> dict[str, float]:
        """Return the median seconds of each part of the last starts, in order; empty before the first one."""
        return self.costs.start_parts()

    @property
    def measured(self) -> Mapping[int, float]:
        """The rates that this trainer measured, by size, in ascending order of size."""
        return MappingProxyType(dict(sorted(self._in_use.items())))

    def curve(self, least: int, most: int, default_rate_per_node: float) -> Curve:
        """Return what is believed of samples per second on `least` to `most` nodes.

        If nothing is known of the script, it is guessed cautiously from `default_rate_per_node`.
        """
        return self.trial.curve(least, most, default_rate_per_node)

    def estimate(self, least: int, most: int) -> Estimate | None:
        """Return the mean and the spread of what is believed; None if nothing is known."""
        return self.trial.estimate(least, most) if self.script.rates.is_known else None

    def has_news(self, told: Trainer, hand_over_s: float = 0.0) -> bool:
        """Whether the scheduler's description of the trainer is outdated by what trials of its script have learned.

        `hand_over_s` is the part of its start time that comes from handing nodes over.
        """
        if self._compared == self.script.state:
            return False
        self._compared = self.script.state
        if (self.up_s, self.down_s, min(self.start_s + hand_over_s, MOST)) != (told.up_s, told.down_s, told.start_s):
            return True
        curve = self.curve(told.min_nodes, told.max_nodes, 1.0)
        if not self.script.rates.is_known or curve.nodes != told.curve.nodes:
            return self.script.rates.is_known
        pairs = zip(curve.rates[1:], told.curve.rates[1:], strict=True)
        return any(abs(rate - before) > NEWS * before for rate, before in pairs)

    @property
    def up_s(self) -> float:
        """Seconds that the members lose when the trainer grows."""
        return self.trial.up_s

    @property
    def down_s(self) -> float:
        """Seconds that the members lose when the trainer shrinks."""
        return self.trial.down_s

    def pauses(self) -> Mapping[str, float | None]:
        """Return the medians over the last rescales of both kinds, in seconds, and the count of all rescales."""
        return self.costs.pauses()

    def pause_parts(self) -> dict[str, float]:
        """Return the median seconds of each part of the last rescales, in order; empty if the workers say none."""
        return self.costs.pause_parts()

    # Storage.

    def as_json(self) -> dict[str, Any]:
        """Return the trainer's own measurements and the default costs, for `from_json`, without prior and belief."""
        return {
            "in_use": {str(size): rate for size, rate in self._in_use.items()},
            **self.costs.as_json(),
            "default_s": dict(self._default_s),
        }

    @classmethod
    def from_json(
        cls,
        found: Mapping[str, Any],
        prior: Prior | None = None,
        default_up_s: float | None = None,
        default_down_s: float | None = None,
        *,
        name: str = "",
        script: ScriptBelief | None = None,
    ) -> Learned:
        """Rebuild the measurements from the result of `as_json`. Missing keys count as not measured.

        Default costs that are not given are those of the original. Without a `script`, all that is known of it is what
        this trainer measured.
        """
        costs = found.get("default_s", {})
        up_s = costs.get("up", UNMEASURED_S) if default_up_s is None else default_up_s
        down_s = costs.get("down", UNMEASURED_S) if default_down_s is None else default_down_s
        if script is None:
            script = ScriptBelief()
            add_measurements(script, name, found)
        learned = cls(prior, up_s, down_s, name=name, script=script)
        learned._in_use.update({int(size): float(rate) for size, rate in found.get("in_use", {}).items()})
        learned.costs = MeasuredCosts.from_json(found)
        return learned


def stay_of(nodes: int, windows: int, rate: float, scatter: float | None) -> Stay | None:
    """Return a worker's words about its stay as a value; None if nothing was measured yet.

    `scatter` is None if the worker does not say it.
    """
    windows = USUAL_WINDOWS if scatter is None and windows < 1 else min(windows, MOST_WINDOWS)
    if not 1 <= nodes <= MOST_NODES or windows < 1 or not (math.isfinite(rate) and rate > 0):
        return None
    usual = NOISE**2 * (windows - 1)
    return Stay(nodes, windows, math.log(rate / nodes), usual if scatter is None else scatter)


def add_measurements(script: ScriptBelief, trainer: str, found: Mapping[str, Any]) -> None:
    """Add to a belief what a trainer stored in its own row, as all versions do: each size becomes one stay."""
    reports = found.get("reports", {})
    for size, rate in found.get("in_use", {}).items():
        windows = len(reports.get(size, ())) or USUAL_WINDOWS
        stay = stay_of(int(size), windows, float(rate), None)
        if stay is not None:
            script.rates.observe(trainer, -int(size), stay)
    script.rates.ended(trainer)
    script.costs.take(MeasuredCosts.from_json(found))
