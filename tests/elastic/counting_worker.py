"""A training that counts what its code at the top of epochs and after steps does; tests have nodes join, leave and die.

`counting_worker.py FOLDER EPOCHS`. At step N a worker waits for a change of members where FOLDER/hold-N exists, and for
its end where FOLDER/stay-N-WORKER exists.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from bftrainer import elastic

folder, epochs, name = Path(sys.argv[1]), int(sys.argv[2]), os.environ["BFTRAINER_WORKER"]
run = elastic.init(snapshots=folder / "snapshots", snapshot_every_s=1e9)
x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
model = nn.Linear(4, 1).double()
nn.init.zeros_(model.weight)
nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
tops, evaluations = elastic.Value(0), elastic.Value([])
run.register(model=model, optimizer=optimizer, tops=tops, evaluations=evaluations)
rates, begun, calls = [], None, []


def error() -> float:
    calls.append(run.progress.step)
    with torch.no_grad():
        return (model(x).sum(1) - x.sum(1)).pow(2).mean().item()


def wait() -> None:
    step = run.progress.step
    hold, stay = folder / f"hold-{step}", folder / f"stay-{step}-{name}"
    if hold.exists() or stay.exists():
        (folder / f"waits-{step}-{name}").touch()
    while stay.exists() or (hold.exists() and not run._member.peers.knows_of_newer):
        time.sleep(0.01)


for epoch in run.epochs(epochs):
    tops.value += 1
    optimizer.param_groups[0]["lr"] = 0.1 / (epoch + 1)
    for (inputs,) in run.batches(TensorDataset(x), global_batch=4):
        begun = run.progress.step if begun is None else begun
        wait()
        loss = (model(inputs).sum(1) - inputs.sum(1)).pow(2).mean()
        loss.backward()
        rates.append([run.progress.step, optimizer.param_groups[0]["lr"]])
        if run.step(loss=loss) and run.progress.step % 3 == 0:
            evaluations.value = [*evaluations.value, [run.progress.step, run.evaluate(error)]]
result = {
    "begun": begun,
    "tops": tops.value,
    "rates": rates,
    "evaluations": evaluations.value,
    "calls": calls,
    "samples": run.progress.samples,
}
(folder / f"result-{epochs}-{name}.json").write_text(json.dumps(result))
