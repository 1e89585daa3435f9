from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from bftrainer import elastic
from bftrainer.errors import InputError


@pytest.mark.parametrize(
    "value", [0.0, 3, "best.pt", None, True, [1, 2.5], (1, "a"), {"epoch": 3, "scores": [0.5, None]}, math.inf]
)
def test_a_plain_value_travels_as_it_is(value: Any) -> None:
    first, second = elastic.Value(value), elastic.Value(None)
    second.load_state_dict(first.state_dict())
    assert second.value == value
    assert type(second.value) is type(value)
    assert repr(second) == f"Value({value!r})"


def test_it_is_set_by_its_attribute_and_read_as_a_number() -> None:
    best = elastic.Value(0)
    best.value = max(best.value, 0.75)
    assert (best.value, float(best)) == (0.75, 0.75)


def test_numbers_of_numpy_become_plain_ones() -> None:
    value = elastic.Value([np.float64(0.5), np.float32(2), np.int16(3)]).value
    assert value == [0.5, 2.0, 3]
    assert [type(item) for item in value] == [float, float, int]


def test_what_was_taken_over_does_not_change_with_the_original() -> None:
    first = elastic.Value([1])
    state = first.state_dict()
    second = elastic.Value([])
    second.load_state_dict(state)
    first.value.append(2)
    assert (first.value, second.value, state) == ([1, 2], [1], {"value": [1]})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones(2), "but got ndarray; call .item\\(\\) on it"),
        ({1, 2}, "must be a number, a string, a bool, None, or a list, tuple or dict of these, but got set"),
        ([object()], "but got object; register objects with a state_dict\\(\\) as they are"),
        (1j, "but got complex"),
    ],
)
def test_anything_else_is_refused(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        elastic.Value(value)
    kept = elastic.Value(1)
    with pytest.raises(InputError, match=message):
        kept.value = value
    assert kept.value == 1
