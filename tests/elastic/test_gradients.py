"""Gradients that a step must not use are refused: one process that trains alone, as a user writes it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from bftrainer import elastic  # noqa: E402
from bftrainer.elastic.torch.gradients.gradients import Gradients  # noqa: E402
from bftrainer.elastic.torch.gradients.optimizers import Stepper  # noqa: E402
from bftrainer.errors import InputError  # noqa: E402

Disturb = Callable[[Any, Any], Any]
DATA = TensorDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)))


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def train(
    before: Disturb = lambda model, optimizer: None,
    after: Disturb = lambda model, optimizer: None,
    max_batch: int | None = None,
) -> nn.Module:
    """Three steps. `before` is called before each backward pass, `after` between it and `run.step`."""
    run = elastic.init(device="cpu")
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.register(model=model, optimizer=optimizer)
    for _ in run.epochs(1):
        for (x,) in run.batches(DATA, batch_size=4, max_batch=max_batch):
            before(model, optimizer)
            model(x).square().mean().backward()
            after(model, optimizer)
            run.step()
    assert run.progress.step == 3
    return model


CHANGED: dict[str, Disturb] = {
    "clipped": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "scaled": lambda model, optimizer: model.weight.grad.mul_(0.5),
    "one of several": lambda model, optimizer: model.bias.grad.add_(1.0),
    "replaced": lambda model, optimizer: setattr(model.weight, "grad", model.weight.grad.clone()),
    "zeroed": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "dropped": lambda model, optimizer: optimizer.zero_grad(),
}


@pytest.mark.parametrize("max_batch", [None, 3])
@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_gradients_changed_between_backward_and_step_are_refused(change: Disturb, max_batch: int | None) -> None:
    with pytest.raises(
        InputError, match=r"changed or cleared between loss.backward\(\) and run.step\(\).*register\(clip_norm=…\)"
    ):
        train(after=change, max_batch=max_batch)


def test_gradients_unscaled_by_the_script_are_refused() -> None:
    run, model = elastic.init(device="cpu"), nn.Linear(3, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    run.register(model=model, optimizer=optimizer, scaler=scaler)
    for _ in run.steps(1):
        scaler.scale(model(torch.ones(2, 3)).mean()).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(InputError, match=r"remove zero_grad\(\) and scaler.unscale_\(\)"):
            run.step()
        break


@pytest.mark.parametrize("set_to_none", [True, False])
def test_clearing_between_two_micro_batches_is_refused(set_to_none: bool) -> None:
    with pytest.raises(InputError, match=r"earlier micro-batches \(`max_batch`\) were cleared: remove zero_grad\(\)"):
        train(before=lambda model, optimizer: optimizer.zero_grad(set_to_none=set_to_none), max_batch=3)


def test_clearing_before_a_whole_batch_does_no_harm() -> None:
    cleared = train(before=lambda model, optimizer: optimizer.zero_grad())
    assert torch.equal(cleared.weight, train().weight)


@pytest.mark.parametrize("max_batch", [None, 3])
def test_a_hook_may_change_gradients_and_a_script_may_read_them(max_batch: int | None) -> None:
    hooked: list[nn.Module] = []

    def halve_once(model: nn.Module, optimizer: object) -> None:
        if not hooked:
            hooked.append(model)
            for param in model.parameters():
                param.register_hook(lambda gradient: gradient * 0.5)

    norms: list[float] = []
    found = train(halve_once, lambda model, optimizer: norms.append(model.weight.grad.norm().item()), max_batch)
    assert not torch.equal(found.weight, train(max_batch=max_batch).weight)
    assert all(norm > 0 for norm in norms)


def test_several_backward_passes_of_each_micro_batch_add_up() -> None:
    def another(model: nn.Module, optimizer: object) -> None:
        model(torch.ones(1, 3)).square().mean().backward()

    whole, parts = train(after=another), train(after=another, max_batch=2)
    assert torch.isfinite(whole.weight).all()
    assert not torch.equal(whole.weight, train().weight)
    assert torch.allclose(parts.weight, whole.weight, atol=1e-6), "two equal micro-batches are the batch"


def test_a_layer_unfrozen_in_the_midst_of_a_batch_is_refused() -> None:
    run, model = elastic.init(device="cpu"), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for number in run.steps(2):
        if number == 1:
            model[0].requires_grad_(True)
        model(torch.ones(1, 3)).mean().backward()
        if number == 0:
            run.step()
            continue
        with pytest.raises(InputError, match="a parameter was unfrozen in the middle of a batch"):
            run.step()
        break


def test_one_step_for_two_losses_of_two_optimizers_is_refused_and_for_their_sum_made() -> None:
    run = elastic.init(device="cpu")
    made, judge = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in (("of_made", made), ("of_judge", judge))
    }
    run.register(made=made, judge=judge, **optimizers)
    for number in run.steps(2):
        x = torch.ones(1, 1)
        if number == 0:
            (judge(made(x)).mean() + judge(x).mean()).backward()
            assert run.step()
            continue
        judge(made(x)).mean().backward()
        judge(x).mean().backward()
        with pytest.raises(InputError, match=r"gradients from 1, 2 backward passes .* run.step\(optimizer=…\)"):
            run.step()
        break


def test_a_rank_that_trains_alone_for_long_looks_at_gradients_again_when_others_come() -> None:
    stepper, model = Stepper(), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper.add([optimizer])
    gradients = Gradients(stepper)
    gradients.follow(riders=0)

    def changes(steps: int) -> None:
        for _ in range(steps):
            gradients.begin(1.0, first=True, send=True)
            model(DATA.tensors[0]).mean().backward()
            optimizer.zero_grad(set_to_none=False)
            gradients.check()

    with pytest.raises(InputError, match="changed or cleared"):
        changes(1)
    for _ in range(200):
        gradients.begin(1.0, first=True, send=True)
    changes(3)
    gradients.group_is(alone=False, check=lambda: None, wait=lambda work: work.wait())
    with pytest.raises(InputError, match="changed or cleared"):
        changes(1)


def test_a_rank_with_two_optimizers_or_micro_batches_looks_at_all_gradients() -> None:
    for optimizers, parts in ((1, 2), (2, 1)):
        stepper, models = Stepper(), [nn.Linear(3, 1) for _ in range(optimizers)]
        stepper.add([torch.optim.SGD(model.parameters(), lr=0.1) for model in models])
        gradients = Gradients(stepper)
        gradients.follow(riders=0)
        for number in range(400):
            gradients.begin(1.0, first=number % parts == 0, send=number % parts == parts - 1)
        models[0](DATA.tensors[0]).mean().backward()
        assert gradients.whole.passes(list(models[0].parameters())) == 1
