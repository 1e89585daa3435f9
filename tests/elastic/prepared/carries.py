"""A script that counts in plain variables: `carries.py FOLDER`. Its first worker waits for another one in step 3.

The other one waits in step 6 for its end, before it computes. So its peer loses that step.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bftrainer import elastic

folder, worker = Path(sys.argv[1]), os.environ["BFTRAINER_WORKER"]
x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
begun, history, tries, first = 0, {"begun": []}, [], None
alias = history["begun"]
model, optimizer, loader = elastic.prepare(model, optimizer, loader, carry=("begun", "history"))


def wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)


for _epoch in elastic.epochs(3):
    for inputs, targets in loader:
        if first is None:
            first = [begun, list(alias)]
            (folder / f"first-{worker}.json").write_text(json.dumps(first))
        begun += 1
        history["begun"].append(begun)
        tries.append(begun)
        (folder / f"step-{begun}-{worker}").touch()
        if begun == 3:
            wait(lambda: elastic._current()._member.peers.knows_of_newer)
        if begun == 6 and first[0]:
            wait(lambda: False)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
found = {"begun": begun, "history": history, "alias": alias, "tries": tries}
(folder / f"found-{worker}.json").write_text(json.dumps(found))
torch.save(model.state_dict(), folder / "model.pt")
