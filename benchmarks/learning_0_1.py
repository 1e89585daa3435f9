"""The learning of version 0.1.0, for comparison (`learning.py`): each trainer by itself, from its own reports.

A curve has the measured rates at the measured sizes, and estimates that are somewhat better than likely at others, so
that they are tried. The start of nodes is part of the cost of growing, shared by the nodes that wait.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bftrainer.core.curve import Curve
from bftrainer.core.trainer import Trainer
from bftrainer.learning.costs import Kind, MeasuredCosts
from bftrainer.learning.points import newcomer_rates
from bftrainer.scheduler import Scheduler, State
from bftrainer.simulate.accounting import SimulatedTrainer
from bftrainer.simulate.knowledge import LEARN_S, UNMEASURED_S, Noise, NoisyReports
from curve_fit_0_1 import fitted, sizes_between

REPORTS, WINDOWS, ENOUGH = 31, 61, 7
AT_HAND, IN_PASSING = 0.01, 0.1
"""The relative difference above which the median of the reports replaces the rate in use."""


class OwnReports:
    """What one trainer has measured."""

    def __init__(self) -> None:
        self.costs = MeasuredCosts()
        self.in_use: dict[int, float] = {}
        self._windows: dict[int, deque[float]] = {}
        self._reports: dict[int, deque[float]] = {}

    def reported(self, size: int, rate: float) -> bool:
        """Take the rate of a window. Returns whether a decision may be worthwhile."""
        windows = self._windows.setdefault(size, deque(maxlen=WINDOWS))
        windows.append(rate)
        said = sorted(windows)[len(windows) // 2]
        reports = self._reports.setdefault(size, deque(maxlen=REPORTS))
        if said in reports:
            return False
        leeway = AT_HAND if len(reports) + 1 in (ENOUGH, REPORTS) else IN_PASSING
        reports.append(said)
        median, before = statistics.median(reports), self.in_use.get(size)
        if before is not None and abs(median / before - 1) <= leeway:
            return len(reports) == ENOUGH
        self.in_use[size] = median
        return True

    def curve(self, least: int, most: int, usual_rate: float) -> Curve:
        """Return samples per second on `least` to `most` nodes."""
        sizes = sizes_between(least, most, self.in_use)
        if not self.in_use:
            return Curve.through(sizes, newcomer_rates(sizes, usual_rate))
        best = max(self.in_use, key=lambda size: self.in_use[size])
        curious = len(self._reports.get(best, ())) >= ENOUGH
        return Curve.through(sizes, fitted(self.in_use, sizes, curious=curious))

    def growth_s(self, nodes: int) -> float:
        """Return the cost of growing from so many nodes."""
        pause_s = self.costs.pause_s("up")
        return (UNMEASURED_S if pause_s is None else pause_s) + (self.costs.start_s or 0.0) / max(nodes, 1)

    @property
    def down_s(self) -> float:
        """The cost of shrinking."""
        pause_s = self.costs.pause_s("down")
        return UNMEASURED_S if pause_s is None else pause_s


class LearnedAlone:
    """What the scheduler knows in a replay: for each trainer what it has reported itself."""

    def __init__(self, noise: Noise) -> None:
        self._reports = NoisyReports(noise, self)
        self._truth: dict[str, Trainer] = {}
        self._own: dict[str, OwnReports] = {}
        self._nodes: dict[str, int] = {}
        self._stale: set[str] = set()
        self._wanted, self._learned_at = False, -math.inf

    def next_moment(self, now: float, jobs: Mapping[str, SimulatedTrainer]) -> float:
        """Return when the next report is due, the next node is ready, or a decision may be made."""
        due = max(now, self._learned_at + LEARN_S) if self._wanted else math.inf
        return min(self._reports.next_moment(jobs), due)

    def observe(self, now: float, jobs: Mapping[str, SimulatedTrainer]) -> bool:
        """Learn. Returns whether a decision may be worthwhile now."""
        self._wanted |= self._reports.observe(now, jobs)
        if not self._wanted or now < self._learned_at + LEARN_S:
            return False
        self._learned_at = now
        return True

    def submitted(self, trainers: Sequence[Trainer]) -> Sequence[Trainer]:
        """Return what is known of trainers that are submitted now."""
        for trainer in trainers:
            self._truth[trainer.name], self._own[trainer.name] = trainer, OwnReports()
        usual_rate = self._usual_rate()
        return [self._describe(trainer.name, 0, usual_rate) for trainer in trainers]

    def refreshed(self, state: State, scheduler: Scheduler) -> State:
        """Return a state with present descriptions of those that have reported something."""
        self._wanted = False
        usual_rate = self._usual_rate()
        stale, self._stale = self._stale, set()

        def present(trainer: Trainer) -> Trainer:
            name, nodes = trainer.name, len(state.assigned.get(trainer.name, ()))
            if name not in stale and self._nodes.get(name, 0) == nodes:
                return trainer
            self._nodes[name] = nodes
            return self._describe(name, nodes, usual_rate)

        return replace(state, admitted=tuple(present(trainer) for trainer in state.admitted))

    def finished(self, name: str) -> None:
        """Forget a trainer."""
        self._reports.finished(name)
        del self._truth[name], self._own[name]

    def rescaled(self, trainer: str, kind: Kind, pause_s: float) -> None:
        """Take the pause of a rescale."""
        self._own[trainer].costs.rescaled(kind, pause_s)
        self._stale.add(trainer)

    def started(self, trainer: str, seconds: float) -> None:
        """Take the start of nodes."""
        self._own[trainer].costs.started(seconds)
        self._stale.add(trainer)

    def reported(self, trainer: str, stay: int, nodes: int, rate: float) -> bool:
        """Take a report."""
        if not self._own[trainer].reported(nodes, rate):
            return False
        self._stale.add(trainer)
        return True

    def _usual_rate(self) -> float:
        rates = (rate / size for own in self._own.values() for size, rate in own.in_use.items())
        return max(rates, default=1.0)

    def _describe(self, name: str, nodes: int, usual_rate: float) -> Trainer:
        truth, own = self._truth[name], self._own[name]
        curve = own.curve(truth.min_nodes, truth.max_nodes, usual_rate)
        return replace(truth, curve=curve, up_s=own.growth_s(nodes), down_s=own.down_s, start_s=0.0)
