"""One rank of `benchmarks/rescale.py --framework prepare`: a plain loop, made elastic by `elastic.prepare`."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 - what everybody calls it
from torch import optim
from torch.utils.data import DataLoader

import noting
from bftrainer import elastic
from cnn import make_data, make_model

model = make_model()
optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loader = DataLoader(make_data(), batch_size=32, shuffle=True)
model, optimizer, loader = elastic.prepare(model, optimizer, loader, per_rank_batch=True)
for _ in elastic.epochs(1_000_000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        noting.step()
