"""One rank of `benchmarks/rescale.py --framework prepare`: a plain loop that trains for ever and notes its commits."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch.nn.functional as F  # noqa: N812 - what everybody calls it
from torch import optim
from torch.utils.data import DataLoader

from bftrainer import elastic
from cnn import make_data, make_model

folder = Path(sys.argv[1])
run = elastic.init()
model = make_model()
optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loader = DataLoader(make_data(), batch_size=32, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader, per_rank_batch=True)
with (folder / f"commits-{os.getpid()}").open("a", buffering=1) as log:
    for _ in elastic.epochs(1_000_000):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            before = run.progress.step
            optimizer.step()
            if run.progress.step != before:
                log.write(f"{time.monotonic()} {run.progress.step} {run.world}\n")
