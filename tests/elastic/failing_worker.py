"""A training that goes on until it is told to end, and fails in the ways the tests ask for."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from bftrainer import elastic

folder, mode = Path(sys.argv[1]), sys.argv[2]
run = elastic.init(snapshots=folder / "snapshots", snapshot_every_s=0.5)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
run.register(model=model, optimizer=optimizer)
generation = 0
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
if mode == "slow-start" and os.environ["BFTRAINER_WORKER"] == "node-3":
    while not (folder / "go-on").exists():
        time.sleep(0.01)
log = (folder / f"times-{os.environ['BFTRAINER_WORKER']}-{os.getpid()}").open("a", buffering=1)
for _ in run.epochs(1_000_000):
    if run.share((folder / "end").exists()):
        break
    for x, y in run.batches(dataset, batch_size=4):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if (folder / "fail").exists() and run.rank == run.world - 1:
            if mode == "raise":
                raise ZeroDivisionError("the bug of the last rank")
            if mode == "exit":
                sys.exit(3)
            if mode == "exit-well":
                sys.exit()
            if mode == "abort":
                os.abort()
        time.sleep(0.01)
        if mode == "own-collective":
            dist.all_reduce(torch.ones(1))
        if mode == "own-group" and generation != run.generation:
            generation = run.generation
            group = dist.new_group([0])
            total = torch.tensor([float(run.rank)])
            if run.rank == 0:
                dist.all_reduce(total, group=group)
                assert total.item() == 0
                assert dist.get_world_size(group) == 1
        if run.step(loss=loss):
            log.write(f"{run.progress.step} {time.monotonic()}\n")
