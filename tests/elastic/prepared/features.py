"""A training loop with what users do in one, as told by the arguments: `features.py FOLDER FEATURE…`."""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from bftrainer import elastic

folder, features = Path(sys.argv[1]), set(sys.argv[2:])
data = torch.Generator().manual_seed(1)
inputs = torch.randn(130, 12, generator=data, dtype=torch.float64)
targets = torch.tanh(inputs @ torch.randn(12, 3, generator=data, dtype=torch.float64))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
accumulate = 3 if "accumulate" in features else 1
sampler = WeightedRandomSampler([1.0 + n % 3 for n in range(130)], 100) if "sampler" in features else None
scaler = torch.amp.GradScaler("cpu", enabled="scaler" in features, init_scale=2.0**10, growth_interval=4)
loader = DataLoader(
    TensorDataset(inputs, targets),
    batch_size=16,
    shuffle=sampler is None and "ordered" not in features,
    sampler=sampler,
    num_workers=2 if "workers" in features else 0,
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
counter = elastic.Value(0)
if "plain" not in features:
    model, optimizer, loader, scheduler, scaler, counter = elastic.prepare(
        model, optimizer, loader, scheduler, scaler, counter, accumulate=accumulate if "declared" in features else None
    )


def evaluate() -> float:
    model.eval()
    with torch.no_grad():
        total = sum(nn.functional.mse_loss(model(x), y, reduction="sum").item() for x, y in loader)
    model.train()
    return total


seen = 0
for _epoch in elastic.epochs(4) if "epochs" in features else range(4):
    for number, (x, y) in enumerate(loader):

        def compute(x: torch.Tensor = x, y: torch.Tensor = y, number: int = number) -> torch.Tensor:
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            if "inf" in features and counter.value == 5:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if "penalty" in features and number % 3 == 0:
                (1e-3 * sum(param.square().sum() for param in model.parameters())).backward()
            return loss

        if "closure" in features:
            optimizer.step(compute)
            optimizer.zero_grad()
            continue
        loss = compute()
        if (number + 1) % accumulate and number + 1 != len(loader):
            continue
        if "by hand" in features:
            optimizer.synchronize()
            for param in model.parameters():
                param.grad.mul_(0.5).clamp_(-0.1, 0.1)
        if "clip" in features:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()
        counter.value += 1
        optimizer.zero_grad(set_to_none="zeros" not in features)
        seen += len(x)
        if "break" in features and number == 4:
            break
    scheduler.step()
    evaluated = evaluate()
final = {
    "model": model.state_dict(),
    "loss": evaluated,
    "lr": optimizer.param_groups[0]["lr"],
    "steps": counter.value,
    "scale": scaler.get_scale(),
}
with (folder / f"final-{os.environ.get('BFTRAINER_WORKER', 'alone')}.pt").open("wb") as file:
    torch.save(final, file)
