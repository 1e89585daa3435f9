"""A training in double precision that writes down which samples each committed step took; the tests disturb it.

`chaos_worker.py FOLDER EPOCHS PACE_S [--snapshots] [--width=32] [--hold=0.25] [--flows]`. A step takes PACE_S on one
rank until FOLDER/hurry exists. Where FOLDER/limit exists, steps below the number in it take no time and others `--hold`
seconds, so that whoever disturbs the training has all the time it needs and the training none to waste. With `--flows`
newcomers of any size follow, and workers are struck at the points of `flow_points.py`.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from bftrainer import elastic

faulthandler.register(signal.SIGUSR1)  # prints where all threads are
folder, epochs, pace_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
run = elastic.init(snapshots=folder / "snapshots" if "--snapshots" in sys.argv else None, snapshot_every_s=0.5)
torch.manual_seed(os.getpid())  # what a rank starts with must not matter
data = torch.Generator().manual_seed(1)
x = torch.randn(600, 20, generator=data, dtype=torch.float64)
y = torch.tanh(x @ torch.randn(20, 3, generator=data, dtype=torch.float64))


def option(name: str, default: float) -> float:
    """The value of an option."""
    return next((float(word.partition("=")[2]) for word in sys.argv if word.startswith(f"--{name}=")), default)


width, hold_s, flows = int(option("width", 32)), option("hold", 0.25), "--flows" in sys.argv
if flows:
    import flow_points

    flow_points.install(folder, os.environ.get("BFTRAINER_WORKER", "alone"))
model = nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, 3)).double()
small = 5 * (width / 32) ** 0.5
with torch.no_grad():
    for number, param in enumerate(model.parameters()):
        values = torch.randn(param.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        param.copy_(values / small)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40, 0.9)
run.register(model=model, optimizer=optimizer, scheduler=scheduler)
log = (folder / f"steps-{os.environ.get('BFTRAINER_WORKER', 'alone')}-{os.getpid()}.jsonl").open("a", buffering=1)


def held() -> list[int]:
    """How many descriptors and threads this process has."""
    return [len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task")]


def hold() -> None:
    """Make a step last as long as the tests want it to."""
    if not pace_s or (folder / "hurry").exists():
        return
    if not (folder / "limit").exists():
        time.sleep(pace_s / run.world)
        return
    near_the_end = run.progress.epoch >= epochs - 2
    until = time.monotonic() + (2.0 if near_the_end else hold_s)
    while run.progress.step >= int((folder / "limit").read_text()) and time.monotonic() < until:
        time.sleep(0.01)


def note_flows() -> None:
    """Write down what is left of flows, when none should be under way."""
    if flows:
        found = {"left": flow_points.leftovers(), "world": run.world, "rank": run.rank}
        log.write(json.dumps(found) + "\n")


dataset = TensorDataset(torch.arange(len(x)), x, y)
seen = 0
for _ in run.epochs(epochs):
    for numbers, inputs, targets in run.batches(dataset, global_batch=48):
        if run.generation != seen:
            seen = run.generation
            log.write(json.dumps({"held": held(), "world": run.world, "rank": run.rank}) + "\n")
            if not (folder / "disturbed").exists():
                note_flows()
        loss = nn.functional.mse_loss(run.model(inputs), targets)
        loss.backward()
        mine, place, generation = run.indices, run.progress.key(), run.generation
        assert not mine or mine == tuple(numbers.tolist())
        hold()
        log.write(json.dumps({"try": place, "generation": run.generation, "samples": mine}) + "\n")
        if run.step(loss=loss):
            log.write(json.dumps({"commit": place, "generation": generation, "at": time.monotonic()}) + "\n")
        scheduler.step()
    log.write(json.dumps({"held": held(), "world": run.world, "rank": run.rank, "epoch": True}) + "\n")
    if run.progress.epoch == epochs - 1:
        note_flows()
torch.save(
    {"model": model.state_dict(), "scheduler": scheduler.state_dict(), "lr": optimizer.param_groups[0]["lr"]},
    folder / f"final-{os.environ.get('BFTRAINER_WORKER', 'alone')}-{os.getpid()}.pt",
)
