"""One rank of `benchmarks/gpu.py`: a torchvision model on synthetic images that are on the device already.

gpu_worker.py FOLDER MODEL BATCH train          trains for ever, writes down when it commits
gpu_worker.py FOLDER MODEL BATCH compare STEPS  blocks of elastic training and of DistributedDataParallel in turns
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

from bftrainer import elastic

folder, name, batch, mode = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
run = elastic.init()
device, cuda = run.device, run.device.type == "cuda"


def make_model() -> nn.Module:
    """A fresh model on the device."""
    torch.manual_seed(0)
    if name == "cnn":
        from cnn import make_model as make_cnn

        return make_cnn().to(device)
    import torchvision

    return torchvision.models.get_model(name, weights=None).to(device)


def forward(model: nn.Module) -> Tensor:
    """The loss of a batch."""
    return F.cross_entropy(model(images), labels)


def settle() -> None:
    """Wait for the device."""
    if cuda:
        torch.cuda.synchronize()


model = make_model()
optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
run.register(model=model, optimizer=optimizer)
shape = (batch, 1, 28, 28) if name == "cnn" else (batch, 3, 224, 224)
images = torch.randn(shape, device=device)
labels = torch.randint(0, 10, (batch,), device=device)
forward(model).backward()  # a newcomer's first steps, with all they compile and tune, happen before it joins
optimizer.zero_grad()
settle()
if mode == "train":
    with (folder / f"commits-{os.getpid()}").open("a", buffering=1) as log:
        for _ in run.steps(1_000_000_000):
            loss = forward(model)
            loss.backward()
            if run.step(samples=batch, loss=loss):
                log.write(f"{time.monotonic()} {run.progress.step} {run.world}\n")
    sys.exit()
block, blocks = 20, int(sys.argv[5]) // 20
plain = optimizer_of_plain = None
rates: dict[str, list[float]] = {"elastic": [], "ddp": []}
began = time.perf_counter()
for number in run.steps(blocks * block):
    if plain is None:
        plain = DistributedDataParallel(make_model())
        optimizer_of_plain = optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    if number % block == 0:
        settle()
        began = time.perf_counter()
    loss = forward(model)
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
        rates["ddp"].append(block * batch * run.world / (time.perf_counter() - began))
if run.is_main:  # the first of each warms up
    (folder / "rates.json").write_text(json.dumps({side: found[1:] for side, found in rates.items()}))
