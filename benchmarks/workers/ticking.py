"""A small model that trains until it is told to stop and writes down when each step was committed, and on how many."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from bftrainer import elastic

os.nice(5)  # all virtual nodes share a few cores: agents, which must go at once when told to, come first
run = elastic.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.register(model=model, optimizer=optimizer)
log = Path(sys.argv[1], f"{os.environ.get('BFTRAINER_WORKER', 'alone')}.jsonl").open("a", buffering=1)  # noqa: SIM115 - until the end
for _ in run.steps(10**9):
    loss = nn.functional.cross_entropy(model(torch.randn(16, 64)), torch.randint(10, (16,)))
    loss.backward()
    if run.step(samples=16, loss=loss):
        row = {
            "at": time.time(),
            "world": run.world,
            "generation": run.generation,
            "node": os.environ["BFTRAINER_NODE"],
        }
        log.write(json.dumps(row) + "\n")
    time.sleep(0.01)
