"""State that no state_dict() holds: what is trained, groups that were added later, buffers that are not saved."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from bftrainer.elastic.torch.state.hidden_state import HiddenState  # noqa: E402
from bftrainer.errors import BFTrainerError  # noqa: E402


def parts() -> tuple[nn.Sequential, torch.optim.SGD, HiddenState]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    hidden = HiddenState()
    hidden.add({"model": model, "optimizer": optimizer})
    return model, optimizer, hidden


def handed(sender: tuple[Any, Any, HiddenState], receiver: tuple[Any, Any, HiddenState]) -> None:
    state = sender[2].capture()
    receiver[2].prepare(state)
    receiver[1].load_state_dict(sender[1].state_dict())
    receiver[2].load(state)


def test_a_newcomer_trains_the_layers_that_the_others_train() -> None:
    ours, theirs = parts(), parts()
    ours[0][1].bias.requires_grad_(False)
    handed(ours, theirs)
    assert [p.requires_grad for p in theirs[0][1].parameters()] == [True, False]


def test_a_newcomer_gets_the_groups_that_were_added_and_may_add_them_once_more() -> None:
    ours, theirs = parts(), parts()
    ours[1].add_param_group({"params": list(ours[0][0].parameters()), "lr": 0.01})
    handed(ours, theirs)
    assert [group["lr"] for group in theirs[1].param_groups] == [0.1, 0.01]
    assert [id(p) for p in theirs[1].param_groups[1]["params"]] == [id(p) for p in theirs[0][0].parameters()]
    theirs[1].add_param_group({"params": theirs[0][0].parameters(), "lr": 0.01})  # its script's own line, run late
    assert len(theirs[1].param_groups) == 2
    with pytest.raises(ValueError, match="more than one parameter group"):
        theirs[1].add_param_group({"params": theirs[0][0].parameters()})


def test_a_group_of_parameters_that_nobody_registered_cannot_be_found_and_is_refused() -> None:
    ours, theirs = parts(), parts()
    ours[1].add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(BFTrainerError, match="belong to no registered module; register that module too"):
        handed(ours, theirs)


def test_parameters_of_no_registered_module_are_handed_over_too() -> None:
    ours, theirs = (nn.Parameter(torch.full((2,), value)) for value in (1.0, 2.0))
    senders = []
    for param in (ours, theirs):
        hidden = HiddenState()
        optimizer = torch.optim.SGD([param], lr=0.1)
        hidden.add({"optimizer": optimizer})
        senders.append((None, optimizer, hidden))
    handed(senders[0], senders[1])
    assert theirs.tolist() == [1.0, 1.0]


def test_buffers_that_a_module_does_not_save_are_handed_over_too() -> None:
    models = []
    for value in (1.0, 2.0):
        model = nn.Linear(1, 1)
        model.register_buffer("frequencies", torch.full((2,), value), persistent=False)
        hidden = HiddenState()
        hidden.add({"model": model})
        models.append((model, hidden))
    models[1][1].load(models[0][1].capture())
    assert models[1][0].frequencies.tolist() == [1.0, 1.0]


def test_a_state_of_version_0_1_0_has_none_of_it_and_is_taken_up() -> None:
    model, optimizer, hidden = parts()
    hidden.prepare({})
    hidden.load({})
    assert len(optimizer.param_groups) == 1
    assert all(p.requires_grad for p in model.parameters())
