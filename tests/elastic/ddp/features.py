"""A DDP script with AMP, accumulation, clipping, a moving average, a schedule per step and loader processes.

`features.py FOLDER EPOCHS`. It knows nothing of BFTrainer.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class MovingAverage:
    def __init__(self, model, decay):
        self.module = copy.deepcopy(model)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for mine, other in zip(self.module.parameters(), model.parameters()):
            mine.mul_(self.decay).add_(other, alpha=1 - self.decay)


def main(folder, epochs):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(240, 8, dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    ema = MovingAverage(model, 0.9)
    model = DDP(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * world_size)
    warmup, cosine = LinearLR(optimizer, 0.1, total_iters=10), CosineAnnealingLR(optimizer, 20 * epochs)
    scheduler = SequentialLR(optimizer, [warmup, cosine], milestones=[10])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=6, sampler=sampler, num_workers=1, persistent_workers=True)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for i, (inputs, targets) in enumerate(loader):
            if (i + 1) % 2 and i + 1 < len(loader):
                with model.no_sync():
                    loss = nn.functional.mse_loss(model(inputs), targets) / 2
                    scaler.scale(loss).backward()
                continue
            loss = nn.functional.mse_loss(model(inputs), targets) / 2
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            ema.update(model.module)
        dist.barrier()
    if rank == 0:
        state = {
            "model": model.state_dict(),
            "ema": [param.sum().item() for param in ema.module.parameters()],
            "lr": scheduler.get_last_lr()[0],
            "scale": scaler.get_scale(),
        }
        torch.save(state, os.path.join(folder, "model.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
