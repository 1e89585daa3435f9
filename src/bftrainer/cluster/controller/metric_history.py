"""The metric history keeps a trainer's samples and metrics over time.

It holds a few hundred points, regardless of how long the trainer runs. `ActiveTrainer` adds a point whenever it stores
progress. When there are too many, every second point is removed and later points are added half as often, so the points
stay spread over the whole training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bftrainer.cluster.store.store import Store

MOST = 400
MOST_METRICS = 12
"""The most metrics of one point; a page can show no more."""
LEAST_S = 2.0


class MetricHistory:
    """Adds the points of one trainer to the store, and thins them out."""

    __slots__ = ("_at", "_count", "_every_s", "_last", "_trainer")

    def __init__(self, trainer: str) -> None:
        self._trainer = trainer
        self._count = -1
        self._at = 0.0
        self._every_s = LEAST_S
        self._last: tuple[int, Mapping[str, float]] = (0, {})

    def note(
        self,
        store: Store,
        now: float,
        samples: int,
        metrics: Mapping[str, float],
        at: Mapping[str, Sequence[int]] = MappingProxyType({}),
        *,
        last: bool = False,
    ) -> None:
        """Store the current values as a point, unless nothing is new or the previous point is too recent.

        The `last` point is stored even if the previous one is recent. `at` gives the position that each metric belongs
        to: epochs done, steps, samples.
        """
        if self._last == (samples, metrics):
            return
        if self._count < 0:
            self._count, first, self._at = store.point_span(self._trainer)
            # After a restart, add points as often as before it.
            while self._count and self._every_s * MOST / 2 < self._at - first:
                self._every_s *= 2
        if 0 <= now - self._at < self._every_s and not last:
            return
        kept = dict(sorted(metrics.items())[:MOST_METRICS])
        store.add_point(self._trainer, now, samples, kept, {name: list(at[name]) for name in kept if name in at})
        self._count, self._at, self._last = self._count + 1, now, (samples, dict(metrics))
        if self._count > MOST:
            self._count = store.thin_points(self._trainer)
            self._every_s *= 2
