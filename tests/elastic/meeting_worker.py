"""A training that evaluates in mid-epoch and at the end of epochs; tests kill who evaluates and have others join."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from bftrainer import elastic
from bftrainer.elastic.torch.tracking.journal import LoggedValues
from bftrainer.elastic.torch.tracking.tracker import Tracker
from bftrainer.elastic.torch.tracking.writers import Opening

folder = Path(sys.argv[1])
name = os.environ.get("BFTRAINER_WORKER", "alone")
os.environ["BFTRAINER_OUTPUT"] = str(folder / "output")
run = elastic.init()
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
model = nn.Linear(4, 1).double()
nn.init.zeros_(model.weight)
nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.9)
best, evaluations = elastic.Value(float("inf")), elastic.Value(0)
run.register(model=model, optimizer=optimizer, plateau=plateau, best=best, evaluations=evaluations)
log = (folder / f"log-{name}.jsonl").open("a", buffering=1)


class Lines:
    """A tracker that writes lines to a file."""

    def __init__(self, opening: Opening) -> None:
        self.run = opening.run
        self.say("open")

    def say(self, *words: object) -> None:
        with (folder / "tracked.jsonl").open("a") as file:
            file.write(json.dumps([name, self.run, *words]) + "\n")

    def write(self, logged: LoggedValues) -> None:
        self.say("log", logged.step, *logged.values)

    def close(self) -> None:
        self.say("close")

    def finish(self) -> None:
        self.say("finish")


tracker = Tracker("lines", {}, run._trackers._run, Lines)


def validate(where: str) -> dict[str, float]:
    """On rank 0. In `where` it waits until it may go on, or is killed."""
    (folder / f"evaluates-{where}-{name}").touch()
    while (folder / f"hold-{where}").exists() and not (folder / f"go-{name}").exists():
        time.sleep(0.01)
    with torch.no_grad():
        return {"loss": (model(x).sum(1) - x.sum(1)).pow(2).mean().item()}


for epoch in run.epochs(4):
    top = run.share(f"{name} at the top of {epoch}")
    for (inputs,) in run.batches(TensorDataset(x), global_batch=16):
        loss = (model(inputs).sum(1) - inputs.sum(1)).pow(2).mean()
        loss.backward()
        run.step(loss=loss)
        tracker.log({"loss": loss})
        if run.progress.step % 2 == 1:
            found = run.evaluate(validate, f"middle-{epoch}")
            evaluations.value += 1
            tracker.log({"middle": found["loss"]})
            log.write(json.dumps(["middle", run.progress.step, found, run.world]) + "\n")
    found = run.evaluate(validate, f"end-{epoch}")
    tracker.log({"end": found["loss"]})
    evaluations.value += 1
    plateau.step(found["loss"])
    best.value = min(best.value, found["loss"])
    log.write(json.dumps(["end", epoch, found, top]) + "\n")
tracker.finish()
final = {"model": model.state_dict(), "plateau": plateau.state_dict(), "best": best.value, "n": evaluations.value}
torch.save(
    final | {"lr": optimizer.param_groups[0]["lr"], "samples": run.progress.samples}, folder / f"final-{name}.pt"
)
