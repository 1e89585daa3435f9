"""A small model and a fixed global batch, for runs whose speed is set by BFTRAINER_PACE."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from bftrainer import elastic

epochs, samples, batch = map(int, sys.argv[1:4])
run = elastic.init()
torch.manual_seed(0)
x = torch.randn(samples, 20)
model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
run.register(model=model, optimizer=optimizer)
for _ in run.epochs(epochs):
    for inputs, targets in run.batches(TensorDataset(x, x[:, :3]), global_batch=batch):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        run.step(loss=loss)
