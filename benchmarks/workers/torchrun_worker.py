"""One rank of the TorchElastic side of `benchmarks/rescale.py`: a plain script that saves each step and resumes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - what everybody calls it
from torch import optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from cnn import make_data, make_model

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(make_model())
optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
step, saved = 0, folder / "checkpoint.pt"
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
data = make_data()
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data, world, rank))
with (folder / f"commits-{os.getpid()}").open("a", buffering=1) as log:
    while True:
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if rank == 0:
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{saved}.new"
                )
                Path(f"{saved}.new").rename(saved)
                log.write(f"{time.monotonic()} {step} {world}\n")
