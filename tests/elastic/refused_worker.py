"""A training that all ranks must refuse; each writes down what it is told, and ends when all have been told."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

from bftrainer import elastic

folder, mode, name = Path(sys.argv[1]), sys.argv[2], os.environ["BFTRAINER_WORKER"]


def validate() -> float:
    raise ZeroDivisionError("the validation data are empty")


def learn(run: Any, first: Any, second: Any) -> None:
    for _ in run.epochs(1):
        for (x,) in run.batches(data, global_batch=4):
            (model[0](x).mean() + model[1](x).mean()).backward()
            if mode == "optimizers":
                run.step(optimizer=first if run.is_main else second)
            elif mode == "order":
                run.step(optimizer=first)
                (model[0](x).mean() + model[1](x).mean()).backward()
                run.step(optimizer=[first, second] if run.is_main else second)
            else:
                run.step()
                if mode == "status":
                    raise SystemExit(3)
                run.share(torch.zeros(2**21) if mode == "large" else None)
                run.evaluate(validate)


def shows_late(kind: type[BaseException], error: BaseException, _: object) -> None:
    """A hook of the script's own, such as of an error tracker."""
    time.sleep(0.5)
    print(f"shown late: {kind.__name__}: {error}", file=sys.stderr, flush=True)


if mode == "own-hook":
    sys.excepthook = shows_late
run = elastic.init()
if mode == "own-hook":
    raise ValueError("no data")
if mode == "second-init":
    elastic.init()
data: Any = TensorDataset(torch.ones(8, 2))
if mode == "split":
    data, _ = random_split(TensorDataset(torch.ones(16, 2)), [8, 8])
torch.manual_seed(0)
model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
run.register(model=model, first=optimizers[0], second=optimizers[1])
try:
    learn(run, *optimizers)
except Exception as problem:
    beside = folder / f"{name}.new"
    beside.write_text(f"{type(problem).__name__}: {problem}")
    beside.rename(folder / f"told-rank-{run.rank}")
    deadline = time.monotonic() + 30
    while len(list(folder.glob("told-rank-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)  # the first one that ends has the others killed
    raise
