"""Trials: each trainer reports to the belief of its script, and gets its curve and costs from it.

`ScriptBelief` is what all trainers of a script share. A `TrialLearning` belongs to one trainer. The simulator
keeps one per trainer that is not finished (`simulate/knowledge.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bftrainer.core.curve import Curve
from bftrainer.learning.costs import SCRIPT_RESCALES, Kind, MeasuredCosts
from bftrainer.learning.points import curve_sizes, newcomer_rates
from bftrainer.learning.rates import Estimate, RateBelief, Stay

DECIDE_AT = 3
"""Windows of a stay after which a decision may be worthwhile: once a stay. Noise must not move nodes more often."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class ScriptBelief:
    """What is known of a script: its rates at every size, its pauses and the starts of its nodes."""

    rates: RateBelief = field(default_factory=RateBelief)
    costs: MeasuredCosts = field(default_factory=lambda: MeasuredCosts(SCRIPT_RESCALES))

    @property
    def state(self) -> tuple[int, int]:
        """Two numbers that change whenever what is known changes."""
        return self.rates.version, self.costs.version

    @property
    def best_rate_per_node(self) -> float:
        """The best measured rate per node; 0 before the first measurement."""
        return max((rate / size for size, (rate, _) in self.rates.measured().items()), default=0.0)

    def forget(self) -> None:
        """Know nothing any more. The numbers of `state` go on growing."""
        rates, costs = self.state
        self.rates, self.costs = RateBelief(), MeasuredCosts(SCRIPT_RESCALES)
        self.rates.version, self.costs.version = rates + 1, costs + 1

    def as_json(self) -> dict[str, Any]:
        """Return everything that is known, for `from_json`."""
        return {"rates": self.rates.as_json(), "costs": self.costs.as_json()}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> ScriptBelief:
        """Rebuild the belief from the result of `as_json`. Missing keys count as not known."""
        costs = MeasuredCosts.from_json(found.get("costs", {}), SCRIPT_RESCALES)
        return cls(RateBelief.from_json(found.get("rates", {})), costs)


@dataclass(frozen=True, slots=True)
class AssumedCosts:
    """The costs that are assumed until they were measured: a user's, or defaults."""

    up_s: float
    down_s: float


class TrialLearning:
    """One trainer: what it measured, and what its script's belief says of it."""

    __slots__ = ("_curve", "_has_reported", "_rates", "_stay", "_windows", "assumed", "name", "script")

    def __init__(self, name: str, script: ScriptBelief, assumed: AssumedCosts) -> None:
        self.name, self.script, self.assumed = name, script, assumed
        self._stay = self._windows = 0
        self._rates = script.rates
        self._has_reported = False
        self._curve: tuple[tuple[int, int, int], Curve] | None = None

    def reported(self, number: int, stay: Stay) -> bool:
        """Take what was measured so far in the stay of this number. Returns whether a decision may be worthwhile.

        That is the case at the trainer's first report, and once in each stay. Numbers of stays rise.
        """
        if number < self._stay:
            return False
        if self._rates is not self.script.rates:  # all of it was forgotten, this stay too
            self._rates, self._windows = self.script.rates, 0
        known = self._windows if number == self._stay else 0
        if stay.windows <= known:
            return False
        is_first, self._has_reported = not self._has_reported, True
        self._stay, self._windows = number, stay.windows
        self.script.rates.observe(self.name, number, stay)
        return is_first or known < DECIDE_AT <= stay.windows

    def rescaled(self, kind: Kind, pause_s: float, form_s: float = 0.0, sync_s: float = 0.0) -> None:
        """Take the time that a rescale cost the members that trained before it."""
        self.script.costs.rescaled(kind, pause_s, form_s, sync_s)

    def started(self, seconds: float) -> None:
        """Take the seconds from a node's assignment to its first step."""
        self.script.costs.started(seconds)

    def ended(self) -> None:
        """Record that the trainer measures nothing more."""
        self.script.rates.ended(self.name)

    def curve(self, least: int, most: int, usual_rate: float) -> Curve:
        """Return what is believed of samples per second on `least` to `most` nodes.

        `usual_rate` is the best rate per node of other trainers, for a script of which nothing is known.
        """
        rates = self.script.rates
        if not rates.is_known:
            sizes = curve_sizes(least, most)
            return Curve.through(sizes, newcomer_rates(sizes, usual_rate))
        key = (rates.version, least, most)
        if self._curve is None or self._curve[0] != key:
            sizes = curve_sizes(least, most)
            self._curve = key, Curve((0, *sizes), (0.0, *rates.rates(sizes, self.name)))
        return self._curve[1]

    def estimate(self, least: int, most: int) -> Estimate:
        """Return the mean and the spread of what is believed of `least` to `most` nodes."""
        return self.script.rates.estimate(curve_sizes(least, most), self.name)

    @property
    def up_s(self) -> float:
        """Seconds that the members lose when the trainer grows."""
        measured = self.script.costs.pause_s("up")
        return self.assumed.up_s if measured is None else measured

    @property
    def down_s(self) -> float:
        """Seconds that the members lose when the trainer shrinks."""
        measured = self.script.costs.pause_s("down")
        return self.assumed.down_s if measured is None else measured

    @property
    def start_s(self) -> float:
        """Seconds from a node's assignment to its first step; 0 before the first measurement."""
        return self.script.costs.start_s or 0.0
