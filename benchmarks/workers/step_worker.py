"""One rank of `benchmarks/step.py`: epochs of elastic training and of DistributedDataParallel in turns, both timed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - what everybody calls it
from torch import optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from bftrainer import elastic
from cnn import make_data, make_model


class Plain(DistributedDataParallel):
    """torch's own, taken before `elastic.init` has it refused."""

    __init__ = DistributedDataParallel.__init__


out, repetitions, batch, samples = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
run = elastic.init()
data = make_data(samples)
model = make_model()
optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
run.register(model=model, optimizer=optimizer)
plain = optimizer_of_plain = sampler = None
times: dict[str, list[float]] = {"elastic": [], "ddp": []}
steps = 0
for epoch in run.epochs(repetitions + 1):
    if plain is None:
        plain = Plain(make_model())
        optimizer_of_plain = optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
        sampler = DistributedSampler(data, run.world, run.rank)
        loader = DataLoader(data, batch_size=batch, sampler=sampler)
    dist.barrier()
    began = time.perf_counter()
    steps = 0
    for x, y in run.batches(data, batch_size=batch):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        run.step(loss=loss)
        steps += 1
    times["elastic"].append(steps / (time.perf_counter() - began))
    dist.barrier()
    began = time.perf_counter()
    sampler.set_epoch(epoch)
    steps = 0
    for x, y in loader:
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        optimizer_of_plain.step()
        optimizer_of_plain.zero_grad(set_to_none=True)
        steps += 1
    times["ddp"].append(steps / (time.perf_counter() - began))
if run.is_main:  # the first of each warms up
    out.write_text(json.dumps({name: rates[1:] for name, rates in times.items()} | {"steps": steps}))
