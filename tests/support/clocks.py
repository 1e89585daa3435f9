"""A clock in the hands of a test."""

from __future__ import annotations


class Clock:
    """Time that passes when a test says so, or when it is waited for. Stands in for the module `time` as well."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    perf_counter = monotonic = __call__

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds
