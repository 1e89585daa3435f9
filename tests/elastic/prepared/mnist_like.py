"""A classifier in the shape of the well-known first example: epochs, a schedule per epoch, a test after each.

It reads and changes its gradients itself.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bftrainer import elastic

folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
data = torch.Generator().manual_seed(1)
inputs = torch.randn(600, 20, generator=data, dtype=torch.float64)
labels = (inputs @ torch.randn(20, 3, generator=data, dtype=torch.float64)).argmax(1)
torch.manual_seed(0)


def train(model, loader, optimizer, epoch):
    model.train()
    for number, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        output = model(data)
        loss = nn.functional.cross_entropy(output, target)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        largest = max(param.grad.abs().max().item() for param in model.parameters())
        for param in model.parameters():
            param.grad *= 0.9
        optimizer.step()
        if number % 5 == 0:
            print(f"epoch {epoch} [{number}/{len(loader)}] loss {loss.item():.6f} gradient {largest:.3f}")


def test(model, loader):
    model.eval()
    total, correct = 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            total += nn.functional.cross_entropy(output, target, reduction="sum").item()
            correct += (output.argmax(1) == target).sum().item()
    print(f"test loss {total / len(loader.dataset):.12f} accuracy {correct / len(loader.dataset):.3f}")
    return total / len(loader.dataset)


def main():
    dataset = TensorDataset(inputs, labels)
    train_loader = DataLoader(dataset, batch_size=48, shuffle=True)
    test_loader = DataLoader(dataset, batch_size=100)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 3)).double()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
    model, optimizer, train_loader, scheduler = elastic.prepare(model, optimizer, train_loader, scheduler)
    for epoch in range(1, epochs + 1):
        train(model, train_loader, optimizer, epoch)
        loss = test(model, test_loader)
        scheduler.step()
    torch.save({"model": model.state_dict(), "lr": optimizer.param_groups[0]["lr"], "loss": loss}, folder / "model.pt")


main()
