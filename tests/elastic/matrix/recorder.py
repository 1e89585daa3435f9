"""Writes down what a row of the matrix does: `begin` stands in the rows where a user writes `elastic.init`.

The harness starts all workers at once. Each waits here for its turn, trains as fast as the harness allows, and logs
which samples went into which committed step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from bftrainer import elastic

SLOW_S = 1.0
"""Length of a step past the limit that the harness has set: it raises the limit when it wants training to go on."""

FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()
WORKER = os.environ.get("BFTRAINER_WORKER", "alone")


class Recorded:
    """A `Run` whose steps are written down. Everything else is the `Run`'s own."""

    def __init__(self) -> None:
        self._run = elastic.init(snapshots=FOLDER / "snapshots", snapshot_every_s=0.1, seed=1)
        self._log = (FOLDER / f"steps-{WORKER}-{os.getpid()}.jsonl").open("a", buffering=1)
        self._objects: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name in ("epochs", "batches", "steps"):
            self._wait_for_turn()
        return getattr(self._run, name)

    def register(self, **objects: Any) -> None:
        self._objects |= {name: thing for name, thing in objects.items() if hasattr(thing, "state_dict")}
        self._run.register(**objects)

    def step(self, *, optimizer: Optimizer | None = None, **values: Any) -> bool:
        run = self._run
        of = next((name for name, thing in self._objects.items() if thing is optimizer), "")
        place = {"step": run.progress.step, "epoch": run.progress.epoch, "generation": run.generation, "of": of}
        self._hold(run.progress.step)
        self._write(**place, samples=run.indices)
        chosen = {} if optimizer is None else {"optimizer": optimizer}
        committed: bool = run.step(**chosen, **values)
        if committed:
            self._write(**place, world=run.world)
        return committed

    def close(self) -> None:
        """Leave behind what this rank has at the end of its training."""
        final = {"step": self._run.progress.step, "objects": {n: o.state_dict() for n, o in self._objects.items()}}
        torch.save(final, FOLDER / f"final-{WORKER}.pt")

    def _wait_for_turn(self) -> None:
        """Everything is imported and built; the first loop makes this worker a member."""
        while WORKER != "alone" and not (FOLDER / f"go-{WORKER}").exists():
            time.sleep(0.005)

    def _hold(self, step: int) -> None:
        until = time.monotonic() + SLOW_S
        while step >= _limit() and time.monotonic() < until:
            time.sleep(0.005)

    def _write(self, **line: Any) -> None:
        self._log.write(json.dumps(line) + "\n")


def _limit() -> float:
    """The step up to which training is not held back."""
    try:
        return float((FOLDER / "limit").read_text())
    except FileNotFoundError:
        return float("inf")


_begun: list[Recorded] = []


def begin() -> Any:
    """Stands for `elastic.init()`."""
    _begun.append(Recorded())
    return _begun[0]


def end() -> None:
    """Call when the row's function has returned."""
    for recorded in _begun:
        recorded.close()
