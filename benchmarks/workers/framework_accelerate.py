"""One rank of the benchmarks with `--framework accelerate`: a loop with Accelerate, elastic or as it is."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 - what everybody calls it
from torch import optim
from torch.utils.data import DataLoader

import noting
from bftrainer import elastic
from cnn import make_data, make_model

if noting.IS_PLAIN:
    from accelerate import Accelerator
else:
    from bftrainer.integrations.accelerate import ElasticAccelerator as Accelerator

accelerator = Accelerator(cpu=True)
model = make_model()
optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loader = DataLoader(make_data(), batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(10**6) if noting.IS_PLAIN else elastic.epochs(10**6):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        noting.step()
