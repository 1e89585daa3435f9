"""A classifier with validation, the best checkpoint, early stopping, resuming, accumulation, clipping and AMP."""

import sys
from pathlib import Path
from shutil import copyfile

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

from bftrainer import elastic

folder, epochs, accumulate = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
data = torch.Generator().manual_seed(1)
inputs = torch.randn(610, 20, generator=data, dtype=torch.float64)
labels = (inputs @ torch.randn(20, 3, generator=data, dtype=torch.float64)).argmax(1)
torch.manual_seed(0)


def validate(model, loader):
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(x), y, reduction="sum").item() for x, y in loader]
    return sum(losses) / len(loader.dataset)


def save_checkpoint(state, is_best):
    torch.save(state, folder / "checkpoint.pt")
    if is_best and elastic.is_main():
        copyfile(folder / "checkpoint.pt", folder / "model_best.pt")


model = nn.Sequential(nn.Linear(20, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 3)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu", enabled=accumulate == 1, growth_interval=5)
train_loader = DataLoader(TensorDataset(inputs, labels), batch_size=24, shuffle=True, num_workers=0)
val_loader = DataLoader(TensorDataset(inputs, labels), batch_size=100)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs * -(-len(train_loader) // accumulate))
best = float("inf")
model, optimizer, scheduler, scaler = elastic.prepare(model, optimizer, scheduler, scaler, carry="best")
train_loader = elastic.prepare(train_loader)
for epoch in elastic.epochs(epochs):
    model.train()
    for i, (x, y) in enumerate(train_loader):
        loss = nn.functional.cross_entropy(model(x), y) / accumulate
        scaler.scale(loss).backward()
        if (i + 1) % accumulate == 0 or i + 1 == len(train_loader):
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.7)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
    loss = validate(model, val_loader)
    is_best, best = loss < best, min(loss, best)
    save_checkpoint({"epoch": epoch + 1, "model": model.state_dict(), "best": best}, is_best)
torch.save(
    {"model": model.state_dict(), "lr": optimizer.param_groups[0]["lr"], "best": best, "loss": loss},
    folder / "model.pt",
)
