"""A training whose rank 0 evaluates after each epoch, and in the last one only when it is told to go on."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from bftrainer import elastic

EPOCHS = 2


class Counter:
    """How often the code after the batches counted, for whoever takes over the state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        """Its state."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over a state."""
        self.count = state["count"]


folder, name = Path(sys.argv[1]), os.environ["BFTRAINER_WORKER"]
run = elastic.init(snapshots=folder / "snapshots", snapshot_every_s=1e9)
model, counter = nn.Linear(4, 1), Counter()
run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), counter=counter)
for epoch in run.epochs(EPOCHS):
    for (x,) in run.batches(TensorDataset(torch.ones(16, 4)), global_batch=4):
        loss = model(x).pow(2).mean()
        loss.backward()
        run.step(loss=loss)
    counter.count += 1
    if run.is_main:
        if epoch == EPOCHS - 1:
            (folder / f"evaluates-{name}").touch()
            while not (folder / f"go-on-{name}").exists():
                time.sleep(0.01)
        run.report(score=epoch + 1)
(folder / f"counted-{name}").write_text(str(counter.count))
