"""One rank of the benchmarks with `--framework prepare`: a plain loop, elastic or with DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - what everybody calls it
from torch import optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import noting
from bftrainer import elastic
from cnn import make_data, make_model

data = make_data()
model = make_model()
epochs: Iterator[int]
if noting.IS_PLAIN:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    epochs = iter(range(1_000_000))
else:
    sampler = None
    loader = DataLoader(data, batch_size=32, shuffle=True)
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader, per_rank_batch=True)
    epochs = elastic.epochs(1_000_000)
for epoch in epochs:
    if sampler is not None:
        sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        noting.step()
