"""What `run.register` takes, what it refuses, and that several calls add up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from bftrainer import elastic  # noqa: E402
from bftrainer.errors import InputError  # noqa: E402

MODEL = nn.Linear(2, 2)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Closure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


def sgd(model: nn.Module = MODEL) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({}, r"run.register\(\) was given nothing; .* run.register\(model=model, optimizer=optimizer\)"),
        ({"model": nn.Linear}, "`model` must be an object, but got the class Linear; give an instance, Linear"),
        ({"model": list(MODEL.parameters())}, "but got list; register the module that has these parameters"),
        ({"model": MODEL.parameters()}, "but got generator; register the module that has these parameters"),
        ({"weight": MODEL.weight}, "but got Parameter; make it a parameter or buffer of a registered module"),
        (
            {"best": 0.0},
            r"but got float; for a value of the script write best = elastic.Value\(0.0\), .* use best.value",
        ),
        ({"clipnorm": 1.0}, "but got float; did you mean the option `clip_norm`?"),
        ({"thing": object()}, "but got object; wrap it in a small class that has them"),
        ({"optimizer": torch.optim.LBFGS(MODEL.parameters())}, "`optimizer` is LBFGS, whose step.. needs a closure"),
        ({"optimizer": Closure(MODEL.parameters())}, "`optimizer` is Closure, whose step.. needs a closure"),
        ({"a": sgd(), "b": sgd()}, r"the optimizers `a` and `b` share a parameter of shape \(2, 2\)"),
        ({"a": MODEL, "b": MODEL}, "`b` is the object registered as `a`; register it once"),
        (
            {"a": torch.amp.GradScaler("cpu"), "b": torch.amp.GradScaler("cpu")},
            "one GradScaler must be registered for all optimizers, but got a and b",
        ),
        ({"model": MODEL, "clip_norm": "1"}, "`clip_norm` must be a number above 0, but got '1'"),
        ({"model": MODEL, "lr_warmup_steps": -1}, "`lr_warmup_steps` must be a whole number, 0 or more, but got -1"),
        ({"model": MODEL, "lr_base_batch": 0}, "`lr_base_batch` must be a whole number, 1 or more, but got 0"),
    ],
)
def test_register_refuses(objects: dict[str, Any], message: str) -> None:
    run = elastic.init()
    with pytest.raises(InputError, match=message):
        run.register(**objects)
    run.register(model=MODEL, optimizer=sgd())  # nothing is left of the call that was refused


def test_objects_without_names_are_refused() -> None:
    with pytest.raises(InputError, match=r"needs a name for each object: run.register\(model=model"):
        elastic.init().register(MODEL, sgd())


def test_a_wrapped_model_is_refused_wherever_the_wrapper_is(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        sharded = fully_shard(nn.Linear(2, 2), mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        for wrapped, kind in (
            (DistributedDataParallel(nn.Linear(2, 2)), "DistributedDataParallel"),
            (sharded, "FSDPModule"),
        ):
            for model in (wrapped, nn.Sequential(wrapped)):
                with pytest.raises(InputError, match=rf"`model` is wrapped in {kind}; do not wrap .*model.module"):
                    elastic.init().register(model=model)
    finally:
        torch.distributed.destroy_process_group()


def test_reduce_on_plateau_is_refused_with_automatic_stepping_only() -> None:
    optimizer = sgd()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(
        InputError, match=r"`scheduler` is ReduceLROnPlateau, .* call scheduler.step\(run.mean\('loss'\)"
    ):
        elastic.init().register(model=MODEL, optimizer=optimizer, scheduler=scheduler, scheduler_every="epoch")
    elastic.init().register(model=MODEL, optimizer=optimizer, scheduler=scheduler)


def test_several_calls_add_up() -> None:
    run, model = elastic.init(), nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run.register(model=model, clip_norm=0.25)
    run.register(optimizer=optimizer)
    run.register(optimizer=optimizer, model=model)  # the same again: it steps once all the same
    with pytest.raises(InputError, match=r"`clip_norm` was registered as 0.25 before, but now got 0.5"):
        run.register(clip_norm=0.5)
    for _ in run.steps(1):
        model(torch.ones(1, 1)).mean().backward()
        run.step()
    assert model.weight.item() == pytest.approx(0.75, abs=1e-5)


def test_an_optimizer_of_parameters_in_no_module_trains_them() -> None:
    run, weight = elastic.init(), nn.Parameter(torch.ones(1))
    run.register(optimizer=torch.optim.SGD([weight], lr=0.5))
    for _ in run.steps(1):
        weight.sum().backward()
        run.step()
    assert weight.item() == 0.5


def test_a_compiled_model_trains_and_resumes(tmp_path: Path) -> None:
    data = TensorDataset(torch.ones(8, 2))

    def train(epochs: int) -> dict[str, Any]:
        run = elastic.init(snapshots=tmp_path, device="cpu")
        torch.manual_seed(0)
        model = torch.compile(nn.Linear(2, 1), backend="eager")
        run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs(epochs):
            for (x,) in run.batches(data, batch_size=4):
                loss = run.model(x).square().mean()
                loss.backward()
                run.step(loss=loss)
        assert run.progress.step == 2 * epochs
        return dict(model.state_dict())

    first = train(1)
    assert set(first) == {"_orig_mod.weight", "_orig_mod.bias"}
    kept = {name: value.clone() for name, value in first.items()}
    again = train(1)  # complete already: only what the snapshot has
    assert all(torch.equal(again[name], kept[name]) for name in kept)
    assert not torch.equal(train(2)["_orig_mod.weight"], kept["_orig_mod.weight"])


def test_a_scheduler_that_newcomers_would_not_receive_is_refused() -> None:
    from torch.optim import lr_scheduler

    from bftrainer.elastic.torch.refusals import refuse_unknown_schedulers

    class Warmup:
        """A scheduler of the script's own, around one of torch."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

    optimizer, other = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    refuse_unknown_schedulers([optimizer], [optimizer], "elastic.prepare()")
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    composed = lr_scheduler.SequentialLR(optimizer, parts, [1])
    for known in (composed, Warmup(composed)):
        refuse_unknown_schedulers([optimizer, known], [optimizer], "elastic.prepare()")
    refuse_unknown_schedulers([other], [other], "elastic.prepare()")
    with pytest.raises(InputError, match=r"LR was not given to elastic.prepare\(\): a node that joins later"):
        refuse_unknown_schedulers([optimizer], [optimizer], "elastic.prepare()")
    plateau = lr_scheduler.ReduceLROnPlateau(other)
    with pytest.raises(InputError, match=r"the ReduceLROnPlateau was not given to run.register\(\)"):
        refuse_unknown_schedulers([other], [other], "run.register()")
    del plateau
    refuse_unknown_schedulers([other], [other], "run.register()")


def test_a_prepared_script_is_told_of_prepare_and_reports_all_its_epochs() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)
    run = elastic.init(device="cpu")
    with pytest.raises(InputError, match=r"elastic.prepare\(\) must be given at least one optimizer"):
        next(iter(run.prepare(model, loader)[1]))
    run = elastic.init(device="cpu")
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for _ in range(2):
        for (x,) in loader:
            model(x).mean().backward()
            optimizer.step()
    assert run._reports.report().epoch == 2
