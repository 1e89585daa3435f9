"""What the rows of the matrix share: the `Row` itself, the data, a small network and the plain training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

EPOCHS = 6
SAMPLES = 192
GLOBAL_BATCH = 24


@dataclass(frozen=True, slots=True)
class Row:
    """One construct and what becomes of it."""

    script: Callable[[], None]
    """The training script, as a user writes it."""
    title: str
    """The construct as the page names it, in Markdown."""
    expect: Literal["right", "refused"] = "right"
    says: str = ""
    """Words that a refusal must contain."""
    remark: str = ""
    """For the page: what to know where it is right, how to write it where it is refused."""
    exact: bool = True
    """Whether the weights must be those of an undisturbed training on one rank, up to rounding."""
    samples: tuple[int, ...] = (SAMPLES,) * EPOCHS
    """Length of the data by epoch: each sample must count once."""
    of: str = ""
    """The optimizer in whose steps samples are counted, where there are several."""

    @property
    def name(self) -> str:
        return self.script.__name__


ROWS: list[Row] = []


def row(title: str, expect: Literal["right", "refused"] = "right", **more: Any) -> Callable[[Any], Any]:
    """Put a script into the matrix."""

    def add(script: Callable[[], None]) -> Callable[[], None]:
        ROWS.append(Row(script, title, expect, **more))
        return script

    return add


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def dataset(length: int = SAMPLES) -> TensorDataset:
    """The same samples everywhere, in double precision."""
    x = torch.randn(SAMPLES, 8, generator=_generator(), dtype=torch.float64)
    return TensorDataset(x[:length], torch.tanh(x[:length].sum(1, keepdim=True)))


DATA = dataset()


def fill(module: nn.Module) -> None:
    """Give a module the same weights in every process."""
    generator = _generator()
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) / 4)


def net(*middle: nn.Module) -> nn.Sequential:
    """A small network in double precision, with some layers of the row's own."""
    model = nn.Sequential(nn.Linear(8, 16), *middle, nn.Tanh(), nn.Linear(16, 1)).double()
    fill(model)
    return model


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


mse = nn.functional.mse_loss


def validation_loss(model: nn.Module) -> float:
    x, y = DATA.tensors
    with torch.no_grad():
        return mse(model(x), y).item()


def train(run: Any, model: Callable[[Tensor], Tensor], after_step: Callable[[], None] | None = None) -> None:
    """The plain loop."""
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            loss = mse(model(x), y)
            loss.backward()
            if run.step(loss=loss) and after_step is not None:
                after_step()
