"""One rank of the elastic side of `benchmarks/rescale.py`: trains for ever and writes down when it commits."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch.nn.functional as F  # noqa: N812 - what everybody calls it
from torch import optim

from bftrainer import elastic
from cnn import make_data, make_model

folder = Path(sys.argv[1])
run = elastic.init()
model = make_model()
optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
run.register(model=model, optimizer=optimizer)
data = make_data()
with (folder / f"commits-{os.getpid()}").open("a", buffering=1) as log:
    for _ in run.epochs(1_000_000):
        for x, y in run.batches(data, batch_size=32):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if run.step(loss=loss):
                log.write(f"{time.monotonic()} {run.progress.step} {run.world}\n")
