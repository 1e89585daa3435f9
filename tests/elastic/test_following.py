"""A newcomer that follows: it loads the others' state at one step, repeats their steps, and has the same bytes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from bftrainer.elastic.torch.follow import flat
from bftrainer.elastic.torch.follow.flat import FlatLayout, Spec
from bftrainer.elastic.torch.follow.frames import FlowError
from bftrainer.elastic.torch.follow.newcomer import Following
from support.elastic.following import MakeOptimizers, Rank, begun, gradients, training
from support.waiting import wait_until

MARGIN = 100
"""Steps from the newcomer's choice until the state is copied. The ranks of these tests make hundreds per second."""


def sgd(model: nn.Module) -> list[Any]:
    return [SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)]


def two_groups(model: nn.Module) -> list[Any]:
    layers = list(model.children())
    groups = [{"params": layers[0].parameters()}, {"params": layers[2].parameters(), "lr": 1e-3}]
    return [AdamW(groups, lr=0.1, foreach=True), SGD(layers[4].parameters(), lr=0.05)]


def scheduled(model: nn.Module) -> list[Any]:
    optimizer = Adam(model.parameters(), lr=0.01, amsgrad=True)
    return [optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)]


def with_tensor_lr(model: nn.Module) -> list[Any]:
    return [Adam(model.parameters(), lr=torch.tensor(0.01))]


def adagrad(model: nn.Module) -> list[Any]:
    return [Adagrad(model.parameters(), lr=0.1)]


def verified(following: Following, donors: list[Rank], label: str = "1/0") -> bool:
    """Have the donors say how far they are, and the newcomer compare."""
    for donor in donors:
        donor.flows.mark(label, (donor.step,))
    return following.has_caught_up(label, (donors[0].step,), lambda: None)


def goes_on(following: Following, donors: list[Rank]) -> None:
    """Wait until the donors have made some more steps."""
    seen = donors[0].step
    wait_until(lambda: donors[0].step >= seen + 6)
    assert not following.problem


def ended(donors: list[Rank]) -> None:
    for donor in donors:
        donor.flows.close()
    wait_until(lambda: not threads("bftrainer-flow", "bftrainer-follow"), "the threads' end")


def threads(*names: str) -> list[str]:
    """The threads of donors or of newcomers that run."""
    return [thread.name for thread in threading.enumerate() if thread.name.rpartition("-")[0] in names]


@pytest.mark.parametrize("make", [sgd, two_groups, scheduled, with_tensor_lr, adagrad])
@pytest.mark.parametrize("count", [1, 3])
def test_a_newcomer_ends_with_the_same_bytes_as_those_it_follows(make: MakeOptimizers, count: int) -> None:
    donors, newcomer = [Rank(make, scheduler_every="step") for _ in range(count)], Rank(make, seed=1)
    following = begun(newcomer, donors)
    with training(donors):
        following.begin(margin=MARGIN)
        goes_on(following, donors)
    assert newcomer.step == 0
    assert verified(following, donors)
    assert newcomer.bytes() == donors[0].bytes()
    assert following.repeated > 0
    assert all(param.grad is None for param in newcomer.model.parameters())
    following.stop("the test is over")
    ended(donors)


def test_clipped_gradients_and_skipped_parameters_are_followed() -> None:
    def some(model: nn.Module, step: int) -> None:
        gradients(model, step)
        for number, param in enumerate(model.parameters()):
            if (step + number) % 3 == 0:
                param.grad = None

    donors, newcomer = [Rank(two_groups, clip_norm=0.5) for _ in range(2)], Rank(two_groups, seed=1)
    following = begun(newcomer, donors)
    with training(donors, some):
        following.begin(margin=MARGIN)
        goes_on(following, donors)
    assert verified(following, donors)
    assert newcomer.bytes() == donors[0].bytes()
    following.stop("the test is over")
    ended(donors)


def test_steps_that_a_grad_scaler_leaves_out_are_left_out_here_too() -> None:
    def sometimes_infinite(model: nn.Module, step: int) -> None:
        gradients(model, step)
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(float("inf") if step % 3 == 0 else 1024.0)

    def make(model: nn.Module) -> list[Any]:
        return [*sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10_000)]

    donors, newcomer = [Rank(make) for _ in range(2)], Rank(sgd, seed=1)
    scalers = [rank.stepper._scaler for rank in donors]

    def scaled(model: nn.Module, step: int) -> None:
        for scaler in scalers:
            scaler.scale(torch.ones(()))  # a GradScaler begins with the first loss
        sometimes_infinite(model, step)

    following = begun(newcomer, donors)
    with training(donors, scaled):
        following.begin(margin=MARGIN)
        goes_on(following, donors)
    assert verified(following, donors)
    assert newcomer.bytes() == donors[0].bytes()
    following.stop("the test is over")
    ended(donors)


def test_weights_that_the_script_changes_itself_are_noticed() -> None:
    def clipping(model: nn.Module, step: int) -> None:
        gradients(model, step)
        for param in model.parameters():
            param.data.clamp_(-0.01, 0.01)

    donors, newcomer = [Rank(sgd)], Rank(sgd, seed=1)
    following = begun(newcomer, donors)
    with training(donors, clipping):
        following.begin(margin=MARGIN)
        goes_on(following, donors)
    assert not verified(following, donors)
    following.stop("the test is over")
    ended(donors)


def test_what_a_newcomer_had_before_comes_back_where_nobody_trains_any_more() -> None:
    donors, newcomer = [Rank(scheduled)], Rank(scheduled, seed=1)
    before = newcomer.bytes()
    following = begun(newcomer, donors)
    with training(donors):
        following.begin(margin=MARGIN)
    assert newcomer.bytes() != before
    following.stop("nobody trains any more")
    following.restore()
    assert newcomer.bytes() == before
    ended(donors)


