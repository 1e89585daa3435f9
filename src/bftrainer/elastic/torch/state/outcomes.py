"""Outcomes of the latest meetings, kept as part of the state.

A rank that missed the end of a meeting because a peer was lost receives the state of a rank that did not. Its own call
then finds the outcome here. So does a worker that repeats code which the others have run before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Place = tuple[str, int]
_TOP, _AFTER = "top", "after"
_KEPT = 3
"""Number of latest steps, and of latest epochs, whose outcomes are kept: ranks are never further apart."""


def top_of(epoch: int) -> Place:
    """Return the place between the beginning of an epoch and its first step."""
    return _TOP, epoch


def after(step: int) -> Place:
    """Return the place behind a committed step, by its number."""
    return _AFTER, step


class Outcomes:
    """Outcomes by place in the training, in the order of the meetings there."""

    def __init__(self) -> None:
        self._found: dict[Place, list[Any]] = {}
        self._data: tuple[int, list[int]] = (-1, [])

    def passed(self, epoch: int, step: int) -> tuple[int, int, int]:
        """Return the meetings at the top of this epoch, those after this step, and the epoch whose data is known."""
        return self.count(top_of(epoch)), self.count(after(step)), self._data[0]

    def count(self, place: Place) -> int:
        """Return the number of meetings at a place."""
        return len(self._found.get(place, ()))

    def has(self, place: Place, number: int) -> bool:
        """Return whether meeting `number` at a place is over."""
        return number < len(self._found.get(place, ()))

    def get(self, place: Place, number: int) -> Any:
        """Return the outcome of meeting `number` at a place."""
        return self._found[place][number]

    def add(self, place: Place, value: Any) -> None:
        """Add the outcome of the next meeting at a place."""
        self._found.setdefault(place, []).append(value)
        for old in sorted(known for known in self._found if known[0] == place[0])[:-_KEPT]:
            del self._found[old]

    def data_of(self, epoch: int) -> list[int] | None:
        """Return what all ranks train on in this epoch, or in the one before; None if that is not known."""
        known, numbers = self._data
        return numbers if known >= epoch - 1 and numbers else None

    def data_is_of(self, epoch: int) -> bool:
        """Return whether the ranks have begun this epoch, with the data that `data_of` returns."""
        return self._data[0] == epoch

    def note_data(self, epoch: int, numbers: Sequence[int]) -> None:
        """Record that all ranks train on this data in `epoch`."""
        self._data = (epoch, list(numbers))

    def as_state(self) -> dict[str, Any]:
        """Return all outcomes as plain values."""
        at = [[list(place), list(values)] for place, values in self._found.items()]
        return {"at": at, "data": [self._data[0], list(self._data[1])]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Replace the outcomes by those of another rank; by none if a snapshot has none."""
        rows: Sequence[Sequence[Any]] = state.get("at", ())
        self._found = {(key[0], key[1]): list(values) for key, values in rows}
        epoch, numbers = state.get("data", (-1, []))
        self._data = (epoch, list(numbers))
