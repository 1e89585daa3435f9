"""Elastic `Value`: a plain value of the script, which survives when nodes come and go.

Write `best = elastic.Value(0.0)` and register it beside the model. As with all registered state, it is the same on
every rank only if every rank sets it to the same value.
"""

from __future__ import annotations

from enum import Enum
from numbers import Integral, Real
from typing import Any

from bftrainer.errors import InputError

CARRIED = "bftrainer_carry"
"""Name under which the variables are registered that `elastic.prepare` carries."""
_ATOMS = frozenset({type(None), bool, int, float, str})
"""Types of plain values that are no containers."""


class Value:
    """A plain value that newcomers and resumed runs receive with the state, such as the best accuracy so far.

    Create it with `best = elastic.Value(0.0)`, register it with `run.register(best=best, …)`, and read and set it as
    `best.value`. It holds a number, string, bool or None, or a list, tuple or dict of these. numpy numbers become plain
    numbers. Set it to the same value on every rank.
    """

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = plain(value)

    @property
    def value(self) -> Any:
        """The present value."""
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._value = plain(value)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the value, for snapshots and newcomers."""
        return {"value": plain(self._value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the value by a saved one."""
        self._value = plain(state["value"])

    def __float__(self) -> float:
        return float(self._value)

    def __repr__(self) -> str:
        return f"Value({self._value!r})"


def plain(value: Any, holder: str = "an elastic.Value") -> Any:
    """Return a copy of a plain value; refuse any other type. `holder` names what holds the value."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, Enum):  # some are numbers or text, but a script may ask for their names
        raise InputError(f"{holder} must be a plain value, but got the {kind.__name__} {value.name}; keep its .value")
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if kind is list or kind is tuple:
        return kind([item if type(item) in _ATOMS else plain(item, holder) for item in value])
    if kind is dict:
        return {plain(key, holder): plain(item, holder) for key, item in value.items()}
    hint = "call .item() on it" if hasattr(value, "item") else "register objects with a state_dict() as they are"
    raise InputError(
        f"{holder} must be a number, a string, a bool, None, or a list, tuple or dict of these, "
        f"but got {kind.__name__}; {hint}"
    )
