"""Measured costs: the pauses of rescales and the starts of nodes, of one trainer or of all trainers of a script."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from bftrainer.elastic.protocol import PAUSE_PARTS
from bftrainer.processes.start_up import PARTS

RESCALES = 9
"""A cost of one trainer is the median of this many pauses."""
SCRIPT_RESCALES = 31
"""A cost of a script is the median of this many pauses of its trainers."""

Kind = Literal["up", "down"]
NO_PARTS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RescaleCost:
    """The time that a rescale cost the members that trained before it. `form_s` and `sync_s` are parts of `pause_s`."""

    pause_s: float
    form_s: float
    sync_s: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """What `pause_s` consists of, by the names in `PAUSE_PARTS`; empty: the worker did not say it."""


class MeasuredCosts:
    """The last pauses and starts."""

    __slots__ = ("_medians", "_pauses", "_start_parts", "_starts", "rescales", "version")

    def __init__(self, most: int = RESCALES) -> None:
        self.rescales = 0
        """How many rescales were recorded."""
        self.version = 0
        """Grows whenever a median may have changed."""
        self._pauses: dict[Kind, deque[RescaleCost]] = {"up": deque(maxlen=most), "down": deque(maxlen=most)}
        self._starts: deque[float] = deque(maxlen=most)
        self._medians: dict[str, float | None] = {}
        """What every decision asks for, until something is added."""
        self._start_parts: deque[Mapping[str, float]] = deque(maxlen=most)

    def rescaled(
        self,
        kind: Kind,
        pause_s: float,
        form_s: float = 0.0,
        sync_s: float = 0.0,
        parts: Mapping[str, float] = NO_PARTS,
    ) -> None:
        """Add a rescale: the time that earlier members lost, from their last step to the next generation."""
        self.rescales += 1
        if all(math.isfinite(value) and value >= 0 for value in (pause_s, form_s, sync_s)):
            known = {name: seconds for name, seconds in parts.items() if name in PAUSE_PARTS}
            self._pauses[kind].append(RescaleCost(pause_s, form_s, sync_s, known))
            self._changed()

    def started(self, seconds: float) -> None:
        """Add the seconds from a node's assignment to the trainer to its first computation."""
        if math.isfinite(seconds) and seconds >= 0:
            self._starts.append(seconds)
            self._changed()

    def first_step(self, parts: Mapping[str, float]) -> None:
        """Add how long the parts of a worker's start took, up to its first step."""
        known = {name: seconds for name, seconds in parts.items() if name in PARTS and seconds >= 0}
        if known:
            self._start_parts.append(known)

    def take(self, other: MeasuredCosts) -> None:
        """Add the measurements of another."""
        for kind, pauses in other._pauses.items():
            self._pauses[kind].extend(pauses)
        self._starts.extend(other._starts)
        self.rescales += other.rescales
        self._changed()

    def pause_s(self, kind: Kind) -> float | None:
        """Return the median pause of rescales of one kind; None before the first."""
        return self._median(kind, [pause.pause_s for pause in self._pauses[kind]] if kind not in self._medians else [])

    @property
    def start_s(self) -> float | None:
        """The median seconds from a node's assignment to its first step; None before the first."""
        return self._median("start", self._starts)

    def _changed(self) -> None:
        self.version += 1
        self._medians.clear()

    def _median(self, name: str, values: Collection[float]) -> float | None:
        if name not in self._medians:
            self._medians[name] = statistics.median(values) if values else None
        return self._medians[name]

    def start_parts(self) -> dict[str, float]:
        """Return the median seconds of each part of the last starts, in order; empty before the first one."""
        starts = self._start_parts
        return {name: statistics.median(parts.get(name, 0.0) for parts in starts) for name in PARTS if starts}

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

    def as_json(self) -> dict[str, Any]:
        """Return all measurements, for `from_json`."""
        return {
            "pauses": {
                kind: [[p.pause_s, p.form_s, p.sync_s, dict(p.parts)] for p in found]
                for kind, found in self._pauses.items()
            },
            "starts": list(self._starts),
            "start_parts": [dict(parts) for parts in self._start_parts],
            "rescales": self.rescales,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any], most: int = RESCALES) -> MeasuredCosts:
        """Rebuild the measurements from the result of `as_json`. Missing keys count as not measured."""
        costs = cls(most)
        for kind, pauses in found.get("pauses", {}).items():
            costs._pauses[kind].extend(RescaleCost(*times) for times in pauses)
        costs._starts.extend(found.get("starts", ()))
        costs._start_parts.extend(found.get("start_parts", ()))
        costs.rescales = int(found.get("rescales", 0))
        return costs
