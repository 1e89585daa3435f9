"""A script that looks at a batch before it trains, and counts its epochs by `range`; `looks.py FOLDER EPOCHS`."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bftrainer import elastic

folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=12, shuffle=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = elastic.prepare(model, optimizer, loader)
inputs, _ = next(iter(loader))
print("a batch has the shape", tuple(inputs.shape))
for _epoch in range(epochs):
    for inputs, targets in loader:
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
torch.save({"model": model.state_dict()}, folder / "model.pt")
