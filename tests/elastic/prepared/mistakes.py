"""A loop with a mistake that would train wrongly if nobody noticed it: `mistakes.py MISTAKE`."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from bftrainer import elastic

mistake = sys.argv[1]
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(x, x.sum(1, keepdim=True))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(dataset)


loader = DataLoader(Stream() if mistake == "stream" else dataset, batch_size=8)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", enabled=mistake == "scaler")
if mistake == "scheduler":
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
given = [model, optimizer, 3 if mistake == "number" else loader]
model, optimizer, loader = elastic.prepare(*given, accumulate=3 if mistake == "declared" else None)
if mistake == "twice":
    elastic.prepare(loader)
for _epoch in range(2):
    batches = iter(loader)
    ahead = next(batches)
    for number in range(8):
        (inputs, targets), ahead = ahead, next(batches, None) if mistake == "ahead" else None
        loss = nn.functional.mse_loss(model(inputs), targets, reduction="sum" if mistake == "sum" else "mean")
        if mistake == "early":
            optimizer.step()
        scaler.scale(loss).backward()
        if mistake == "tail" and number % 3 != 2:
            ahead = next(batches)
            continue
        scaler.step(optimizer)
        if mistake == "again":
            optimizer.step()
        optimizer.zero_grad()
        if mistake != "ahead":
            ahead = next(batches, None)
            if ahead is None:
                break
