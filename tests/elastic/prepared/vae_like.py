"""An autoencoder with random latents in the shape of the well-known example: a loss of two terms, a mean per epoch."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bftrainer import elastic

folder, epochs, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
data = torch.Generator().manual_seed(1)
images = torch.sigmoid(torch.randn(400, 8, generator=data) @ torch.randn(8, 30, generator=data))
torch.manual_seed(seed)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(30, 24)
        self.mean, self.spread = nn.Linear(24, 4), nn.Linear(24, 4)
        self.decode = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 30), nn.Sigmoid())

    def forward(self, x):
        hidden = torch.relu(self.hidden(x))
        mean, log_variance = self.mean(hidden), self.spread(hidden)
        latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decode(latent), mean, log_variance


def loss_function(output, x, mean, log_variance):
    entropy = nn.functional.binary_cross_entropy(output, x, reduction="none").sum(1).mean()
    divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1).mean()
    return entropy + divergence


model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(images), batch_size=40, shuffle=True)
model, optimizer, loader = elastic.prepare(model, optimizer, loader)
for _ in range(epochs):
    model.train()
    for (x,) in loader:
        optimizer.zero_grad()
        loss = loss_function(*((out := model(x))[0], x, *out[1:]))
        loss.backward()
        optimizer.step()
model.eval()
torch.manual_seed(5)
with torch.no_grad():
    output, mean, log_variance = model(images)
    final = loss_function(output, images, mean, log_variance).item()
print(f"loss {final:.6f}")
torch.save({"loss": final}, folder / "model.pt")
