"""One rank of `tests/elastic/soak_gpu.py`: trains until the harness names the last epoch, and writes down every step.

    soak_worker.py FOLDER gpt2|cnn full|small cuda|cpu

It warms up first, says so by the file `warm-NAME`, and waits for the file `go-WORKER` before it joins, so that the
harness decides when that happens. NAME is that of the worker, with `.1`, `.2` … for further ranks of its node. Each
step it tries and each step it commits is a line of `steps-NAME-PID.jsonl`, in the form that
`tests/support/elastic/ledger.py` reads. At the end it writes hashes of its weights, buffers and optimizer state to
`final-NAME.json`.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - what everybody calls it
from torch import Tensor, nn, optim
from torch.utils.data import TensorDataset

import rig  # noqa: F401 - sets NCCL up for one GPU
from bftrainer import elastic
from gpt2 import GPT2, TINY, Gpt2, make_tokens

faulthandler.enable()  # a crash inside a library is what the soak looks for
faulthandler.register(signal.SIGUSR1, all_threads=True)
folder, kind, size, device = Path(sys.argv[1]), sys.argv[2], sys.argv[3], torch.device(sys.argv[4])
worker, local_rank = os.environ.get("BFTRAINER_WORKER", "alone"), int(os.environ.get("BFTRAINER_LOCAL_RANK", "0"))
name = f"{worker}.{local_rank}" if local_rank else worker
small = size == "small"


def make_cnn() -> nn.Module:
    """A CNN with BatchNorm: its buffers must be the same on all ranks too."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 10),
    )


def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of a batch."""
    return model(inputs) if kind == "gpt2" else F.cross_entropy(model(inputs), targets)


def digest(state: object) -> str:
    """A hash of every tensor and number in a state, with its place."""
    found = hashlib.sha256()

    def add(where: str, value: object) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                add(f"{where}.{key}", value[key])
        elif isinstance(value, list | tuple):
            for number, inner in enumerate(value):
                add(f"{where}.{number}", inner)
        elif isinstance(value, Tensor):
            found.update(f"{where} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        else:
            found.update(f"{where} {value!r}".encode())

    add("", state)
    return found.hexdigest()


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    while not path.exists():
        time.sleep(0.01)


torch.manual_seed(os.getpid())  # what a rank starts with must not matter
samples, global_batch, pace_s = (96, 6, 0.0) if kind == "gpt2" else (600, 48, 0.02)
if small:
    pace_s = 0.02
if kind == "gpt2":
    dimensions = TINY if small else GPT2
    with device:  # initialised there: a CPU takes seconds for it
        model: nn.Module = Gpt2(dimensions)
    inputs = make_tokens(dimensions, samples)
    optimizer: optim.Optimizer = optim.AdamW(model.parameters(), lr=1e-4)
else:
    model = make_cnn().to(device)
    inputs = torch.randn(samples, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
targets = torch.arange(samples) % 10
dataset = TensorDataset(torch.arange(samples), inputs, targets)
for _ in range(2):  # loads the device's libraries and tunes them before the worker joins
    loss_of(inputs[:global_batch].to(device), targets[:global_batch].to(device)).backward()
optimizer.zero_grad()
if device.type == "cuda":
    torch.cuda.synchronize()
(folder / f"warm-{name}").touch()
wait_for(folder / f"go-{worker}")

run = elastic.init(device=device)
run.register(model=model, optimizer=optimizer)
last = folder / "last-epoch"
with (folder / f"steps-{name}-{os.getpid()}.jsonl").open("a", buffering=1) as log:
    for epoch in run.epochs(1_000_000):
        if last.exists() and epoch >= int(last.read_text()):
            break
        for numbers, x, y in run.batches(dataset, global_batch=global_batch):
            loss = loss_of(x.to(device), y.to(device))
            loss.backward()
            mine, place, generation, world = run.indices, run.progress.key(), run.generation, run.world
            assert not mine or mine == tuple(numbers.tolist())
            time.sleep(pace_s)
            log.write(json.dumps({"try": place, "generation": generation, "samples": mine}) + "\n")
            if run.step(loss=loss):
                at = time.monotonic()
                log.write(json.dumps({"commit": place, "generation": generation, "at": at, "world": world}) + "\n")
    run.finish()
hashes = {"weights": digest(model.state_dict()), "optimizer": digest(optimizer.state_dict())}
final = {"worker": name, "epoch": run.progress.epoch, "step": run.progress.step, **hashes}
beside = folder / f"final-{name}.part"
beside.write_text(json.dumps(final))
beside.rename(folder / f"final-{name}.json")
