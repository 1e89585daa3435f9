"""Learning measures one trainer's speed and rescale costs while it trains.

The controller passes the workers' reports to `Learned` and gets the scaling curve and the costs that the scheduler
decides with. Users need not supply either. The module is pure: no clock, no input or output. `as_json` and `from_json`
carry the measurements over a restart. `curve_fit` describes how a curve is made from a few measured sizes.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from bftrainer.cluster.config.keys import UNMEASURED_S
from bftrainer.cluster.jobs.curve_fit import fitted, guessed, rescaled_prior, sizes_between
from bftrainer.core.curve import Curve
from bftrainer.elastic.protocol import PAUSE_PARTS
from bftrainer.learning.costs import RescaleCost
from bftrainer.processes.start_up import PARTS

REPORTS = 31
"""The rate at a size is the median of this many reports. Each report is the median of up to a minute of training."""
ENOUGH = 7
"""Reports of a size that are needed before others are tried: they must be compared with a known rate."""
AT_HAND, IN_PASSING = 0.01, 0.1
"""The relative difference above which the median replaces the rate in use. `AT_HAND` applies when there are `ENOUGH`
reports and when there are `REPORTS`; `IN_PASSING` at any other time. So noise moves no nodes, and a wrong first report
does not stay.
"""
RESCALES = 9
"""A cost is the median of this many pauses."""

Kind = Literal["up", "down"]
_NO_PARTS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Prior:
    """The user's own estimates of a trainer, given before it runs. None: not given."""

    curve: Curve | None = None
    up_s: float | None = None
    down_s: float | None = None


