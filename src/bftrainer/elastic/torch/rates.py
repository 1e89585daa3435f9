"""Training rate by number of nodes, measured while a job trains, and the total number of samples.

The training loop only updates counters at each step (`Meter.stepped`). The reporting thread computes the rates.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

WARM_UP_STEPS = 3
"""Steps after a change that are not measured: caches, allocators and data workers are still settling."""
_LEAST_STEPS = 4
_LEAST_S = 0.5
_WINDOWS = 61
_DEVIATIONS = 1.4826
"""The standard deviation of normal noise, in median absolute deviations."""
_SLOWEST = 0.5
"""A window whose rate is below this share of the median does not count: in it, something else happened as well."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Progress at one moment."""

    generation: int
    nodes: int
    steps: int
    samples: int
    at: float


@dataclass(frozen=True, slots=True)
class _Period:
    """A window: what was done in it, and how long it was."""

    samples: int
    seconds: float

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds


class Meter:
    """Samples per second of the whole job by number of nodes, measured in windows of about a second.

    The rate of several windows is what was done in all of them per second, the small batch at the end of an epoch and
    slow steps included. Only windows in which the job mostly did something else, such as an evaluation, do not count.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0
        self.generation = 0
        self.nodes = 1
        self.last_at = time.perf_counter()
        self._formed_at_step = 0
        self._start: Mark | None = None
        self._windows: dict[int, deque[_Period]] = {}
        self._stay: tuple[int, deque[_Period]] = (0, deque(maxlen=_WINDOWS))
        """The windows of the present generation, and its number."""

    def stepped(self, samples: int) -> None:
        """Count a committed step. It is called at every step, so it only counts."""
        self.samples += samples
        self.steps += 1
        self.last_at = time.perf_counter()

    def formed(self, generation: int, nodes: int) -> None:
        """Record that a new generation trains."""
        self._formed_at_step = self.steps
        self.nodes = nodes
        self.generation = generation
        self.last_at = time.perf_counter()

    def look(self) -> None:
        """Close a window if it holds enough steps. It is called about once a second, from another thread."""
        now = Mark(self.generation, self.nodes, self.steps, self.samples, self.last_at)
        start = self._start
        if start is None or start.generation != now.generation:
            warm = now.steps >= self._formed_at_step + WARM_UP_STEPS
            self._start = now if warm else None
            return
        if now.steps - start.steps >= _LEAST_STEPS and now.at - start.at >= _LEAST_S:
            window = _Period(now.samples - start.samples, now.at - start.at)
            self._windows.setdefault(now.nodes, deque(maxlen=_WINDOWS)).append(window)
            if self._stay[0] != now.generation:
                self._stay = (now.generation, deque(maxlen=_WINDOWS))
            self._stay[1].append(window)
            self._start = now

    def rates(self) -> dict[int, float]:
        """Return the measured rates, in samples per second by number of nodes."""
        return {nodes: _rate(windows) for nodes, windows in sorted(self._windows.items())}

    def stay(self) -> tuple[int, float, float]:
        """Return the windows of the present generation: their number, rate, and scatter.

        The scatter is the sum of the squared deviations of their logarithms, estimated so that a single window in which
        something else happened does not count.
        """
        generation, windows = self._stay
        if generation != self.generation or not windows:
            return 0, 0.0, 0.0
        rates = [window.rate for window in windows if window.samples > 0]
        if not rates:
            return 0, 0.0, 0.0
        middle = statistics.median(rates)
        deviation = statistics.median(abs(math.log(rate / middle)) for rate in rates)
        return len(rates), _rate(windows), (_DEVIATIONS * deviation) ** 2 * (len(rates) - 1)

    def windows(self) -> int:
        """Return the number of windows measured at the present number of nodes."""
        return len(self._windows.get(self.nodes, ()))


def _rate(windows: Iterable[_Period]) -> float:
    """Return the samples per second of some windows, without those in which something else happened."""
    found = list(windows)
    least = _SLOWEST * statistics.median(window.rate for window in found)
    usual = [window for window in found if window.rate >= least]
    return sum(window.samples for window in usual) / math.fsum(window.seconds for window in usual)


@dataclass(frozen=True, slots=True)
class Course:
    """Length of a whole training: epochs of one dataset."""

    epochs: int
    length: int
    """Samples of the dataset."""
    drop_last: bool
    """Whether samples at the end of an epoch that do not fill a batch are left out."""

    def total(self, samples: int, epoch: int, cursor: int, batch: int) -> int:
        """Return the samples of the whole training, given that `samples` are done, up to `cursor` of `epoch`.

        With `drop_last` this assumes that the global batch stays `batch`.
        """
        if not self.drop_last:
            return self.epochs * self.length
        left = self.epochs - epoch
        if left <= 0:
            return samples
        # An epoch that is smaller than a batch is still trained as a whole; see `data/batch_plan.py`.
        whole = self.length // batch * batch or self.length
        rest = (self.length - cursor) // batch * batch if cursor else whole
        return samples + rest + (left - 1) * whole
