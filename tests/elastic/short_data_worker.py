"""A training whose second node sees fewer samples than the first, as through a stale mount."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from bftrainer import elastic

folder = Path(sys.argv[1])
run = elastic.init()
model = nn.Linear(2, 1)
run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
samples = 64 if os.environ["BFTRAINER_WORKER"] == "node-1" else 60
for _ in run.epochs(1_000_000):
    for (x,) in run.batches(TensorDataset(torch.ones(samples, 2)), global_batch=16):
        model(x).pow(2).mean().backward()
        run.step()
        time.sleep(0.01)
    if run.share((folder / "end").exists()):
        break
run.finish()
(folder / "final").write_text(str(samples))
