"""`Totals` sums the figures of all trainers since the beginning, for `status`.

`Totals` adds the figures of the trainers that are shown to stored sums of those that ended earlier. Sums of ended
trainers do not change any more, so each request reads only the trainers that ended since the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bftrainer.cluster.store.store import Store

KEYS = ("samples", "node_seconds", "rescales")


class Totals:
    """Sums by owner over the trainers that ended up to a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._upto = float("-inf")
        self._old: dict[str, list[float]] = {}

    def of(self, owner: str | None, ended_by: float, shown: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        """Return the totals of one owner's trainers, or of all trainers if `owner` is None.

        They cover the trainers that ended by `ended_by` and the rows in `shown`, each with its own figures.
        """
        self._read(ended_by)
        sums = [0.0] * len(KEYS)
        old = self._old.values() if owner is None else [self._old.get(owner, sums)]
        for figures in (*old, *([row[key] for key in KEYS] for row in shown)):
            sums = [sum_ + figure for sum_, figure in zip(sums, figures, strict=True)]
        samples, node_seconds, rescales = sums
        return {"samples": int(samples), "node_seconds": node_seconds, "rescales": int(rescales)}

    def _read(self, upto: float) -> None:
        if upto < self._upto:  # the clock was set back
            self._upto, self._old = float("-inf"), {}
        for owner, *figures in self._store.ended_sums(self._upto, upto):
            known = self._old.get(owner, [0.0] * len(KEYS))
            self._old[owner] = [one + other for one, other in zip(known, figures, strict=True)]
        self._upto = upto
