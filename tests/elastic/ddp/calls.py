"""Calls of torch.distributed as a DDP script makes them, checked by the script itself. `calls.py ACCUMULATE`."""

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

accumulate = int(sys.argv[1])
assert not dist.is_initialized()
dist.init_process_group(backend="gloo")
world = dist.get_world_size()
assert world == int(os.environ["WORLD_SIZE"]) == 3
assert dist.get_backend() == "gloo"
# At the top of the script every rank has the same values.
total = torch.tensor([2.0])
dist.all_reduce(total)
assert total.item() == 6.0
mean = torch.tensor([2.0])
dist.all_reduce(mean, op=dist.ReduceOp.AVG)
assert mean.item() == 2.0
names = [None] * world
dist.all_gather_object(names, "node")
assert names == ["node"] * world
box = ["run-1"]
dist.broadcast_object_list(box, src=0)
assert box == ["run-1"]
dist.barrier()

torch.manual_seed(0)
data = TensorDataset(torch.arange(96.0).reshape(96, 1))
model = DDP(nn.Linear(1, 1))
assert list(model.state_dict()) == ["module.weight", "module.bias"]
assert model.module.weight is next(model.parameters())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
sampler = DistributedSampler(data)
assert len(sampler) == 32
loader = DataLoader(data, batch_size=4, sampler=sampler)
val_loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
assert len(loader) == len(val_loader) == 8


def reduce_mean(tensor):
    result = tensor.clone()
    dist.all_reduce(result)
    return result / world


for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    seen = torch.zeros(1)
    for i, (x,) in enumerate(loader):
        step = (i + 1) % accumulate == 0 or i + 1 == len(loader)
        with nullcontext() if step else model.no_sync():
            loss = model(x).mean()
            loss.backward()
        seen += len(x)
        if step:
            shown = reduce_mean(loss.detach())
            assert torch.isfinite(shown)
            optimizer.step()
            optimizer.zero_grad()
    handle = dist.all_reduce(seen, async_op=True)
    handle.wait()
    assert seen.item() == 96, seen
    model.eval()
    with torch.no_grad():
        values = [x for (x,) in val_loader]
        count = torch.tensor([sum(len(x) for x in values)])
        dist.all_reduce(count)
        assert count.item() == 96, count
        assert len(values) == len(val_loader)
        mean = reduce_mean(torch.stack([x.mean() for x in values]).mean())
        assert abs(mean.item() - 47.5) < 1e-4, mean
    best = torch.tensor([epoch + 1.0])
    dist.broadcast(best, src=0)
    assert best.item() == epoch + 1.0
    dist.reduce(best, dst=0, op=dist.ReduceOp.MAX)
    assert best.item() == epoch + 1.0
dist.destroy_process_group()
assert not dist.is_initialized()
print("all calls are right")
