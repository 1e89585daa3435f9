"""A small training in double precision with the features named on the command line; writes its final state."""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from bftrainer import elastic
from bftrainer.elastic.torch.gradients import reducer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4) if "norm" in features else nn.Identity()
        self.extra = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 3)
        self.unused = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.conv(x))).flatten(1)
        for number, layer in enumerate(self.extra):
            if "skip" not in features or number % run.world != run.rank:  # each rank skips another one
                hidden = hidden + layer(hidden) * (0.0 if "zero" in features else 1.0)
        return self.head(hidden)


folder, features = Path(sys.argv[1]), set(sys.argv[2:])
if "buckets" in features:
    reducer.FIRST_BUCKET_BYTES = reducer.BUCKET_BYTES = 100
run = elastic.init()
data = torch.Generator().manual_seed(3)
x = torch.randn(130, 2, 6, 6, generator=data, dtype=torch.float64)
y = torch.randint(0, 3, (130,), generator=data)
torch.manual_seed(0)
model = Net().double()
if "channels_last" in features:
    model = model.to(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
scaler = torch.amp.GradScaler("cpu", enabled="scaler" in features)
run.register(
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    scaler=scaler,
    scheduler_every="step",
    clip_norm=0.5 if "clip" in features else None,
)
dataset = TensorDataset(x, y)
for _ in run.epochs(3):
    for inputs, targets in run.batches(
        dataset,
        global_batch=50,
        max_batch=7 if "accumulate" in features else None,
        num_workers=2 if "workers" in features else 0,
    ):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if "twice" in features or ("unequal" in features and run.rank == 1):  # two backward passes make one gradient
            scaler.scale(loss * 0.25).backward(retain_graph=True)
            scaler.scale(loss * 0.75).backward()
        else:
            scaler.scale(loss).backward()
        run.step(loss=loss)
assert model.unused.weight.grad is None
state = {"model": model.state_dict(), "loss": run.metrics["loss"], "samples": run.progress.samples, "world": run.world}
torch.save(state, folder / f"final-{os.environ.get('BFTRAINER_WORKER', 'alone')}.pt")
