"""The tick clock tells time in which the controller could not listen from time in which agents were silent.

The controller compares the clocks at every tick and moves its deadlines by the seconds that `missed` returns. A machine
that was suspended, or whose clock was set, moves all deadlines by that time: the two clocks then differ. A process that
was late, because it was stopped or had too much to do, moves them only by what exceeds `most_s` per tick. So a stop of
any length makes no living node count as silent, and a controller that is late at every tick still notices dead nodes.
"""

from __future__ import annotations

LATE_S = 1.0
"""Shorter differences are ignored: ticks are never exact, and clocks are adjusted in small steps."""


class TickClock:
    """Compares the wall clock with the monotonic clock at every tick. `most_s` is the most that one tick counts for."""

    def __init__(self, wall: float, monotonic: float, most_s: float) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._most_s = max(most_s, LATE_S)

    def missed(self, wall: float, monotonic: float) -> float:
        """Return by how many seconds deadlines have to move, given the clocks at this tick."""
        took_s = monotonic - self._monotonic
        shifted_s = wall - self._wall - took_s
        self._wall, self._monotonic = wall, monotonic
        return (shifted_s if abs(shifted_s) > LATE_S else 0.0) + max(took_s - self._most_s, 0.0)
