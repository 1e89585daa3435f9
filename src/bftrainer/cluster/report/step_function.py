"""A step function holds a whole number that changes over time, such as the nodes of a trainer; for `usage.py`."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field


@dataclass(slots=True)
class StepFunction:
    """A step function of time: from `times[i]` on, its value is `values[i]`."""

    times: list[int] = field(default_factory=lambda: [-(1 << 62)])
    values: list[int] = field(default_factory=lambda: [0])

    def set(self, time: int, value: int) -> None:
        """Set the value from `time` on, which is not before the newest change."""
        if value == self.values[-1]:
            return
        if time == self.times[-1]:
            self.values[-1] = value
            return
        self.times.append(time)
        self.values.append(value)

    def stand_still(self, start: int, end: int) -> None:
        """Set the function to 0 from `start` to `end`; after `end` it has its newest value again."""
        value, at = self.values[-1], bisect_right(self.times, start)
        if start >= end:
            return
        del self.times[at:], self.values[at:]
        self.set(start, 0)
        self.set(end, value)

    def until(self, start: int, end: int) -> int:
        """Return the integral from `start` to `end`."""
        at = max(bisect_right(self.times, start) - 1, 0)
        total = 0
        for i in range(at, len(self.times)):
            if self.times[i] >= end:
                break
            after = self.times[i + 1] if i + 1 < len(self.times) else end
            total += self.values[i] * max(0, min(after, end) - max(self.times[i], start))
        return total
