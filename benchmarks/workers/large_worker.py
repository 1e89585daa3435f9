"""One rank of `benchmarks/rescale.py --state-mb N`: trains a large model for ever and writes down when it commits."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn, optim

from bftrainer import elastic

WIDTH = 1024
folder, megabytes = Path(sys.argv[1]), float(sys.argv[2])
run = elastic.init()
torch.manual_seed(0)
layers = max(1, round(megabytes * 1e6 / (2 * 4 * WIDTH * WIDTH)))  # each number has a momentum of four bytes, too
model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
optimizer = optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
run.register(model=model, optimizer=optimizer)
inputs = torch.randn(8, WIDTH)
with (folder / f"commits-{os.getpid()}").open("a", buffering=1) as log:
    for _ in run.steps(1_000_000):
        loss = model(inputs).square().mean()
        loss.backward()
        if run.step(loss=loss):
            log.write(f"{time.monotonic()} {run.progress.step} {run.world}\n")
