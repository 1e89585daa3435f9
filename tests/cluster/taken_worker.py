"""A training on CPU that writes down each step that rank 0 commits; the tests take its nodes away."""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from bftrainer import elastic

folder, epochs, pace_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
run = elastic.init(snapshot_every_s=1000.0, device="cpu")
torch.set_num_threads(1)  # sums in the same order wherever it runs
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [50, 90])
run.register(model=model, optimizer=optimizer, scheduler=scheduler)
x = torch.randn(160, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
for _ in run.epochs(epochs):
    for (inputs,) in run.batches(TensorDataset(x), global_batch=8):
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        time.sleep(pace_s)
        loss.backward()
        committed = run.step(loss=loss)
        if committed and run.is_main:
            with (folder / "commits").open("a") as out:
                out.write(f"{run.progress.step}\n")
        time.sleep(pace_s / 10)
        scheduler.step()
if run.is_main:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "final.pt")
