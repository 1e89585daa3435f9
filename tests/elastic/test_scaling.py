from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.elastic.torch.gradients.lr_scaling import LearningRate, scaled
from bftrainer.errors import InputError

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0), (lambda ratio: ratio / 8, 0.5)]
)
def test_the_factor_follows_the_rule(rule: str | Callable[[float], float], factor: float) -> None:
    assert LearningRate(rule, base_batch=32).factor(0, 128) == factor


def test_the_first_batch_holds_at_once() -> None:
    rate = LearningRate("linear", base_batch=10, warmup_steps=100)
    rate.changed(0, 80)
    assert rate.factor(0, 80) == 8.0


def test_after_a_growth_the_factor_rises_linearly_to_the_new_one() -> None:
    rate = LearningRate("linear", base_batch=10, warmup_steps=4)
    rate.changed(0, 10)
    rate.changed(100, 50)
    assert [rate.factor(step, 50) for step in range(100, 107)] == [1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0]


def test_after_a_shrink_the_factor_falls_at_once() -> None:
    rate = LearningRate("linear", base_batch=10, warmup_steps=4)
    rate.changed(0, 50)
    rate.changed(100, 20)
    assert rate.factor(100, 20) == 2.0


def test_a_change_within_a_warm_up_starts_from_the_factor_then_reached() -> None:
    rate = LearningRate("linear", base_batch=10, warmup_steps=4)
    rate.changed(0, 10)
    rate.changed(100, 50)
    rate.changed(102, 70)  # at 3 by now
    assert [rate.factor(step, 70) for step in (102, 103, 106)] == [3.0, 4.0, 7.0]
    rate.changed(103, 60)  # a smaller batch, but the factor reached is below what it allows
    assert [rate.factor(step, 60) for step in (103, 105, 107)] == [4.0, 5.0, 6.0]
    rate.changed(105, 20)
    assert rate.factor(105, 20) == 2.0


def test_a_rescale_to_the_same_batch_does_not_begin_the_warm_up_anew() -> None:
    rate = LearningRate("linear", base_batch=10, warmup_steps=4)
    rate.changed(0, 10)
    rate.changed(100, 50)
    rate.changed(102, 50)
    assert rate.factor(104, 50) == 5.0


def test_a_smaller_last_batch_of_an_epoch_takes_its_own_factor() -> None:
    rate = LearningRate("linear", base_batch=10, warmup_steps=4)
    rate.changed(0, 40)
    assert rate.factor(7, 20) == 2.0
    assert rate.factor(8, 40) == 4.0


CHANGES = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 1000)), min_size=1, max_size=10)


@given(CHANGES, st.sampled_from(["linear", "sqrt", "none"]), st.integers(0, 30))
def test_the_factor_never_jumps_up_and_never_goes_above_the_rule(
    changes: list[tuple[int, int]], rule: str, warmup_steps: int
) -> None:
    rate = LearningRate(rule, base_batch=100, warmup_steps=warmup_steps)
    plain = LearningRate(rule, base_batch=100)
    step, batch = 0, changes[0][1]
    rate.changed(step, batch)
    for wait, new in changes:
        before = rate.factor(step, batch)
        for _ in range(wait):
            step += 1
            now = rate.factor(step, batch)
            assert now >= before
            before = now
        rate.changed(step, new)
        if warmup_steps:
            assert rate.factor(step, new) <= before
        batch = new
        assert 0 < rate.factor(step, batch) <= plain.factor(step, batch)
    assert rate.factor(step + warmup_steps, batch) == plain.factor(step, batch)


@given(CHANGES, st.integers(0, 40))
def test_a_newcomer_goes_on_from_the_state_of_the_others(changes: list[tuple[int, int]], later: int) -> None:
    old = LearningRate("linear", base_batch=7, warmup_steps=30)
    step, batch = 0, 7
    for wait, batch in changes:
        step += wait
        old.changed(step, batch)
    new = LearningRate("linear", base_batch=7, warmup_steps=30)
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert new.factor(step + later, batch) == old.factor(step + later, batch)
    old.changed(step + later, 5000)
    new.changed(step + later, 5000)
    assert new.factor(step + later + 3, 5000) == old.factor(step + later + 3, 5000)


