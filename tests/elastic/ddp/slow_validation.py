"""A DDP script whose validation waits in its last batch until FOLDER/go exists. `slow_validation.py FOLDER EPOCHS`."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

folder, epochs = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(96, 8, dtype=torch.float64)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = DistributedDataParallel(nn.Linear(8, 1).double())
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, batch_size=8, sampler=sampler)
val_loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
best, totals = float("inf"), []


def wait_for_go():
    fd = os.open(f"{folder}/validates-{os.environ.get('BFTRAINER_WORKER', 'alone')}", os.O_CREAT | os.O_WRONLY)
    os.close(fd)
    deadline = time.monotonic() + 60
    while not os.path.exists(f"{folder}/go") and time.monotonic() < deadline:
        time.sleep(0.02)


for epoch in range(epochs):
    sampler.set_epoch(epoch)
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    scheduler.step()
    model.eval()
    squares = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for number, (x, y) in enumerate(val_loader):
            squares[0] += ((model(x) - y) ** 2).sum()
            squares[1] += len(x)
            if epoch == 1 and number + 1 == len(val_loader):
                wait_for_go()
    dist.all_reduce(squares)
    dist.barrier()
    error = (squares[0] / squares[1]).item()
    best = min(best, error)
    totals.append(squares[1].item())
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: {error:.6f}")
if dist.get_rank() == 0:
    state = {"model": model.state_dict(), "best": best, "totals": totals, "lr": scheduler.get_last_lr()[0]}
    torch.save(state, f"{folder}/model.pt")
dist.destroy_process_group()