class Learned:
    """The measurements of one trainer. `rates`, `rescaled` and `started` add to them."""

    __slots__ = ("_default_s", "_in_use", "_pauses", "_reports", "_start_parts", "_starts", "prior", "rescales")

    def __init__(
        self,
        prior: Prior | None = None,
        default_up_s: float = UNMEASURED_S,
        default_down_s: float = UNMEASURED_S,
    ) -> None:
        self.prior = prior or Prior()
        self._default_s: Mapping[Kind, float] = {"up": default_up_s, "down": default_down_s}
        self.rescales = 0
        """How many rescales were recorded."""
        self._reports: dict[int, deque[float]] = {}
        self._in_use: dict[int, float] = {}
        self._pauses: dict[Kind, deque[RescaleCost]] = {"up": deque(maxlen=RESCALES), "down": deque(maxlen=RESCALES)}
        self._starts: deque[float] = deque(maxlen=RESCALES)
        self._start_parts: deque[Mapping[str, float]] = deque(maxlen=RESCALES)

    # Input.

    def rates(self, rates: Mapping[int, float]) -> bool:
        """Add a worker's report: samples per second by world size. Returns whether a new decision may be worthwhile.

        That is the case when a size was measured for the first time, when a size has enough reports to try others, and
        when its rate has changed. A worker repeats old measurements in its reports; only new values count.
        """
        moved = False
        for size, rate in rates.items():
            if size < 1 or not math.isfinite(rate) or rate <= 0:
                continue
            reports = self._reports.setdefault(size, deque(maxlen=REPORTS))
            if rate not in reports:
                moved |= self._take(size, rate, reports)
        return moved

    def _take(self, size: int, rate: float, reports: deque[float]) -> bool:
        leeway = AT_HAND if len(reports) + 1 in (ENOUGH, REPORTS) else IN_PASSING
        reports.append(rate)
        median, before = statistics.median(reports), self._in_use.get(size)
        if before is not None and abs(median / before - 1) <= leeway:
            return len(reports) == ENOUGH
        self._in_use[size] = median
        return True

    def rescaled(
        self, kind: Kind, pause_s: float, form_s: float, sync_s: float, parts: Mapping[str, float] = _NO_PARTS
    ) -> None:
        """Add a rescale: the time that earlier members lost, from their last step to the next generation."""
        self.rescales += 1
        if all(math.isfinite(value) and value >= 0 for value in (pause_s, form_s, sync_s)):
            known = {name: seconds for name, seconds in parts.items() if name in PAUSE_PARTS}
            self._pauses[kind].append(RescaleCost(pause_s, form_s, sync_s, known))

    def started(self, seconds: float) -> None:
        """Add the seconds from a node's assignment to the trainer to its first computation."""
        if math.isfinite(seconds) and seconds >= 0:
            self._starts.append(seconds)

    def first_step(self, parts: Mapping[str, float]) -> None:
        """Add how long the parts of a worker's start took, up to its first step."""
        known = {name: seconds for name, seconds in parts.items() if name in PARTS and seconds >= 0}
        if known:
            self._start_parts.append(known)

    # Results.

    @property
    def start_s(self) -> float:
        """The median seconds from a node's assignment to its first step; 0 before the first measurement."""
        return statistics.median(self._starts) if self._starts else 0.0

    def start_parts(self) -> dict[str, float]:
        """Return the median seconds of each part of the last starts, in order; empty before the first one."""
        starts = self._start_parts
        return {name: statistics.median(parts.get(name, 0.0) for parts in starts) for name in PARTS if starts}

    @property
    def measured(self) -> Mapping[int, float]:
        """The rates in use, by size, in ascending order of size."""
        return MappingProxyType(dict(sorted(self._in_use.items())))

    def curve(self, least: int, most: int, default_rate_per_node: float) -> Curve:
        """Return samples per second on `least` to `most` nodes.

        Measured sizes have their measured rates. The others follow the prior, scaled to the measured rates, or Amdahl's
        law without a prior. With neither, they are guessed cautiously from `default_rate_per_node`.
        """
        measured, prior = self.measured, self.prior.curve
        sizes = sizes_between(least, most, measured)
        rates = rescaled_prior(prior, measured, sizes) if prior is not None else None
        if rates is None:
            rates = (
                fitted(measured, sizes, curious=self._knows_best())
                if measured
                else guessed(sizes, default_rate_per_node)
            )
        return Curve.through(sizes, rates)

    def _knows_best(self) -> bool:
        best = max(self._in_use, key=lambda size: self._in_use[size])
        return len(self._reports.get(best, ())) >= ENOUGH

    @property
    def up_s(self) -> float:
        """Seconds that the members lose when the trainer grows."""
        return self._cost("up", self.prior.up_s)

    @property
    def down_s(self) -> float:
        """Seconds that the members lose when the trainer shrinks."""
        return self._cost("down", self.prior.down_s)

    def _cost(self, kind: Kind, prior: float | None) -> float:
        pauses = self._pauses[kind]
        if pauses:
            return statistics.median(pause.pause_s for pause in pauses)
        return self._default_s[kind] if prior is None else prior

    def pauses(self) -> Mapping[str, float | None]:
        """Return the medians over the last rescales of both kinds, in seconds, and the count of all rescales."""
        costs = [pause for kind in self._pauses.values() for pause in kind]
        median = statistics.median if costs else lambda values: None
        pause_s = median([pause.pause_s for pause in costs])
        return {
            "count": self.rescales,
            "median_s": pause_s,
            "pause_s": pause_s,
            "form_s": median([pause.form_s for pause in costs]),
            "sync_s": median([pause.sync_s for pause in costs]),
        }

    def pause_parts(self) -> dict[str, float]:
        """Return the median seconds of each part of the last rescales, in order; empty if the workers say none."""
        known = [pause.parts for kind in self._pauses.values() for pause in kind if pause.parts]
        return {name: statistics.median(parts.get(name, 0.0) for parts in known) for name in PAUSE_PARTS if known}

    # Storage.

    def as_json(self) -> dict[str, Any]:
        """Return all measurements and the default costs, for `from_json`, without the prior."""
        return {
            "reports": {str(size): list(reports) for size, reports in self._reports.items()},
            "in_use": {str(size): rate for size, rate in self._in_use.items()},
            "pauses": {
                kind: [[p.pause_s, p.form_s, p.sync_s, dict(p.parts)] for p in found]
                for kind, found in self._pauses.items()
            },
            "starts": list(self._starts),
            "start_parts": [dict(parts) for parts in self._start_parts],
            "rescales": self.rescales,
            "default_s": dict(self._default_s),
        }

    @classmethod
    def from_json(
        cls,
        found: Mapping[str, Any],
        prior: Prior | None = None,
        default_up_s: float | None = None,
        default_down_s: float | None = None,
    ) -> Learned:
        """Rebuild the measurements from the result of `as_json`. Missing keys count as not measured.

        Default costs that are not given are those of the original.
        """
        costs = found.get("default_s", {})
        up_s = costs.get("up", UNMEASURED_S) if default_up_s is None else default_up_s
        down_s = costs.get("down", UNMEASURED_S) if default_down_s is None else default_down_s
        learned = cls(prior, up_s, down_s)
        for size, reports in found.get("reports", {}).items():
            learned._reports[int(size)] = deque(reports, maxlen=REPORTS)
        learned._in_use.update({int(size): float(rate) for size, rate in found.get("in_use", {}).items()})
        for kind, pauses in found.get("pauses", {}).items():
            learned._pauses[kind].extend(RescaleCost(*times) for times in pauses)
        learned._starts.extend(found.get("starts", ()))
        learned._start_parts.extend(found.get("start_parts", ()))
        learned.rescales = int(found.get("rescales", 0))
        return learned
