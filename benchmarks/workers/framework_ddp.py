"""One rank of the benchmarks with `--framework ddp`: a script for torchrun, started by it or by BFTrainer."""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - what everybody calls it
from torch import optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import noting
from cnn import make_data, make_model

dist.init_process_group("gloo")
data = make_data()
model = DistributedDataParallel(make_model())
optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler)
for epoch in range(10**6):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        noting.step()
