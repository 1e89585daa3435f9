"""How often snapshots are taken: as often as asked for, as long as that costs the training next to nothing.

`Snapshots` tells what the last one cost; `interval_s` is the time until the next. No clock, no file.
"""

from __future__ import annotations

from dataclasses import dataclass

from bftrainer.errors import InputError

STALLS = 100.0
"""Training stands still for at most one part in so many."""
WRITES = 2.0
"""A snapshot is being written for at most one part in so many of the time: that takes a core, a disk, a network."""


@dataclass(slots=True)
class Interval:
    """The time from one snapshot to the next."""

    every_s: float
    """The least, as the script or the configuration says."""
    stall_s: float = 0.0
    """How long training stood still for the last one."""
    write_s: float = 0.0
    """How long writing the last one took."""
    _told_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.every_s > 0:
            raise InputError(f"`every_s` must be more than 0 seconds, but got {self.every_s}")

    @property
    def interval_s(self) -> float:
        """From the beginning of the last one to the next."""
        return max(self.every_s, STALLS * self.stall_s, WRITES * self.write_s)

    def cost(self, stall_s: float, write_s: float) -> str | None:
        """The last one took so long. Gives a sentence when that changes much how often snapshots are taken."""
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
