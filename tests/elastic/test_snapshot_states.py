"""Every optimizer and scheduler that torch has comes back from a snapshot as it was."""

from __future__ import annotations

import collections
import inspect
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from bftrainer.elastic.torch.snapshots import portable
from bftrainer.elastic.torch.snapshots.snapshot import Snapshots
from bftrainer.errors import InputError


def classes(module: Any, kind: type) -> list[type]:
    found = {c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, kind) and c is not kind}
    return sorted((c for c in found if not c.__name__.startswith("_")), key=lambda c: c.__name__)


OPTIMIZERS = classes(torch.optim, Optimizer)
SCHEDULERS = classes(lr_scheduler, LRScheduler)


def same(a: Any, b: Any) -> bool:
    """Equal in value and type all the way down; numpy's scalars equal the plain ones they became."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.generic):
        return bool(type(a.item()) is type(b) and a.item() == b)
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and (a == b).all())
    if isinstance(a, collections.defaultdict) and a.default_factory is not b.default_factory:
        return False
    if isinstance(a, collections.deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def through_a_file(folder: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    portable.check_snapshotable(state)
    Snapshots(folder).take_now(1, state)
    found = Snapshots(folder).latest()
    assert found is not None
    return found.state


def weight() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 6).reshape(3, 2))


def step(optimizer: Optimizer, param: nn.Parameter) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        out = param.square().sum()
        out.backward()  # type: ignore[no-untyped-call]
        return out

    loss()
    if isinstance(optimizer, torch.optim.SparseAdam):
        assert param.grad is not None
        param.grad = param.grad.to_sparse()
    optimizer.step(loss) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()


@pytest.mark.parametrize("rate", [0.1, np.float64(0.1), torch.tensor(0.1)], ids=["float", "numpy", "tensor"])
@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_every_optimizer_comes_back_before_and_after_its_first_step(
    tmp_path: Path, kind: Callable[..., Optimizer], rate: Any
) -> None:
    def make() -> tuple[Optimizer, nn.Parameter]:
        param = weight()
        return kind([param], lr=rate), param

    try:
        optimizer, param = make()
    except ValueError:
        assert isinstance(rate, torch.Tensor), "torch itself refuses some tensors as learning rates, and nothing else"
        return
    for stepped in (False, True):
        if stepped:
            step(optimizer, param)
        state = through_a_file(tmp_path, {"optimizer": optimizer.state_dict()})["optimizer"]
        assert same(optimizer.state_dict(), state)
        other, _ = make()
        other.load_state_dict(state)
        assert same(optimizer.state_dict(), other.state_dict())


VARIANTS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adam, {"foreach": True, "amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": False}),
    (torch.optim.Adam, {"lr": torch.tensor(0.1), "foreach": False}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.Adam, {"betas": (np.float64(0.5), np.float64(0.75)), "weight_decay": np.int64(1)}),
]


@pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=lambda value: getattr(value, "__name__", None))
@pytest.mark.parametrize("capturable", [False, True])
def test_variants_of_optimizers_come_back(
    tmp_path: Path, kind: Any, options: Mapping[str, Any], capturable: bool
) -> None:
    param = weight()
    optimizer = kind([{"params": [param], "name": "all"}], **options)
    step(optimizer, param)
    for group in optimizer.param_groups:
        group["capturable"] = capturable  # its steps need a GPU, its state does not
    assert same(optimizer.state_dict(), through_a_file(tmp_path, {"o": optimizer.state_dict()})["o"])


class Decay:
    """A callable object, whose state LambdaLR saves."""

    def __init__(self) -> None:
        self.base = 0.5
        self.seen = collections.Counter({3: 1})

    def __call__(self, epoch: int) -> float:
        return float(self.base**epoch)


MADE: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, Decay()),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.MultiStepLR(o, [3, 5])], [2]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.MultiStepLR(o, [2]), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=100),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
}


@pytest.mark.parametrize("name", sorted({kind.__name__ for kind in SCHEDULERS} | MADE.keys()))
def test_every_scheduler_comes_back(tmp_path: Path, name: str) -> None:
    def make() -> tuple[LRScheduler, Optimizer]:
        optimizer = torch.optim.SGD([weight()], lr=0.1, momentum=0.9)
        return (MADE[name] if name in MADE else getattr(lr_scheduler, name))(optimizer), optimizer

    def advance(scheduler: LRScheduler, optimizer: Optimizer) -> None:
        optimizer.step()
        takes_loss = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        scheduler.step(np.float32(0.5)) if takes_loss else scheduler.step()

    scheduler, optimizer = make()
    for _ in range(4):
        advance(scheduler, optimizer)
    both = {"scheduler": scheduler.state_dict(), "optimizer": optimizer.state_dict()}
    state = through_a_file(tmp_path, both)
    assert same(both, state)
    other, other_optimizer = make()
    other_optimizer.load_state_dict(state["optimizer"])
    other.load_state_dict(state["scheduler"])
    for _ in range(4):
        advance(scheduler, optimizer)
        advance(other, other_optimizer)
    assert optimizer.param_groups[0]["lr"] == other_optimizer.param_groups[0]["lr"]
    assert same(scheduler.state_dict(), other.state_dict())


def test_averaged_models_and_scalers_come_back(tmp_path: Path) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(nn.BatchNorm1d(2))
    averaged.update_parameters(nn.BatchNorm1d(2))
    scaler = torch.amp.GradScaler("cpu")
    both = {"ema": averaged.state_dict(), "scaler": scaler.state_dict()}
    assert same(both, through_a_file(tmp_path, both))


# Values that torch's safe loader does not know


BEYOND = [
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(None, {1: collections.defaultdict(dict)}),
    collections.deque([1, torch.ones(2), "a"], maxlen=5),
    collections.deque(),
    frozenset({1, "a", frozenset({2})}),
    {frozenset({1}): (2, b""), b"": 3},
    b"",
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(6.0)[::-2],
    np.array(3, dtype=np.uint64),
    np.zeros((0, 2), dtype=np.complex64),
    np.random.RandomState(1).get_state(),
]


@pytest.mark.parametrize("value", BEYOND, ids=lambda value: type(value).__name__)
def test_what_the_safe_loader_does_not_know_comes_back_as_it_was(tmp_path: Path, value: Any) -> None:
    assert same({"value": [value]}, through_a_file(tmp_path, {"value": [value]}))


def test_the_copy_of_an_array_or_a_deque_is_its_own(tmp_path: Path) -> None:
    array, recent = np.ones(3), collections.deque([1])
    fixed = np.ones(2)
    fixed.flags.writeable = False
    copied = portable.portable({"array": array, "recent": recent, "fixed": fixed}, lambda tensor: tensor)
    array[:] = 0
    recent.append(2)
    back = portable.restored(copied)
    assert back["array"].tolist() == [1, 1, 1]
    assert list(back["recent"]) == [1]
    assert back["fixed"].tolist() == [1, 1]


@pytest.mark.parametrize("value", [np.float16(0.5), np.int8(-3), np.bool_(True), np.complex64(1j), np.str_("x")])
def test_scalars_of_numpy_become_plain_values(tmp_path: Path, value: np.generic) -> None:
    back = through_a_file(tmp_path, {"value": value, "keys": {value: 1}})
    assert back == {"value": value.item(), "keys": {value.item(): 1}}
    assert type(back["value"]) is type(value.item())


def test_a_state_is_checked_without_copying_a_tensor() -> None:
    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        calls: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls.append(str(func))
            return func(*args, **(kwargs or {}))

    portable.check_snapshotable({"warm": torch.ones(1)})
    with Counting() as counting:
        portable.check_snapshotable({"model": {"weight": torch.ones(3, requires_grad=True)}})
        with pytest.raises(InputError, match=r"^state\['optimizer'\]\['hook'\] must be .* but got function"):
            portable.check_snapshotable({"model": torch.ones(3), "optimizer": {"hook": lambda: None}})
    assert not [call for call in counting.calls if "copy" in call or "clone" in call]


def test_a_file_with_a_type_of_numpy_would_not_open_without_the_conversion() -> None:
    """The reason for all this: if it ever fails, torch has learnt the type."""
    for value in (np.float64(1), np.ones(2), collections.deque([1]), collections.defaultdict(list), frozenset({1})):
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        with pytest.raises(Exception, match="Unsupported|not an allowed|WeightsUnpickler"):
            torch.load(file, weights_only=True)
