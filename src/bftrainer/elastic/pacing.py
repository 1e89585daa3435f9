"""Pacing of training steps: gives each step a fixed duration, so that virtual nodes scale like real ones.

Virtual nodes share a few cores. The environment variable BFTRAINER_PACE says how long a step takes, and `Run` waits
that long before the ranks sum their gradients, as if the computation had taken this time. There is no wait after a step
is committed: a rescale may be due by then, and its pause has begun.
"""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bftrainer.elastic import protocol
from bftrainer.errors import InputError

LONGEST_S = 3600.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds per step by number of nodes: linear between the given numbers, constant outside them."""

    nodes: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def parse(cls, text: str, where: str = protocol.PACE) -> Pace:
        """Parse "0.05", the same for any number of nodes, or "1:0.05,2:0.052,8:0.07", by number of nodes."""
        points: dict[int, float] = {}
        try:
            if ":" not in text:
                points[1] = float(text)
            else:
                for part in text.split(","):
                    nodes, _, seconds = part.partition(":")
                    if int(nodes) in points:
                        raise ValueError
                    points[int(nodes)] = float(seconds)
        except ValueError:
            points = {}
        good = all(nodes >= 1 and math.isfinite(s) and 0 < s <= LONGEST_S for nodes, s in points.items())
        if not points or not good:
            raise InputError(
                f"{where} must be the seconds of a step, such as 0.05, or by number of nodes, such as 1:0.05,8:0.07 "
                f"(each number once, above 0 and at most {LONGEST_S:g} s), but got {text[:100]!r}"
            )
        counts = tuple(sorted(points))
        return cls(counts, tuple(points[count] for count in counts))

    def step_s(self, nodes: int) -> float:
        """Return the seconds per step on `nodes` nodes."""
        place = bisect_left(self.nodes, nodes)
        if place == 0:
            return self.seconds[0]
        if place == len(self.nodes):
            return self.seconds[-1]
        low, high = self.nodes[place - 1], self.nodes[place]
        before, after = self.seconds[place - 1], self.seconds[place]
        return before + (after - before) * (nodes - low) / (high - low)


class Pacer:
    """Delays each step until its duration has passed. A step that is late is not made up for."""

    def __init__(self, pace: Pace, wait: Callable[[float], object] = time.sleep) -> None:
        """`wait` waits for a number of seconds. It may return early if there is a reason not to wait."""
        self._pace = pace
        self._wait = wait
        self._from = time.perf_counter()

    @classmethod
    def from_environment(
        cls, wait: Callable[[float], object] = time.sleep, environment: Mapping[str, str] = os.environ
    ) -> Pacer | None:
        """Return the pacer that the environment asks for; None means no delay."""
        text = environment.get(protocol.PACE, "").strip()
        return cls(Pace.parse(text), wait) if text else None

    def begin(self) -> None:
        """Start timing the first step of a generation now."""
        self._from = time.perf_counter()

    def hold(self, nodes: int) -> None:
        """Wait until the present step has taken its duration. The time after the wait counts for the next step."""
        due, now = self._from + self._pace.step_s(nodes), time.perf_counter()
        if due > now:
            self._wait(due - now)
        self._from = max(due, now)
