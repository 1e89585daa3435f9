"""Best value per second that a pool can give some trainers without costs: the zero-cost bound at an instant."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bftrainer.core.curve import Curve
from bftrainer.core.trace import Floats
from bftrainer.core.trainer import Trainer

Kind = tuple[Curve, int, int]
"""Kind of trainer: its value by node count, its minimum and its maximum."""

_MOST_TABLES = 512


class BestValues:
    """Computes the best value and caches it for every pool size by set of trainers, which changes seldom."""

    def __init__(self, value_of: Callable[[Trainer], Curve]) -> None:
        self._value_of = value_of
        self._tables: dict[tuple[Kind, ...], Floats] = {}
        self._last: tuple[tuple[Trainer, ...], Floats] = ((), np.zeros(1))

    def total(self, trainers: tuple[Trainer, ...], pool: int) -> float:
        """The best value per second of a pool of that size."""
        if self._last[0] is not trainers:
            self._last = (trainers, self._table(trainers))
        table = self._last[1]
        return float(table[min(pool, len(table) - 1)])

    def _table(self, trainers: Sequence[Trainer]) -> Floats:
        kinds = [(self._value_of(trainer), trainer.min_nodes, trainer.max_nodes) for trainer in trainers]
        kinds.sort(key=lambda kind: (kind[0].rates, kind[1:]))  # so that the order of the kinds does not matter
        key = tuple(kinds)
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= _MOST_TABLES:
                self._tables.clear()
            table = self._tables[key] = best_values(kinds)
        return table


def best_values(kinds: Sequence[Kind]) -> Floats:
    """The best total for every pool size from 0 up to where more nodes are of no use."""
    best: Floats = np.zeros(1)
    for curve, least, most in kinds:
        without = np.concatenate((best, np.full(most, best[-1])))
        padded = np.concatenate((np.full(most, -np.inf), without))
        # Row b of the windows is without[b − most], …, without[b]; the last `least` of them are counts not allowed.
        windows = np.lib.stride_tricks.sliding_window_view(padded, most + 1)[:, : most + 1 - least]
        best = np.maximum(without, (windows + curve.up_to(most)[: least - 1 : -1]).max(axis=1))
    return best
