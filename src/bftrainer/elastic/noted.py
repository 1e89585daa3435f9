"""What a script reported, each value with the place in the training that it belongs to.

A worker keeps one for itself and its snapshots, the controller one for each trainer. Reports of several workers cross,
and all but one of them know an evaluation only by hearsay: the place says which of two values is the newer one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

MOST = 100
"""Names that are kept of what others say: a script may have a new one for every report."""


class At(NamedTuple):
    """A place in a training."""

    epoch: int
    """Epochs whose batches were all done: what is reported right after those of the first epoch is of epoch 1."""
    step: int
    samples: int

    @property
    def order(self) -> tuple[int, int, int]:
        """What is greater later. Programs count samples, steps or both."""
        return self.samples, self.step, self.epoch


class Noted:
    """Values by name. Value and place are replaced together: another thread may read them at any time."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, At]] = {}

    @property
    def values(self) -> dict[str, float]:
        """The values alone."""
        return {name: value for name, (value, _) in self._items()}

    @property
    def at(self) -> dict[str, At]:
        """Their places."""
        return {name: at for name, (_, at) in self._items()}

    def both(self) -> tuple[dict[str, float], dict[str, At]]:
        """Values and places of the same moment."""
        found = self._items()
        return {name: value for name, (value, _) in found}, {name: at for name, (_, at) in found}

    def note(self, values: Mapping[str, float], at: At) -> None:
        """These are the values now."""
        for name, value in values.items():
            self._found[name] = (value, at)

    def take(self, values: Mapping[str, float], at: Mapping[str, Sequence[int]], otherwise: At) -> None:
        """Somebody else's values, where they are not older than ours. `otherwise`: of those whose place is not said."""
        for name, value in values.items():
            place = At(*at[name]) if name in at else otherwise
            if name not in self._found:
                if len(self._found) < MOST:
                    self._found[name] = (value, place)
            elif place.order >= self._found[name][1].order:
                self._found[name] = (value, place)

    def forget_after(self, samples: int) -> None:
        """Training goes on from an earlier place: what was reported beyond it will be reported again."""
        for name, (_, at) in self._items():
            if at.samples > samples:
                del self._found[name]

    def epoch_is_over(self, epochs: int, step: int) -> None:
        """So many epochs are done. What the last step gave is a value of the epoch that it ended."""
        for name, (value, at) in self._items():
            if at.step == step:
                self._found[name] = (value, at._replace(epoch=epochs))

    def as_state(self) -> dict[str, list[Any]]:
        """What `load` takes, of plain values."""
        return {name: [value, *at] for name, (value, at) in self._items()}

    def load(self, state: Mapping[str, Sequence[Any]]) -> None:
        """Take over what is not older than what is here."""
        values, places = {name: row[0] for name, row in state.items()}, {name: row[1:] for name, row in state.items()}
        self.take(values, places, At(0, 0, 0))

    def _items(self) -> Iterable[tuple[str, tuple[float, At]]]:
        return list(self._found.items())
