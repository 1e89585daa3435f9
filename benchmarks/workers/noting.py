"""Tells a benchmark about the steps of a worker: `benchmarks/step.py` and `benchmarks/rescale.py` with `--framework`.

A worker of a framework is a script `framework_NAME.py FOLDER MODE`. It trains without end, and calls `noting.step`
after each step that counts, on every rank. MODE is one of these:

- `rescale`: trains elastically, and each step is written down with its time.
- `elastic`: trains elastically, in turns with the other side. A turn is a number of steps. Between turns it waits.
- `plain`: trains by the framework's own means, as torchrun starts it, in turns as well.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from bftrainer import elastic

FOLDER, MODE = Path(sys.argv[1]), sys.argv[2]
IS_PLAIN = MODE == "plain"
RANKS = 2
"""The ranks that the batch of a step is for. Both benchmarks begin with as many."""
STEPS_PER_TURN = 50

os.environ.setdefault("BFTRAINER_RANKS", str(RANKS))


class _Commits:
    """Writes down when each step was made, and on how many ranks."""

    def __init__(self) -> None:
        self._log = (FOLDER / f"commits-{os.getpid()}").open("a", buffering=1)

    def step(self, number: int, world: int) -> None:
        self._log.write(f"{time.monotonic()} {number} {world}\n")


class _Turns:
    """Times turns. A turn begins when the benchmark writes a byte to this rank's pipe."""

    def __init__(self) -> None:
        name = f"{MODE}-{os.getpid()}"
        self._times = (FOLDER / f"times-{name}").open("a", buffering=1)
        self._pipe_path = FOLDER / f"pipe-{name}"
        os.mkfifo(self._pipe_path)
        self._pipe = -1
        self._made = 0
        self._began = self._now()

    def step(self, number: int, world: int) -> None:
        if self._pipe < 0:
            self._pipe = os.open(self._pipe_path, os.O_RDONLY)
        else:
            self._made += 1
            if self._made < STEPS_PER_TURN:
                return
            wall_s, processor_s = (now - began for now, began in zip(self._now(), self._began, strict=True))
            self._times.write(f"{wall_s} {processor_s}\n")
        self._made = 0
        if not os.read(self._pipe, 1):
            sys.exit()  # the benchmark is over
        self._began = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


_noting = _Commits() if MODE == "rescale" else _Turns()
_last = 0


def step() -> None:
    """Note the step that was made. A step of an elastic training that was held back or lost does not count."""
    global _last
    if IS_PLAIN:
        number, world = _last + 1, RANKS
    else:
        run = elastic.run_of_framework()
        number, world = run.progress.step, run.world
    if number != _last:
        _last = number
        _noting.step(number, world)
