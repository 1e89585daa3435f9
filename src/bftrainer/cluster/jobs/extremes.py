"""Metric extremes: the least and the greatest value of each metric that a trainer reported, and where each was.

A report has only the newest values, and the history of a long training is thinned out (`metric_history.py`). So each
report passes through here, and the extremes are stored with the trainer. `bftrainer best` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bftrainer.elastic.metrics import MOST, Position


class Extreme(NamedTuple):
    """A value, and the position that it was reported for."""

    value: float
    at: Position


class MetricExtremes:
    """Least and greatest value by name. Of equal values the first one stays. Values that are not finite are ignored."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[str, tuple[Extreme, Extreme]] = {}

    def note(self, values: Mapping[str, float], at: Mapping[str, Sequence[int]], otherwise: Position) -> None:
        """Take a report. `at` has the positions of its values; `otherwise` is that of a value that has none."""
        for name, value in values.items():
            if not math.isfinite(value):
                continue
            known = self._found.get(name)
            if known is None:
                if len(self._found) < MOST:
                    first = Extreme(value, Position(*at[name]) if name in at else otherwise)
                    self._found[name] = (first, first)
            elif not known[0].value <= value <= known[1].value:
                new = Extreme(value, Position(*at[name]) if name in at else otherwise)
                self._found[name] = (new, known[1]) if value < known[0].value else (known[0], new)

    def as_json(self) -> dict[str, dict[str, list[float]]]:
        """Return the extremes as JSON values: `{"loss": {"min": [value, epoch, step, samples], "max": […]}}`."""
        return {
            name: {"min": [least.value, *least.at], "max": [most.value, *most.at]}
            for name, (least, most) in self._found.items()
        }

    def load(self, stored: Mapping[str, Mapping[str, Sequence[Any]]]) -> None:
        """Take over what `as_json` returned."""
        for name, found in stored.items():
            least, most = (Extreme(found[kind][0], Position(*found[kind][1:])) for kind in ("min", "max"))
            self._found[name] = (least, most)
