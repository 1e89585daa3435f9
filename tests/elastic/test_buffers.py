"""Buffers of trained modules: BatchNorm's are averaged, all others are rank 0's, and a failed step moves none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from bftrainer.elastic.torch.state import buffers as module  # noqa: E402
from bftrainer.elastic.torch.state.buffers import Buffers  # noqa: E402
from bftrainer.errors import InputError  # noqa: E402

CPU = torch.device("cpu")


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("codes", torch.zeros(3, dtype=torch.int16))
        self.register_buffer("mask", torch.ones(2, 2).tril().log(), persistent=False)


def of(model: nn.Module) -> Buffers:
    found = Buffers()
    found.find([model], list(model.parameters()))
    found.commit()
    return found


def test_averages_are_weighted_by_shares_and_counters_are_those_of_rank_0() -> None:
    first, second = Codebook(), Codebook()
    ours, theirs = of(first), of(second)
    first.norm.running_mean.fill_(1.0)
    second.norm.running_mean.fill_(5.0)
    first.norm.num_batches_tracked.fill_(3 * (1 << 24) + 1)  # more than single precision holds
    second.norm.num_batches_tracked.fill_(7)
    sums = (ours.riders(0.75, 0, CPU).float() + theirs.riders(0.25, 1, CPU).float()).double()
    assert len(sums) == ours.size == 6
    for buffers, model in ((ours, first), (theirs, second)):
        buffers.take(sums)
        assert model.norm.running_mean.tolist() == [2.0, 2.0]
        assert model.norm.num_batches_tracked.item() == 3 * (1 << 24) + 1


def test_a_share_of_nothing_adds_nothing_were_it_not_a_number() -> None:
    model = Codebook()
    buffers = of(model)
    model.norm.running_mean.fill_(float("nan"))
    assert buffers.riders(0.0, 1, CPU).abs().sum().item() == 0.0


def test_a_change_is_noticed_however_it_is_made() -> None:
    changes: dict[str, Callable[[Codebook], Any]] = {
        "in place": lambda m: m.codes.add_(1),
        "behind autograd's back": lambda m: m.codes.data.add_(1),
        "by another tensor": lambda m: setattr(m, "codes", torch.ones(3, dtype=torch.int16)),
        "by another shape": lambda m: setattr(m, "codes", torch.ones(5, dtype=torch.int16)),
        "away": lambda m: setattr(m, "codes", None),
    }
    for name, change in changes.items():
        model = Codebook()
        buffers = of(model)
        assert not bool(buffers.changed()), name
        change(model)
        assert bool(buffers.changed()), name
        buffers.commit()
        assert not bool(buffers.changed()), name


class Wire:
    wire = CPU

    def wait(self, work: Any) -> None:
        raise AssertionError("nothing is sent for real")

    def check_whole(self) -> None:
        pass


def test_others_take_the_buffers_of_rank_0_that_changed_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Codebook(), Codebook()
    main, other = (of(model) for model in models)
    models[0].codes.fill_(300)
    models[1].codes.fill_(-7)
    sent: list[Tensor] = []
    monkeypatch.setattr(module, "send", lambda tensor, source, link: sent.append(tensor.clone()))
    tables: list[Tensor] = []
    put = main.fetch(0, Wire(), lambda table: tables.append(table.clone()) or table)  # type: ignore[func-returns-value]
    put()
    assert models[0].codes.tolist() == [300, 300, 300]
    assert [tensor.numel() for tensor in sent] == [6], "the mask has not changed, so it does not travel"
    monkeypatch.setattr(module, "send", lambda tensor, source, link: tensor.copy_(sent[0]))
    put = other.fetch(1, Wire(), lambda table: table + tables[0])
    assert models[1].codes.tolist() == [-7, -7, -7], "nothing is put in place before the step is whole"
    put()
    assert models[1].codes.tolist() == [300, 300, 300]


def test_a_buffer_of_another_shape_than_rank_0_s_is_refused() -> None:
    model = Codebook()
    buffers = of(model)
    model.codes = torch.ones(5, dtype=torch.int16)
    of_rank_0 = torch.tensor([[1.0, 6.0], [0.0, 16.0]], dtype=torch.float64)
    with pytest.raises(InputError, match=r"'codes' of Codebook has 10 bytes on rank 1 and 6 on rank 0"):
        buffers.fetch(1, Wire(), lambda table: table + of_rank_0)


def test_a_failed_step_leaves_all_buffers_as_they_were_committed() -> None:
    model = Codebook()
    buffers = of(model)
    model.norm(torch.randn(4, 2))
    model.codes = torch.ones(9, dtype=torch.int16)
    model.mask = None
    buffers.take_back()
    assert model.norm.running_mean.tolist() == [0.0, 0.0]
    assert model.norm.num_batches_tracked.item() == 0
    assert model.codes.tolist() == [0, 0, 0]
    assert model.mask is not None
    assert not bool(buffers.changed())


def test_a_model_that_is_not_trained_is_left_to_the_script() -> None:
    trained, average = Codebook(), Codebook()
    buffers = Buffers()
    buffers.find([trained, average], list(trained.parameters()))
    buffers.commit()
    average.codes.add_(1)
    assert not bool(buffers.changed())
