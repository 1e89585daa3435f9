"""How fast a job goes at each world size, measured while it trains, and how much there is to do in all.

The training loop leaves a mark at each step and knows nothing more of it; the reporting thread does the work.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass

WARM_UP_STEPS = 3
"""Steps after a change that say nothing of the rate: caches, allocators and data workers are settling."""
_LEAST_STEPS = 4
_LEAST_S = 0.5
_WINDOWS = 61


@dataclass(frozen=True, slots=True)
class Mark:
    """Where training is: made at each step, so one tuple-like object and a clock."""

    generation: int
    world: int
    steps: int
    samples: int
    at: float


class Meter:
    """Samples per second of the whole job by world size: the median over windows of about a second."""

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0
        self.generation = 0
        self.world = 1
        self.last_at = time.perf_counter()
        self._formed_at_step = 0
        self._start: Mark | None = None
        self._windows: dict[int, deque[float]] = {}

    def stepped(self, samples: int) -> None:
        """A step was committed. Called at every one, so it only counts."""
        self.samples += samples
        self.steps += 1
        self.last_at = time.perf_counter()

    def formed(self, generation: int, world: int) -> None:
        """A new generation trains."""
        self._formed_at_step = self.steps
        self.world = world
        self.generation = generation
        self.last_at = time.perf_counter()

    def look(self) -> None:
        """Close a window if there is enough in it. Called about once a second, from another thread."""
        now = Mark(self.generation, self.world, self.steps, self.samples, self.last_at)
        start = self._start
        if start is None or start.generation != now.generation:
            warm = now.steps >= self._formed_at_step + WARM_UP_STEPS
            self._start = now if warm else None
            return
        if now.steps - start.steps >= _LEAST_STEPS and now.at - start.at >= _LEAST_S:
            rate = (now.samples - start.samples) / (now.at - start.at)
            self._windows.setdefault(now.world, deque(maxlen=_WINDOWS)).append(rate)
            self._start = now

    def rates(self) -> dict[int, float]:
        """What was measured."""
        return {world: statistics.median(windows) for world, windows in sorted(self._windows.items())}

    def windows(self) -> int:
        """How many there are of the present world size."""
        return len(self._windows.get(self.world, ()))


@dataclass(frozen=True, slots=True)
class Course:
    """What a training goes through: epochs of one dataset."""

    epochs: int
    length: int
    """Samples of the dataset."""
    drop_last: bool
    """Of an epoch, what does not fill a batch is left out."""

    def total(self, samples: int, epoch: int, cursor: int, batch: int) -> int:
        """Samples in all, after `samples` of them, at `cursor` of `epoch`.

        With `drop_last` as many as there will be if the global batch stays `batch`.
        """
        if not self.drop_last:
            return self.epochs * self.length
        left = self.epochs - epoch
        if left <= 0:
            return samples
        # The whole of an epoch that is smaller than a batch is trained all the same; see `sampler.py`.
        whole = self.length // batch * batch or self.length
        rest = (self.length - cursor) // batch * batch if cursor else whole
        return samples + rest + (left - 1) * whole
