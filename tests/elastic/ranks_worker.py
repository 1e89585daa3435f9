"""A training that writes down the numbers of each rank: `ranks_worker.py FOLDER`. It ends when FOLDER/end exists."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from bftrainer import elastic
from bftrainer.elastic.torch.snapshots.snapshot import Snapshots

folder, worker = Path(sys.argv[1]), os.environ.get("BFTRAINER_WORKER", "alone")
run = elastic.init(snapshots=folder / "snapshots", snapshot_every_s=1000.0)
local_rank = run.local_rank
log = (folder / f"ranks-{worker}-{local_rank}-{os.getpid()}.jsonl").open("a", buffering=1)
take_now = Snapshots.take_now


def noted_take_now(self: Snapshots, step: int, state: object) -> None:
    take_now(self, step, state)  # type: ignore[arg-type]
    note(saved=step)


def note(**more: object) -> None:
    """Write down where this rank is."""
    numbers = {
        "rank": run.rank,
        "world": run.world,
        "local_rank": run.local_rank,
        "local_world": run.local_world,
        "node_rank": run.node_rank,
        "nodes": run.nodes,
    }
    log.write(json.dumps({"worker": worker, "generation": run.generation, **numbers, **more}) + "\n")


Snapshots.take_now = noted_take_now  # type: ignore[method-assign]
note()
torch.manual_seed(os.getpid())
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 1))
run.register(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))
seen, ends = 0, False
for _ in run.epochs(10**6):
    for (inputs,) in run.batches(TensorDataset(x), global_batch=16):
        if run.generation != seen:
            seen = run.generation
            note(step=run.progress.step)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        time.sleep(0.005)
        if run.step(loss=loss):
            note(committed=run.progress.step)
        ends = bool(run.share((folder / "end").exists()))
        if ends:
            break
    if ends:
        break
run.finish()
weights = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
note(weights=hashlib.sha256(weights).hexdigest())
