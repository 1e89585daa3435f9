import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.core.curve import Curve
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError

CURVE = Curve.through([1, 64], [10.0, 400.0])


def test_a_trainer_needs_no_more_than_a_name_and_a_curve() -> None:
    trainer = Trainer("a", CURVE)
    assert (trainer.min_nodes, trainer.max_nodes, trainer.up_s, trainer.down_s) == (1, 64, 0.0, 0.0)
    assert trainer.work == math.inf


@given(st.integers(1, 10_000), st.integers(0, 10_000), st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1e-3, 1e3))
def test_a_trainer_keeps_what_it_is_given(least: int, more: int, up_s: float, down_s: float, weight: float) -> None:
    trainer = Trainer("a", CURVE, least, least + more, up_s, down_s, weight=weight)
    assert (trainer.min_nodes, trainer.max_nodes) == (least, least + more)
    assert (trainer.up_s, trainer.down_s, trainer.weight) == (up_s, down_s, weight)


def test_trainers_of_equal_fields_are_equal_and_cannot_change() -> None:
    trainer = Trainer("a", CURVE)
    assert trainer == Trainer("a", CURVE)
    assert len({trainer, Trainer("a", CURVE)}) == 1
    with pytest.raises(AttributeError):
        trainer.weight = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"min_nodes": 0}, "min_nodes must be 1 or more, but got 0"),
        ({"min_nodes": 1.5}, "min_nodes must be a whole number, but got 1.5"),
        ({"max_nodes": 8.0}, "max_nodes must be a whole number, but got 8.0"),
        ({"max_nodes": True}, "max_nodes must be a whole number, but got True"),
        ({"min_nodes": 8, "max_nodes": 4}, r"max_nodes must be at least min_nodes \(8\), but got 4"),
        ({"up_s": -1.0}, "up_s must be a number of seconds, 0 or more, but got -1.0"),
        ({"up_s": math.inf}, "up_s must be a number of seconds"),
        ({"down_s": math.nan}, "down_s must be a number of seconds, 0 or more, but got nan"),
        ({"work": 0.0}, "work must be a number of samples above 0, but got 0.0"),
        ({"work": math.nan}, "work must be a number of samples above 0"),
        ({"submit": math.inf}, "submit must be a time, but got inf"),
        ({"weight": 0.0}, "weight must be a number above 0, but got 0.0"),
        ({"weight": math.inf}, "weight must be a number above 0"),
    ],
)
def test_a_field_out_of_range_is_refused_with_the_trainers_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=f"trainer 'resnet': {words}"):
        Trainer("resnet", CURVE, **fields)


def test_a_trainer_must_have_a_name() -> None:
    with pytest.raises(InputError, match="name must be a name, but got ''"):
        Trainer("", CURVE)
