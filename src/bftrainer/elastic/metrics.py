"""Metrics reported by a training script, each with the position in the training it belongs to.

A worker keeps one `ReportedMetrics` for itself and its snapshots; the controller keeps one per trainer. Reports of
several workers can arrive out of order, and only one worker knows an evaluation first-hand. The position decides which
of two values is newer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat

MOST = 100
"""Maximum number of names accepted from other workers: a script may use a new name in every report."""


class Position(NamedTuple):
    """Position in a training: epochs, steps and samples done."""

    epoch: int
    """Completed epochs. A value reported right after the batches of the first epoch belongs to epoch 1."""
    step: int
    samples: int

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key that grows during training. Programs count samples, steps or both."""
        return self.samples, self.step, self.epoch


class ReportedMetrics:
    """Latest values by name. A value and its position are replaced together: other threads may read at any time.

    A value may be a number that a device still computes. It is waited for where it is read, not where it is noted.
    """

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[str, tuple[SupportsFloat, Position]] = {}

    @property
    def values(self) -> dict[str, float]:
        """Values by name, without positions."""
        return {name: float(value) for name, (value, _) in self._items()}

    @property
    def at(self) -> dict[str, Position]:
        """Positions by name."""
        return {name: at for name, (_, at) in self._items()}

    def both(self) -> tuple[dict[str, float], dict[str, Position]]:
        """Return values and positions of the same moment."""
        found = self._items()
        return {name: float(value) for name, (value, _) in found}, {name: at for name, (_, at) in found}

    def note(self, values: Mapping[str, SupportsFloat], at: Position) -> None:
        """Record values reported at the position `at`."""
        for name, value in values.items():
            self._found[name] = (value, at)

    def take(self, values: Mapping[str, float], at: Mapping[str, Sequence[int]], otherwise: Position) -> None:
        """Merge values from another worker, unless they are older.

        `at` has their positions; `otherwise` is the position of a value that has none.
        """
        for name, value in values.items():
            place = Position(*at[name]) if name in at else otherwise
            if name not in self._found:
                if len(self._found) < MOST:
                    self._found[name] = (value, place)
            elif place.order >= self._found[name][1].order:
                self._found[name] = (value, place)

    def forget_after(self, samples: int) -> None:
        """Delete values reported after `samples`. Training resumes from there and will report them again."""
        for name, (_, at) in self._items():
            if at.samples > samples:
                del self._found[name]

    def epoch_is_over(self, epochs: int, step: int) -> None:
        """Record that `epochs` epochs are done. Values of the last `step` then belong to the epoch that it ended."""
        for name, (value, at) in self._items():
            if at.step == step:
                self._found[name] = (value, at._replace(epoch=epochs))

    def as_state(self) -> dict[str, list[Any]]:
        """Return the metrics as plain values that `load` accepts."""
        return {name: [float(value), *at] for name, (value, at) in self._items()}

    def load(self, state: Mapping[str, Sequence[Any]]) -> None:
        """Merge metrics saved by `as_state`, unless they are older than those present."""
        values, places = {name: row[0] for name, row in state.items()}, {name: row[1:] for name, row in state.items()}
        self.take(values, places, Position(0, 0, 0))

    def _items(self) -> Iterable[tuple[str, tuple[SupportsFloat, Position]]]:
        return list(self._found.items())
