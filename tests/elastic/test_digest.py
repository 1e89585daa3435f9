"""What ranks compare to notice that they drift apart: settings of optimizers, registered values, norms of weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.optim import Adam, Optimizer  # noqa: E402

from bftrainer import elastic  # noqa: E402
from bftrainer.elastic.torch.meetings.digest import Digest, refuse_drift, settings_of  # noqa: E402
from bftrainer.errors import InputError  # noqa: E402

CHANGES: dict[str, Callable[[Optimizer], Any]] = {
    "learning rate": lambda made: made.param_groups[0].update(lr=0.02),
    "weight decay": lambda made: made.param_groups[0].update(weight_decay=0.1),
    "one of a pair": lambda made: made.param_groups[0].update(betas=(0.9, 0.99)),
    "flag": lambda made: made.param_groups[0].update(amsgrad=True),
    "learning rate of the second group": lambda made: made.param_groups[1].update(lr=0.03),
    "added group": lambda made: made.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "learning rate that is no number": lambda made: made.param_groups[0].update(lr=math.nan),
}


def adam(lr: Any = 0.01) -> Optimizer:
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    return Adam([{"params": layer.parameters()} for layer in layers], lr=lr, betas=(0.9, 0.999))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_settings_that_differ_have_different_numbers(change: Callable[[Optimizer], Any]) -> None:
    changed = adam()
    change(changed)
    assert settings_of([changed]) != settings_of([adam()])


def test_a_changed_momentum_of_the_second_of_two_optimizers_is_seen() -> None:
    first, second = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9) for _ in range(2))
    before = settings_of([first, second])
    second.param_groups[0]["momentum"] = 0.8
    assert settings_of([first, second]) != before


@pytest.mark.parametrize("lr", [np.float64(0.01), torch.tensor(0.01), np.array([0.01]), 0.01 + 1e-12], ids=repr)
def test_the_same_learning_rate_in_another_type_is_the_same_setting(lr: Any) -> None:
    same, other = adam(), adam()
    same.param_groups[0]["lr"], other.param_groups[0]["lr"] = lr, lr * 2
    assert settings_of([same]) == settings_of([adam()])
    assert settings_of([other]) != settings_of([adam()])


@pytest.mark.parametrize("value", [np.ones(3), torch.ones(3), "cosine", None, {"warmup": 5}], ids=repr)
def test_what_is_no_number_in_a_group_does_not_count(value: Any) -> None:
    noted, other = adam(), adam()
    noted.param_groups[0]["note"], other.param_groups[0]["note"] = value, "something else"
    assert settings_of([noted]) == settings_of([other])


def test_the_number_of_settings_is_exact_in_single_precision() -> None:
    number = settings_of([adam()])
    assert number > 0
    assert torch.tensor(float(number), dtype=torch.float32).item() == number


class Broken:
    def state_dict(self) -> Any:
        raise ValueError("no state today")


def objects() -> dict[str, Any]:
    """What a rank registers: the same on each call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "best": elastic.Value({"loss": 0.25, "step": 3, "history": [1.0, None, "a"]}),
        "broken": Broken(),
    }


def note(**changed: Any) -> bytes:
    return Digest(objects() | changed).written()


def test_ranks_with_the_same_state_pass() -> None:
    refuse_drift([note(), note(), note()])


@pytest.mark.parametrize(
    "value",
    [
        {"loss": 0.26, "step": 3, "history": [1.0, None, "a"]},
        {"loss": 0.25, "step": 4, "history": [1.0, None, "a"]},
        {"loss": 0.25, "step": 3, "history": [1.0, None, "b"]},
        {"loss": 0.25, "step": 3, "history": [1.0]},
        None,
    ],
)
def test_a_registered_value_that_differs_is_refused_by_its_name_and_rank(value: Any) -> None:
    with pytest.raises(InputError, match=r"`best`, which is registered, differs between rank 0 and rank 2"):
        refuse_drift([note(), note(), note(best=elastic.Value(value))])


def test_a_value_that_differs_in_its_last_digits_passes() -> None:
    refuse_drift([note(best=elastic.Value(0.1)), note(best=elastic.Value(0.1 + 1e-12))])
    refuse_drift([note(best=elastic.Value(0.1)), note(best=elastic.Value(np.float64(0.1)))])


class Holder:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return {"state": self.state}


@pytest.mark.parametrize("other", [torch.tensor([1.0, 3.0]), torch.tensor([[1.0, 2.0]]), np.float32(3)], ids=repr)
def test_an_object_whose_tensor_differs_is_refused(other: Any) -> None:
    mine = torch.tensor([1.0, 2.0])
    refuse_drift([note(average=Holder(mine)), note(average=Holder(mine.clone()))])
    with pytest.raises(InputError, match="`average`, which is registered, differs"):
        refuse_drift([note(average=Holder(mine)), note(average=Holder(other))])


def weights(factor: float) -> nn.Module:
    model = objects()["model"]
    with torch.no_grad():
        model[0].weight.mul_(factor)
    return model


def test_weights_that_differ_are_refused_by_the_name_of_their_module_and_rank() -> None:
    with pytest.raises(InputError, match=r"the weights of `model` differ between rank 0 and rank 1: .*on one of them"):
        refuse_drift([note(), note(model=weights(1.01))])


def test_weights_that_differ_by_rounding_pass() -> None:
    refuse_drift([note(), note(model=weights(1 + 1e-6))])


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e30])
def test_weights_that_grew_beyond_all_numbers_on_all_ranks_are_no_drift(factor: float) -> None:
    refuse_drift([note(model=weights(factor)), note(model=weights(factor))])
    for pair in ([note(), note(model=weights(factor))], [note(model=weights(factor)), note()]):
        with pytest.raises(InputError, match="the weights of `model` differ"):
            refuse_drift(pair)


def test_modules_without_weights_pass() -> None:
    refuse_drift([note(model=nn.ReLU()), note(model=nn.ReLU())])
