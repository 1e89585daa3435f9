"""Snapshot interval: the requested time between snapshots, longer if they would slow the training.

`Snapshots` reports what the last snapshot cost; `interval_s` is the time until the next. This module uses no clock and
no files.
"""

from __future__ import annotations

from dataclasses import dataclass

from bftrainer.errors import InputError

STALLS = 100.0
"""Training stands still for at most one part in this many of the time."""
WRITES = 2.0
"""Snapshots are being written for at most one part in this many of the time: that takes a core, a disk, a network."""


@dataclass(slots=True)
class SnapshotInterval:
    """The time from one snapshot to the next."""

    every_s: float
    """Minimum interval in seconds, from the script or the configuration."""
    stall_s: float = 0.0
    """How long training stood still for the last snapshot."""
    write_s: float = 0.0
    """How long writing the last snapshot took."""
    _told_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.every_s > 0:
            raise InputError(f"`every_s` must be more than 0 seconds, but got {self.every_s}")

    @property
    def interval_s(self) -> float:
        """Seconds from the beginning of the last snapshot to the next."""
        return max(self.every_s, STALLS * self.stall_s, WRITES * self.write_s)

    def cost(self, stall_s: float, write_s: float) -> str | None:
        """Record the cost of the last snapshot. Return a sentence if the interval changes much because of it."""
        self.stall_s, self.write_s = stall_s, write_s
        now_s = self.interval_s
        told_s = self._told_s or self.every_s
        if told_s / 1.5 <= now_s <= told_s * 1.5:
            return None
        self._told_s = now_s
        if now_s == self.every_s:
            return f"snapshots every {now_s:.3g} s again"
        cause = f"a copy takes {stall_s:.3g} s" if now_s > WRITES * write_s else f"writing one takes {write_s:.3g} s"
        return f"snapshots every {now_s:.3g} s instead of {self.every_s:.3g} s: {cause}"
