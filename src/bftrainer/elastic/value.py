"""A value of the training script that survives: `best = elastic.Value(0.0)`, registered beside the model.

Like all registered state it is the same on every rank only if every rank sets it to the same value.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from bftrainer.errors import InputError


class Value:
    """A number, string, bool or None, or a list, tuple or dict of them, that newcomers and resumed runs take over.

    Read and set it as `value`. Numbers of numpy become plain numbers.
    """

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = _plain(value)

    @property
    def value(self) -> Any:
        """The present value."""
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._value = _plain(value)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the value, for snapshots and newcomers."""
        return {"value": _plain(self._value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a value."""
        self._value = _plain(state["value"])

    def __float__(self) -> float:
        return float(self._value)

    def __repr__(self) -> str:
        return f"Value({self._value!r})"


def _plain(value: Any) -> Any:
    """A copy of plain values; any other type is refused."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    if type(value) is dict:
        return {_plain(key): _plain(item) for key, item in value.items()}
    hint = "call .item() on it" if hasattr(value, "item") else "register objects with a state_dict() as they are"
    raise InputError(
        "an elastic.Value must be a number, a string, a bool, None, or a list, tuple or dict of these, "
        f"but got {type(value).__name__}; {hint}"
    )
