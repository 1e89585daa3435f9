"""Memory of a flow: it is there before the steps that need it, and a newcomer copies nothing onto itself."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.optim import SGD  # noqa: E402

from bftrainer.elastic.torch.follow import donor, memory, newcomer  # noqa: E402
from bftrainer.elastic.torch.state.transfer import Registry  # noqa: E402
from support.elastic.following import Rank, begun, training  # noqa: E402
from support.waiting import wait_until  # noqa: E402


def sgd(model: Any) -> list[Any]:
    return [SGD(model.parameters(), lr=0.01, momentum=0.9)]


class Noting(nn.Linear):
    """A layer that notes whether it is given its own weight to load."""

    own = False

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.own = state_dict[f"{prefix}weight"] is self.weight
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_newcomer_makes_the_memory_of_its_steps_before_the_state_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def make_room(size: int, *, pinned: bool) -> Any:
        sizes.append(size)
        return memory.make_room(size, pinned=pinned)

    monkeypatch.setattr(newcomer, "make_room", make_room)
    donors, joins = [Rank(sgd) for _ in range(2)], Rank(sgd, seed=1)
    following = begun(joins, donors)
    with training(donors):
        following.begin(margin=100)
        seen = following.repeated
        wait_until(lambda: following.repeated > seen + 5 or following.problem)
    assert not following.problem
    assert len(sizes) == 1  # that of the state: steps have theirs
    assert following.kept is not None
    following.stop("the test is over")
    for one in donors:
        one.flows.close()


def test_the_memory_for_gradients_of_optimizers_of_different_sizes_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def two(model: Any) -> list[Any]:
        return [SGD(model[0].parameters(), lr=0.01), SGD([*model[2].parameters(), *model[4].parameters()], lr=0.01)]

    made_late: list[int] = []

    def make_room(size: int, *, pinned: bool) -> Any:
        made_late.append(size)
        return memory.make_room(size, pinned=pinned)

    monkeypatch.setattr(donor, "make_room", make_room)
    one, joins = Rank(two, width=512), Rank(two, seed=1, width=512)
    following = begun(joins, [one])
    with training([one]):
        following.begin(margin=100)
        seen = following.repeated
        wait_until(lambda: following.repeated > seen + 20 or following.problem)
    assert not following.problem
    (flow,) = one.flows._flows
    wait_until(lambda: not flow._queued, "the end of the queue")
    # Steps may come faster than they are sent. What is made then is kept for later steps.
    assert len(made_late) < len(flow._free)
    following.stop("the test is over")
    one.flows.close()


def test_memory_that_is_made_ready_is_kept_only_where_the_heap_has_it() -> None:
    assert memory.make_heap_ready([]) is None
    assert memory.make_heap_ready([0, 1 << 30]) is None
    kept = memory.make_heap_ready([1 << 20, 1 << 10, 1 << 30])
    assert kept is not None
    assert 1 << 20 <= kept.nbytes <= (1 << 20) + 8
    assert torch.equal(memory.make_ready_room(5, pinned=False), torch.zeros(5, dtype=torch.uint8))


def test_a_module_is_given_its_own_parameters_where_a_state_holds_them_and_all_others_are_copied() -> None:
    registry, model = Registry(), nn.Sequential(Noting(4, 4), nn.BatchNorm1d(4))
    registry.add({"model": model})
    state = registry.capture()
    bias, mean = torch.randn(4), torch.randn(4)
    before = model[0].weight.detach().clone()
    state["model"]["0.bias"], state["model"]["1.running_mean"] = bias, mean
    registry.load(state)
    assert model[0].own
    assert torch.equal(model[0].weight, before)
    assert torch.equal(model[0].bias, bias)
    assert torch.equal(model[1].running_mean, mean)
    assert state["model"]["0.weight"] is not model[0].weight  # what was given to load is not changed
    state["model"]["0.weight"] = torch.ones(4, 4)
    registry.load(state)
    assert not model[0].own
    assert torch.equal(model[0].weight, torch.ones(4, 4))
