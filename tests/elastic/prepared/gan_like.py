"""Two networks that are trained against each other, each by its own optimizer, the second every other batch."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bftrainer import elastic

folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
data = torch.Generator().manual_seed(1)
real = torch.randn(480, 6, generator=data, dtype=torch.float64) * 0.5 + 1.0
noise = torch.randn(480, 3, generator=data, dtype=torch.float64)
torch.manual_seed(0)
net_d = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).double()
net_g = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6)).double()
optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
loader = DataLoader(TensorDataset(real, noise), batch_size=40, shuffle=True)
net_d, net_g, optimizer_d, optimizer_g, loader = elastic.prepare(net_d, net_g, optimizer_d, optimizer_g, loader)
for _epoch in elastic.epochs(epochs):
    for x, z in loader:
        net_d.zero_grad()
        criterion(net_d(x), torch.ones(len(x), 1, dtype=torch.float64)).backward()
        fake = net_g(z)
        criterion(net_d(fake.detach()), torch.zeros(len(x), 1, dtype=torch.float64)).backward()
        nn.utils.clip_grad_norm_(net_d.parameters(), 0.5)
        optimizer_d.step()
        net_g.zero_grad()
        error_g = criterion(net_d(fake), torch.ones(len(x), 1, dtype=torch.float64))
        error_g.backward()
        nn.utils.clip_grad_value_(net_g.parameters(), 0.5)
        optimizer_g.step()
state = {f"d.{name}": value for name, value in net_d.state_dict().items()}
state |= {f"g.{name}": value for name, value in net_g.state_dict().items()}
torch.save({"model": state}, folder / "model.pt")
