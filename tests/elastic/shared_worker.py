"""A training whose weights stand still, so that the loss of each sample is known; goes slowly until there are three."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from bftrainer import elastic

folder, name = Path(sys.argv[1]), os.environ["BFTRAINER_WORKER"]
os.environ["BFTRAINER_OUTPUT"] = str(folder / "output")
run = elastic.init()
model, steps = nn.Linear(1, 1, bias=False, dtype=torch.float64), elastic.Value(0)
nn.init.ones_(model.weight)
run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), steps=steps)
data = TensorDataset(torch.arange(600, dtype=torch.float64).unsqueeze(1))
sampler = DistributedSampler(data, num_replicas=run.world, rank=run.rank)
loader = DataLoader(data, batch_size=2, sampler=sampler)
begun, found = None, []
for epoch in run.epochs(2):
    for (x,) in run.batches(loader, global_batch=2):
        begun = run.progress.cursor if begun is None else begun
        if run.world < 3:
            time.sleep(0.1)
        loss = model(x).mean()
        loss.backward()
        if run.step(loss=loss):
            steps.value += 1
    found.append([epoch, run.mean("loss"), steps.value])
saved = run.save("model.pt", model.state_dict())
result = {"begun": begun, "epochs": found, "saved": None if saved is None else str(saved)}
(folder / f"result-{name}.json").write_text(json.dumps(result))
