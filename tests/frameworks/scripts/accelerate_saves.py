"""An Accelerate loop that saves after each epoch: `accelerate_saves.py FOLDER`.

After epoch 0 the main rank waits to be killed before it saves. The other ranks keep what should have been saved.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bftrainer import elastic
from bftrainer.integrations.accelerate import ElasticAccelerator

folder = Path(sys.argv[1])
accelerator = ElasticAccelerator(cpu=True)
torch.manual_seed(0)
x = torch.randn(32, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.save_state(folder / "begin")
accelerator.save(model.state_dict(), folder / "begin.pt")
for epoch in elastic.epochs(2):
    for inputs, targets in loader:
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.unwrap_model(model).state_dict()
    if epoch == 0 and accelerator.is_main_process:
        (folder / f"waits-{os.environ['BFTRAINER_WORKER']}").touch()
        time.sleep(60)
    accelerator.save(weights, folder / f"plain-{epoch}.pt")
    accelerator.save(weights, str(folder / f"safe-{epoch}.safetensors"), safe_serialization=True)
    accelerator.save_model(model, folder / f"model-{epoch}")
    with (folder / f"expected-{epoch}-{os.environ['BFTRAINER_WORKER']}").open("wb") as file:
        torch.save({name: weight.clone() for name, weight in weights.items()}, file)
accelerator.end_training()