def test_what_cannot_be_followed_ends_the_flow_and_not_the_training(capfd: pytest.CaptureFixture[str]) -> None:
    def sparse(model: nn.Module, step: int) -> None:
        gradients(model, step)
        param = next(model.parameters())
        assert param.grad is not None
        param.grad = param.grad.to_sparse()

    def plain(model: nn.Module) -> list[Any]:
        return [SGD(model.parameters(), lr=0.01)]

    donors, newcomer = [Rank(plain)], Rank(plain, seed=1)
    following = begun(newcomer, donors)
    with training(donors, sparse):
        with contextlib.suppress(FlowError):
            following.begin(margin=MARGIN)
        wait_until(lambda: bool(following.problem))
        seen = donors[0].step
        wait_until(lambda: donors[0].step > seen)
    assert "newcomer takes the state when it joins: there are sparse gradients" in capfd.readouterr().err
    following.stop("the test is over")
    ended(donors)


def test_a_newcomer_with_other_parameters_does_not_follow() -> None:
    donors, newcomer = [Rank(sgd)], Rank(two_groups, seed=1)
    following = begun(newcomer, donors)
    with training(donors), pytest.raises(FlowError, match="other parameters"):
        following.begin(margin=MARGIN)
    ended(donors)


def test_a_newcomer_that_reads_nothing_does_not_hold_up_the_training(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bftrainer.elastic.torch.follow.donor._LEAST_QUEUE_BYTES", 1)
    monkeypatch.setattr("bftrainer.elastic.torch.follow.donor._QUEUE_SHARES", 1)
    width = 20_000  # the gradients of a few steps are more than sockets hold
    donors, newcomer = [Rank(sgd, width=width)], Rank(sgd, seed=1, width=width)
    following = begun(newcomer, donors)
    monkeypatch.setattr(newcomer.trained, "repeat", lambda *_: wait_until(lambda: not threads("bftrainer-flow")))
    with training(donors):
        with contextlib.suppress(FlowError):
            following.begin(margin=5)
        wait_until(lambda: following.problem)
        seen = donors[0].step
        wait_until(lambda: donors[0].step > seen)
    assert "cannot keep up" in capfd.readouterr().err
    following.stop("the test is over")
    ended(donors)


@pytest.mark.parametrize("most", [1, 1 << 30])
def test_a_newcomer_that_can_never_keep_up_says_so_and_does_not_ask_again(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the donor ends the flow, or the newcomer sees that it comes no closer."""
    monkeypatch.setattr("bftrainer.elastic.torch.follow.donor._LEAST_QUEUE_BYTES", most)
    monkeypatch.setattr("bftrainer.elastic.torch.follow.newcomer._HOPELESS_S", 0.5)
    width = 20_000
    donors, newcomer = [Rank(sgd, width=width)], Rank(sgd, seed=1, width=width)
    following = begun(newcomer, donors)

    def slowed(call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any) -> Any:
            time.sleep(0.3)
            return call(*args)

        return slow

    monkeypatch.setattr(newcomer.trained, "load", slowed(newcomer.trained.load))
    monkeypatch.setattr(newcomer.trained, "repeat", slowed(newcomer.trained.repeat))
    with training(donors):
        with pytest.raises(FlowError, match="faster than it can follow") as raised:
            following.begin(margin=5)
        wait_until(lambda: not threads("bftrainer-flow"), "the end of the flow")
    assert raised.type is FlowError  # after a FlowLostError it would ask again
    ended(donors)


def test_a_checksum_tells_values_places_and_layouts_apart() -> None:
    tensors = [torch.randn(300, 400), torch.randn(7), torch.tensor(3.0), torch.arange(5)]
    layout = FlatLayout([Spec.of(tensor) for tensor in tensors])
    known = layout.checksum(tensors, 0, layout.size)
    assert layout.checksum([tensor.clone() for tensor in tensors], 0, layout.size) == known
    for number, place in [(0, (0, 0)), (0, (299, 399)), (1, (3,)), (2, ()), (3, (4,))]:
        changed = [tensor.clone() for tensor in tensors]
        changed[number][place] += 1
        assert layout.checksum(changed, 0, layout.size) != known
    swapped = [tensor.clone() for tensor in tensors]
    swapped[1] = swapped[1].flip(0)
    assert layout.checksum(swapped, 0, layout.size) != known
    other = [tensors[0].view(400, 300), *tensors[1:]]
    assert FlatLayout([Spec.of(tensor) for tensor in other]).checksum(other, 0, layout.size) != known


def test_parts_that_are_joined_for_a_checksum_are_whole_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "_JOINED_BYTES", 100)
    parts = [torch.full((size,), size, dtype=torch.uint8) for size in (60, 30, 20, 120, 1)]
    joined = list(flat._joined(parts))
    assert [one.numel() for one in joined] == [90, 20, 120, 1]
    assert [one is part for one, part in zip(joined[1:], parts[2:], strict=True)] == [True] * 3, "no copy of one part"
    assert torch.cat(joined).equal(torch.cat(parts))
    assert list(flat._joined([])) == []


def test_shares_are_whole_together_and_come_back_as_the_tensors_they_were() -> None:
    tensors = [torch.randn(33), torch.randn(5, 4).t(), torch.tensor(True), torch.randn(0), torch.arange(9)]
    layout = FlatLayout([Spec.of(tensor) for tensor in tensors])
    flat = torch.zeros(layout.size, dtype=torch.uint8)
    for share in range(4):
        begin, end = layout.share(share, 4)
        layout.copy(tensors, begin, end, flat[begin:end])
    for before, after in zip(tensors, layout.views(flat), strict=True):
        assert torch.equal(before, after)
