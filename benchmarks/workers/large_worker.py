"""One rank of `benchmarks/rescale.py --state-mb N`: trains a large model for ever and writes down when it commits."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from bftrainer import elastic
from sized import make_sized

folder, megabytes = Path(sys.argv[1]), float(sys.argv[2])
run = elastic.init()
model, optimizer, inputs = make_sized(megabytes)
run.register(model=model, optimizer=optimizer)
with (folder / f"commits-{os.getpid()}").open("a", buffering=1) as log:
    for _ in run.steps(1_000_000_000):
        loss = model(inputs).square().mean()
        loss.backward()
        if run.step(loss=loss):
            log.write(f"{time.monotonic()} {run.progress.step} {run.world}\n")
