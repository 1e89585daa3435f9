"""What is known of one trainer's speed and of what its rescales cost: measured while it trains, never asked for.

The controller tells a `Learned` what workers report and asks it for the scaling curve and the costs that the scheduler
decides with. Pure: no clock, no input or output; `as_json` and `from_json` carry it over a restart. How a curve is made
of a few measured sizes is told in `fitting`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from bftrainer.cluster.fitting import fitted, guessed, rescaled_prior, sizes_between
from bftrainer.core.curve import Curve

DEFAULT_UP_S, DEFAULT_DOWN_S = 2.0, 1.0
"""What a rescale is taken to cost before the first one is measured."""
REPORTS = 31
"""The rate at a size is the median of so many reports. Each of them is the median of up to a minute of training."""
ENOUGH = 7
"""Reports of a size before others are tried to find a better one: what they are compared with must be known."""
AT_HAND, IN_PASSING = 0.01, 0.1
"""How far that median may be from the rate in use before it takes its place: when there are enough reports and when all
are in, and at any other time. So noise moves no nodes, and a first report that was off does not stay."""
RESCALES = 9
"""A cost is the median of so many pauses."""

Kind = Literal["up", "down"]


@dataclass(frozen=True, slots=True)
class Prior:
    """What the user says of a trainer beforehand. None: nothing."""

    curve: Curve | None = None
    up_s: float | None = None
    down_s: float | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """What a rescale cost the members that trained before it. Forming and syncing are parts of the pause."""

    pause_s: float
    form_s: float
    sync_s: float


class Learned:
    """The book of one trainer. It grows by `rates` and `rescaled`."""

    __slots__ = ("_default_s", "_in_use", "_pauses", "_reports", "_starts", "prior", "rescales")

    def __init__(
        self,
        prior: Prior | None = None,
        default_up_s: float = DEFAULT_UP_S,
        default_down_s: float = DEFAULT_DOWN_S,
    ) -> None:
        self.prior = prior or Prior()
        self._default_s: Mapping[Kind, float] = {"up": default_up_s, "down": default_down_s}
        self.rescales = 0
        """How many were told of."""
        self._reports: dict[int, deque[float]] = {}
        self._in_use: dict[int, float] = {}
        self._pauses: dict[Kind, deque[Pause]] = {"up": deque(maxlen=RESCALES), "down": deque(maxlen=RESCALES)}
        self._starts: deque[float] = deque(maxlen=RESCALES)

    # What is told.

    def rates(self, rates: Mapping[int, float]) -> bool:
        """A worker's report: samples per second by world size. True when a new decision may be worth its while.

        That is when a size was measured for the first time, when enough is known of it to try others, and when its rate
        has moved. A worker says again and again what it measured long ago; only new values count.
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

    def rescaled(self, kind: Kind, pause_s: float, form_s: float, sync_s: float) -> None:
        """A rescale: what the members that trained before it lost, from their last step to the next generation."""
        self.rescales += 1
        if all(math.isfinite(value) and value >= 0 for value in (pause_s, form_s, sync_s)):
            self._pauses[kind].append(Pause(pause_s, form_s, sync_s))

    def started(self, seconds: float) -> None:
        """A node began to compute so long after it was given to the trainer."""
        if math.isfinite(seconds) and seconds >= 0:
            self._starts.append(seconds)

    # What is known.

    @property
    def start_s(self) -> float:
        """From a node's being given to its first step, on median; 0 before the first."""
        return statistics.median(self._starts) if self._starts else 0.0

    def growth_s(self, nodes: int) -> float:
        """Seconds lost when it grows from so many nodes, with all that a growth costs.

        The members pause; and the node that comes computes nothing until its worker is up, while it could have gone on
        elsewhere. To a trainer of n nodes the time of one node is worth an n-th of it.
        """
        return self.up_s + self.start_s / max(nodes, 1)

    @property
    def measured(self) -> Mapping[int, float]:
        """The rates in use, by size, in order."""
        return MappingProxyType(dict(sorted(self._in_use.items())))

    def curve(self, least: int, most: int, default_rate_per_node: float) -> Curve:
        """Samples per second on `least` to `most` nodes.

        Measured sizes are as measured. The others follow the prior, brought to the height of what was measured, or
        without a prior Amdahl's law; with nothing known at all, a cautious guess from `default_rate_per_node`.
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
        """Seconds lost when it grows."""
        return self._cost("up", self.prior.up_s)

    @property
    def down_s(self) -> float:
        """Seconds lost when it shrinks."""
        return self._cost("down", self.prior.down_s)

    def _cost(self, kind: Kind, prior: float | None) -> float:
        pauses = self._pauses[kind]
        if pauses:
            return statistics.median(pause.pause_s for pause in pauses)
        return self._default_s[kind] if prior is None else prior

    def pauses(self) -> Mapping[str, float | None]:
        """Medians over the last rescales of both kinds, in seconds, and the count of all."""
        found = [pause for kind in self._pauses.values() for pause in kind]
        median = statistics.median if found else lambda values: None
        pause_s = median([pause.pause_s for pause in found])
        return {
            "count": self.rescales,
            "median_s": pause_s,
            "pause_s": pause_s,
            "form_s": median([pause.form_s for pause in found]),
            "sync_s": median([pause.sync_s for pause in found]),
        }

    # Over a restart.

    def as_json(self) -> dict[str, Any]:
        """All that was learned, for `from_json`; not the prior, which was not."""
        return {
            "reports": {str(size): list(reports) for size, reports in self._reports.items()},
            "in_use": {str(size): rate for size, rate in self._in_use.items()},
            "pauses": {kind: [[p.pause_s, p.form_s, p.sync_s] for p in found] for kind, found in self._pauses.items()},
            "starts": list(self._starts),
            "rescales": self.rescales,
        }

    @classmethod
    def from_json(
        cls,
        found: Mapping[str, Any],
        prior: Prior | None = None,
        default_up_s: float = DEFAULT_UP_S,
        default_down_s: float = DEFAULT_DOWN_S,
    ) -> Learned:
        """What `as_json` gave; what is missing is not known."""
        learned = cls(prior, default_up_s, default_down_s)
        for size, reports in found.get("reports", {}).items():
            learned._reports[int(size)] = deque(reports, maxlen=REPORTS)
        learned._in_use.update({int(size): float(rate) for size, rate in found.get("in_use", {}).items()})
        for kind, pauses in found.get("pauses", {}).items():
            learned._pauses[kind].extend(Pause(*times) for times in pauses)
        learned._starts.extend(found.get("starts", ()))
        learned.rescales = int(found.get("rescales", 0))
        return learned
