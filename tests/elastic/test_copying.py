"""Copies of a state: into the same memory again, and from a GPU without waiting for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bftrainer.elastic.torch.snapshots.snapshot_copy import Copier
from bftrainer.errors import InputError


def addresses(state: dict[str, Any]) -> set[int]:
    return {value.data_ptr() for value in state.values()}


def test_the_memory_of_the_last_copy_is_used_again_whatever_the_order() -> None:
    copier = Copier()
    first = copier.copy({"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(2, 2).T}).state
    used = addresses(first)
    second = copier.copy({"c": torch.zeros(2, 2).T, "b": torch.full((3,), 2.0), "a": torch.full((3,), 3.0)}).state
    assert addresses(second) == used
    assert [second[name].flatten().tolist() for name in "abc"] == [[3.0] * 3, [2.0] * 3, [0.0] * 4]


def test_memory_that_the_next_state_does_not_need_is_given_back() -> None:
    copier = Copier()
    copier.copy({"a": torch.ones(3), "b": torch.ones(5)})
    copier.copy({"a": torch.ones(3)})
    assert [tensor.shape for kept in copier._kept.values() for tensor in kept] == [(3,)]


def test_a_copy_that_is_refused_half_way_spoils_nothing() -> None:
    copier = Copier()
    copier.copy({"a": torch.ones(3)})
    with pytest.raises(InputError):
        copier.copy({"a": torch.ones(3), "b": print})
    state = copier.copy({"a": torch.full((3,), 4.0), "b": torch.full((3,), 5.0)}).state
    assert (state["a"].tolist(), state["b"].tolist()) == ([4.0] * 3, [5.0] * 3)


def test_tensors_that_are_made_for_the_copy_alone_are_not_taken_for_one_another() -> None:
    """An object may make its state's tensors when asked; the memory of one must not be seen as that of the next."""

    class Lazy(dict[str, Any]):
        def __getitem__(self, name: str) -> torch.Tensor:
            return torch.full((1000,), float(name))

    state = Copier().copy(Lazy({str(number): None for number in range(20)})).state
    assert [value[0].item() for value in state.values()] == list(range(20))


def test_a_copy_from_memory_is_there_at_once() -> None:
    assert Copier().copy({"a": torch.ones(3)}).wait() == 0.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_from_a_gpu_is_of_the_moment_it_was_asked_for_and_lands_in_pinned_memory() -> None:
    copier, used = Copier(), set[int]()
    for number in range(3):
        weights = torch.full((1 << 24,), float(number), device="cuda")
        copy = copier.copy({"w": weights, "tied": weights.detach(), "n": torch.ones(3, device="cuda").half()})
        weights.fill_(-1)
        assert copy.wait() > 0
        assert copy.state["w"].is_pinned()
        assert copy.state["tied"] is copy.state["w"]
        assert torch.equal(copy.state["w"], torch.full((1 << 24,), float(number)))
        used |= {copy.state["w"].data_ptr()}
    assert len(used) == 1