def test_a_state_before_any_change_can_be_loaded() -> None:
    rate = LearningRate("linear", base_batch=10, warmup_steps=4)
    rate.load_state_dict(LearningRate("linear", base_batch=10).state_dict())
    rate.changed(5, 20)
    assert rate.factor(5, 20) == 2.0


def test_a_state_with_something_missing_is_refused() -> None:
    with pytest.raises(InputError, match="the learning rate's state must have batch, before, but got"):
        LearningRate(base_batch=1).load_state_dict({"step": 1})


@pytest.mark.parametrize("result", [0.0, -1.0, math.nan, math.inf, None, "2", True])
def test_a_rule_that_gives_no_positive_number_is_refused(result: Any) -> None:
    rate = LearningRate(lambda _: result, base_batch=2)
    with pytest.raises(InputError, match="`rule` must give a finite number above 0, but got .* for the ratio 1.5"):
        rate.factor(0, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "cubic"}, "`rule` must be linear, sqrt, none or a function, but got 'cubic'"),
        ({"rule": 2}, "`rule` must be linear, sqrt, none or a function, but got 2"),
        ({"base_batch": 0}, "`base_batch` must be a whole number, 1 or more, but got 0"),
        ({"warmup_steps": -1}, "`warmup_steps` must be a whole number, 0 or more, but got -1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LearningRate(**{"base_batch": 1, **options})


def parameter() -> Any:
    return torch.nn.Parameter(torch.ones(1, dtype=torch.float64))


def test_the_optimizer_steps_with_the_scaled_rate_and_gets_the_old_one_back() -> None:
    weight, bias = parameter(), parameter()
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.1}, {"params": [bias], "lr": 1}])
    weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
    with scaled(optimizer, 3.0):
        optimizer.step()
    assert (weight.item(), bias.item()) == pytest.approx((1 - 0.3, 1 - 3))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1]


def test_the_old_rate_comes_back_after_an_exception() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    with pytest.raises(ZeroDivisionError), scaled(optimizer, 7.0):
        raise ZeroDivisionError
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_tensor_stays_the_same_object_and_is_scaled_once_though_groups_share_it() -> None:
    shared, own = torch.tensor(0.1), torch.tensor(0.3)
    groups = [{"params": [parameter()]}, {"params": [parameter()]}, {"params": [parameter()], "lr": own}]
    optimizer = torch.optim.Adam(groups, lr=shared, capturable=True)
    rates = [group["lr"] for group in optimizer.param_groups]
    with scaled(optimizer, 3.0):
        assert [rate.item() for rate in rates] == pytest.approx([0.3, 0.3, 0.9])
        assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))
    assert [group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True)] == [True] * 3
    assert torch.equal(shared, torch.tensor(0.1))
    assert torch.equal(torch.stack(rates), torch.tensor([0.1, 0.1, 0.3]))


def test_a_scheduler_never_sees_the_factor() -> None:
    plain, ours = (torch.optim.SGD([parameter()], lr=0.1) for _ in range(2))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in (plain, ours)]
    for _ in range(5):
        plain.step()
        with scaled(ours, 1.7):
            ours.step()
        for scheduler in schedulers:
            scheduler.step()
        assert ours.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


def test_a_factor_of_one_touches_nothing() -> None:
    class Untouchable:
        touched = False

        def __getattr__(self, name: str) -> object:
            type(self).touched = True
            raise AttributeError(name)

    optimizer = Untouchable()
    with scaled(optimizer, 1.0):
        assert not optimizer.touched
    assert not optimizer.touched


def test_an_optimizer_without_a_rate_is_refused_and_left_as_it_was() -> None:
    optimizer = torch.optim.SGD([{"params": [parameter()]}, {"params": [parameter()]}], lr=0.1)
    optimizer.param_groups[1]["lr"] = None
    message = "parameter group 1 of SGD must have a learning rate to scale"
    with pytest.raises(InputError, match=message), scaled(optimizer, 2.0):
        pass
    assert optimizer.param_groups[0]["lr"] == 0.1
