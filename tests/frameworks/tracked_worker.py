"""A training that logs each step to the trackers it is given, and says which process is rank 0.

`tracked_worker.py FOLDER STEPS TRACKER…`: goes slowly until FOLDER/hurry exists.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from bftrainer import elastic

folder, steps, kinds = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
run = elastic.init(snapshot_every_s=0.5)
model = nn.Linear(4, 1)
run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
options = {"wandb": {"project": "tracked", "config": {"lr": 0.01}}, "mlflow": {"params": {"lr": 0.01}}}
trackers = [run.tracker(kind, **options.get(kind, {})) for kind in kinds]
for _ in run.steps(steps):
    x = torch.randn(8, 4)
    loss = (model(x).sum(1) - x.sum(1)).pow(2).mean()
    loss.backward()
    if not (folder / "hurry").exists():
        time.sleep(0.05)
    if run.step(loss=loss, samples=8):
        step = run.progress.step
        for tracker in trackers:
            tracker.log({"loss": loss})
            if step % 10 == 0:
                tracker.log({"tenth": step / 10})
        if run.is_main:
            (folder / f"main-{os.getpid()}").write_text(f"{os.getpid()} {step}")
            (folder / f"main-{os.getpid()}").replace(folder / "main")
for tracker in trackers:
    tracker.finish()
