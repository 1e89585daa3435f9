"""One rank of TorchElastic in `benchmarks/rescale.py --against torchrun`: saves now and then, and resumes.

`sized_torchrun_worker.py FOLDER MEGABYTES SAVE_EVERY_S`. Steps that were made after the last save are made again after
a change.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sized import make_sized

folder, megabytes, save_every_s = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
inner, optimizer, inputs = make_sized(megabytes)
model = DistributedDataParallel(inner)
step, saved, saved_at = 0, folder / "checkpoint.pt", time.monotonic()
if saved.exists():
    state = torch.load(saved)
    inner.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
with (folder / f"commits-{os.getpid()}").open("a", buffering=1) as log:
    while True:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            if time.monotonic() - saved_at >= save_every_s:
                state = {"model": inner.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, f"{saved}.new")
                Path(f"{saved}.new").rename(saved)
                saved_at = time.monotonic()
            log.write(f"{time.monotonic()} {step} {world}\n")
