"""One rank of `benchmarks/gpu.py`: a model on synthetic data that are on the device already.

MODEL is a name of torchvision's, cnn, gpt2, gpt2-medium or gpt2-tiny. Those of GPT-2 compute in bfloat16.

gpu_worker.py FOLDER MODEL BATCH train           trains for ever, writes down when it commits
gpu_worker.py FOLDER MODEL BATCH compare STEPS   blocks of elastic training and of DistributedDataParallel in turns
gpu_worker.py FOLDER MODEL BATCH compiled STEPS  the same with compiled models, and a plain loop on the other side
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - what everybody calls it
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

import rig  # noqa: F401 - sets NCCL up for one GPU
from bftrainer import elastic
from gpt2 import GPT2, GPT2_MEDIUM, TINY, Gpt2, make_tokens


class Plain(DistributedDataParallel):
    """torch's own, taken before `elastic.init` has it refused."""

    __init__ = DistributedDataParallel.__init__


folder, name, batch, mode = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
run = elastic.init()
device, cuda = run.device, run.device.type == "cuda"
sizes = {"gpt2": GPT2, "gpt2-medium": GPT2_MEDIUM, "gpt2-tiny": TINY}


def make_model() -> nn.Module:
    """A fresh model on the device."""
    torch.manual_seed(0)
    if name == "cnn":
        from cnn import make_model as make_cnn

        return make_cnn().to(device)
    if name in sizes:
        with device:  # initialised there: a CPU takes seconds for it
            return Gpt2(sizes[name])
    import torchvision

    return torchvision.models.get_model(name, weights=None).to(device)


def make_optimizer(model: nn.Module) -> optim.Optimizer:
    """The usual one for the model."""
    if name in sizes:
        return optim.AdamW(model.parameters(), lr=1e-4)
    return optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def forward(model: nn.Module) -> Tensor:
    """The loss of a batch."""
    if name not in sizes:
        return F.cross_entropy(model(inputs), labels)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        return model(inputs)


def settle() -> None:
    """Wait for the device."""
    if cuda:
        torch.cuda.synchronize()


model = make_model()
optimizer = make_optimizer(model)
run.register(model=model, optimizer=optimizer)
if name in sizes:
    inputs = make_tokens(sizes[name], batch).to(device)
else:
    inputs = torch.randn((batch, 1, 28, 28) if name == "cnn" else (batch, 3, 224, 224), device=device)
labels = torch.randint(0, 10, (batch,), device=device)
trained = torch.compile(model) if mode == "compiled" else model
forward(trained).backward()  # a newcomer's first steps, with all they compile and tune, happen before it joins
optimizer.zero_grad()
settle()
if mode == "train":
    with (folder / f"commits-{os.getpid()}").open("a", buffering=1) as log:
        for _ in run.steps(1_000_000_000):
            loss = forward(trained)
            loss.backward()
            if run.step(samples=batch, loss=loss):
                log.write(f"{time.monotonic()} {run.progress.step} {run.world}\n")
    sys.exit()
block, blocks = 20, int(sys.argv[5]) // 20
plain = optimizer_of_plain = None
rates: dict[str, list[float]] = {"elastic": [], "other": []}
began = time.perf_counter()
for number in run.steps(blocks * block):
    if plain is None:
        plain = torch.compile(make_model()) if mode == "compiled" else Plain(make_model())
        optimizer_of_plain = make_optimizer(plain)
    if number % block == 0:
        settle()
        began = time.perf_counter()
    loss = forward(trained)
    loss.backward()
    run.step(samples=batch, loss=loss)
    if number % block == block - 1:
        settle()
        rates["elastic"].append(block * batch * run.world / (time.perf_counter() - began))
        began = time.perf_counter()
        for _ in range(block):
            loss = forward(plain)
            loss.backward()
            optimizer_of_plain.step()
            optimizer_of_plain.zero_grad(set_to_none=True)
        settle()
        rates["other"].append(block * batch * run.world / (time.perf_counter() - began))
if run.is_main:  # the first of each warms up
    (folder / "rates.json").write_text(json.dumps({side: found[1:] for side, found in rates.items()}))
