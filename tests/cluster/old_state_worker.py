"""A training that takes a while: what the state folder of version 0.1.0 was made with."""

import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from bftrainer import elastic

run = elastic.init()
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
run.register(model=model, optimizer=optimizer)
data = TensorDataset(torch.randn(400, 4), torch.randn(400, 1))
for _ in run.epochs(20):
    for x, y in run.batches(data, global_batch=40):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        time.sleep(0.02)
        run.step(loss=loss)
if run.is_main:
    print(f"trained {run.progress.samples} samples")
