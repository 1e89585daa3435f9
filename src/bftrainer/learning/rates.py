"""The rate belief: what is believed of a script's rate at every size, from noisy stays at a few sizes.

log(rate / n) is taken to be a level, plus a slope times log2 n, plus a smooth bend: a Gaussian process. A `Stay` is the
time that a trainer spent at one size; it is one observation, however long it was, because what disturbs a training
often lasts (its nodes, its neighbours). Trials of one script may differ: each shifts the belief by an offset of its
own, as far as its stays show that. docs/model.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bftrainer.core.curve import Curve

Floats = npt.NDArray[np.float64]

LEVEL_SD = 1.0
SLOPE, SLOPE_SD = -0.15, 0.10
"""Change of log(rate / n) for each doubling of n that is expected before anything was measured."""
BEND_SD, BEND_OCTAVES = 0.05, 1.5
"""Size of the smooth deviation from a straight line, and over how many doublings of n it stays alike."""
NOISE, NOISE_WEIGHT = 0.02, 5.0
"""Relative noise of a window that is assumed at first, and how many windows that assumption counts for."""
OFFSET_SD, OFFSET_WEIGHT = 0.01, 4.0
"""How much trials of a script differ at least, and how many trials that assumption counts for."""
TELL_AT = (1, 3, 9, 20)
"""Numbers of windows of a stay at which the belief is computed again."""
MOST_STAYS, LEAST_STAYS = 60, 30
"""When more stays than the first number are over, the older ones are merged by size until the second number is left."""
MOST_COUNT, MOST_OWN_COUNT = 100.0, 40.0
"""How many stays the merged ones of a size, and of a trial, count for at most. So what is old is outweighed in time."""
MOST_TRIALS, RECENT_TRIALS = 256, 20
"""How many trials' offsets are kept, and how many of the last trials say what is expected of a new one."""
MOST_WINDOWS = 2000.0
"""How many merged windows the estimate of the noise counts for at most."""
_BINS = 64
"""If more sizes than this were measured, those within a quarter of a doubling are put together."""
_ROUNDS = 3
"""How often the offsets of trials and the curve are computed in turns, if trials differ."""
_LEAST_VARIANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Stay:
    """The windows that a trainer measured while it stayed at one size."""

    size: int
    windows: int
    log_rate: float
    """The mean of log(rate / size) over the windows, with rates in samples per second."""
    scatter: float = 0.0
    """The sum of the squared deviations of the windows from that mean."""

    @classmethod
    def first(cls, size: int, rate: float) -> Stay:
        """Return a stay with one window."""
        return cls(size, 1, math.log(rate / size))

    def then(self, rate: float) -> Stay:
        """Return the stay with one window more."""
        value, windows = math.log(rate / self.size), self.windows + 1
        mean = self.log_rate + (value - self.log_rate) / windows
        scatter = self.scatter + (value - self.log_rate) * (value - mean)
        return Stay(self.size, windows, mean, scatter)

    @property
    def count(self) -> float:
        """What the stay counts for: its variance is s² / count, where s² is that of a window, and of a stay."""
        return 1 / (1 + 1 / self.windows)

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.size * math.exp(self.log_rate)


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """The belief at some sizes: the mean of log(rate), and its standard deviation."""

    sizes: tuple[int, ...]
    log_rates: Floats
    log_sds: Floats

    def rates(self, sds: float = 0.0) -> list[float]:
        """Return the rates, moved by a number of standard deviations."""
        return [float(rate) for rate in np.exp(self.log_rates + sds * self.log_sds)]


@dataclass(slots=True)
class _Pooled:
    """A weighted mean of several stays."""

    count: float = 0.0
    mean: float = 0.0

    def add(self, count: float, value: float, most: float = math.inf) -> None:
        self.count += count
        self.mean += (value - self.mean) * count / self.count
        self.count = min(self.count, most)


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    """The process fitted to the stays."""

    x: Floats
    base: float
    weights: Floats
    inverse: Floats
    variance: float
    """s², the variance of a window."""
    offset_variance: float
    """τ², by how much trials of the script differ."""
    offsets: Mapping[str, tuple[float, float]]
    """The count and the mean deviation of each trial."""
    expected: Callable[[Floats], Floats]
    usual_offset: float = 0.0
    """The offset that is expected of a new trial."""

    @property
    def differs(self) -> bool:
        """Whether trials differ more than is assumed at first."""
        return self.offset_variance > OFFSET_SD**2

    def means(self, x: Floats) -> Floats:
        found: Floats = self.base + self.expected(x) + _kernel(x, self.x) @ self.weights
        return found

    def variances(self, x: Floats) -> Floats:
        across = _kernel(x, self.x)
        own = LEVEL_SD**2 + SLOPE_SD**2 * x**2 + BEND_SD**2
        found: Floats = np.maximum(own - np.einsum("ij,jk,ik->i", across, self.inverse, across), 0.0)
        return found

    def offset(self, trial: str | None) -> tuple[float, float]:
        """Return by how much a trial is above the others, and the variance of that."""
        count, mean = self.offsets.get(trial, (0.0, 0.0)) if trial is not None else (0.0, 0.0)
        precision = count / self.variance + 1 / self.offset_variance
        offset = (mean * count / self.variance + self.usual_offset / self.offset_variance) / precision
        return offset, 1 / precision


class RateBelief:
    """The stays of a script's trainers, and the curve that follows from them."""

    def __init__(self, prior: Curve | None = None) -> None:
        self.version = 0
        """Grows whenever the belief has changed."""
        self._prior: Curve | None = None
        self._stays: dict[tuple[str, int], Stay] = {}
        self._merged: dict[int, _Pooled] = {}
        self._trials: dict[str, _Pooled] = {}
        """The deviations of merged stays from the belief, by trial."""
        self._newest: dict[str, int] = {}
        """The newest stay of each trial that runs. It may get more windows."""
        self._scatter, self._freedom = 0.0, 0.0
        self._fitted: tuple[int, _Fit] | None = None
        self._means: dict[tuple[int, ...], Floats] = {}
        """The means of log(rate) without an offset, of the present version, by sizes."""
        self.take_prior(prior)

    @property
    def prior(self) -> Curve | None:
        """The curve that a user gave before anything was measured."""
        return self._prior

    @property
    def is_known(self) -> bool:
        """Whether anything is known: a stay, or a user's curve."""
        return bool(self._stays or self._merged or self._prior is not None)

    @property
    def is_measured(self) -> bool:
        """Whether anything was measured."""
        return bool(self._stays or self._merged)

    def take_prior(self, curve: Curve | None) -> None:
        """Believe a user's curve until there are measurements, and then its shape. One with a rate of 0 is no use."""
        if curve is None or any(rate <= 0 for rate in curve.rates[1:]) or curve == self._prior:
            return
        self._prior = curve
        self._changed()

    def observe(self, trial: str, number: int, stay: Stay) -> None:
        """Take what a trial measured so far in its stay of this number, in place of what was known of that stay."""
        before = self._stays.get((trial, number))
        self._stays[trial, number] = stay
        self._newest[trial] = max(number, self._newest.pop(trial, number))
        known = before.windows if before is not None else 0
        if any(known < windows <= stay.windows for windows in TELL_AT):
            self._changed()
        if len(self._newest) > MOST_TRIALS:
            del self._newest[next(iter(self._newest))]
        if before is None and len(self._stays) - len(self._newest) > MOST_STAYS:
            self._merge()

    def ended(self, trial: str) -> None:
        """Record that a trial measures nothing more."""
        self._newest.pop(trial, None)

    def estimate(self, sizes: tuple[int, ...], trial: str | None = None) -> Estimate:
        """Return what is believed of a trial, or of a trial that has not run yet, at these sizes."""
        fit, (shift, own) = self._fit(), self._fit().offset(trial)
        spread = fit.variances(np.log2(np.array(sizes, dtype=np.float64))) + own
        return Estimate(sizes, self._log_rates(sizes) + shift, np.sqrt(spread))

    def rates(self, sizes: tuple[int, ...], trial: str | None = None) -> list[float]:
        """Return only the means of `estimate`, which every decision needs."""
        shift, _ = self._fit().offset(trial)
        found: list[float] = np.exp(self._log_rates(sizes) + shift).tolist()
        return found

    def _log_rates(self, sizes: tuple[int, ...]) -> Floats:
        known = self._means.get(sizes)
        if known is None:
            x = np.log2(np.array(sizes, dtype=np.float64))
            known = self._means[sizes] = self._fit().means(x) + x * math.log(2)
        return known

    def measured(self, trial: str | None = None) -> dict[int, tuple[float, float]]:
        """Return the mean rate at each measured size, and how many stays that counts for, in ascending order of size.

        `trial`: only the stays of this trial, as far as they are kept one by one.
        """
        pooled = self._by_size({}, trial)
        return {size: (size * math.exp(mean.mean), mean.count) for size, mean in sorted(pooled.items())}

    def stays(self, trial: str | None = None) -> list[tuple[str, Stay]]:
        """Return the stays that are kept one by one, with their trials, in the order in which they began."""
        return [(name, stay) for (name, _), stay in self._stays.items() if trial is None or name == trial]

    @property
    def noise(self) -> float:
        """The relative noise of a window."""
        return math.sqrt(self._variance())

    # Computation.

    def _changed(self) -> None:
        self.version += 1
        self._means.clear()

    def _variance(self) -> float:
        scatter = self._scatter + sum(stay.scatter for stay in self._stays.values())
        freedom = self._freedom + sum(stay.windows - 1 for stay in self._stays.values())
        return max((scatter + NOISE_WEIGHT * NOISE**2) / (freedom + NOISE_WEIGHT), _LEAST_VARIANCE)

    def _by_size(self, offsets: Mapping[str, float], trial: str | None = None) -> dict[int, _Pooled]:
        """Return the mean of log(rate / size) at each size, less the offsets of the trials."""
        pooled = {} if trial else {size: _Pooled(old.count, old.mean) for size, old in self._merged.items()}
        for (name, _), stay in self._stays.items():
            if trial is None or name == trial:
                pooled.setdefault(stay.size, _Pooled()).add(stay.count, stay.log_rate - offsets.get(name, 0.0))
        return pooled

    def _fit(self) -> _Fit:
        if self._fitted is None or self._fitted[0] != self.version:
            fit = self._fit_with({})
            if fit.differs:  # compare sizes as if all trials were alike
                for _ in range(_ROUNDS):
                    fit = self._fit_with({trial: fit.offset(trial)[0] for trial in fit.offsets})
            self._fitted = self.version, fit
        return self._fitted[1]

    def _fit_with(self, offsets: Mapping[str, float]) -> _Fit:
        variance, expected = self._variance(), self._expected()
        pooled = _binned(self._by_size(offsets))
        x = np.array([place for place, _ in pooled])
        y = np.array([mean.mean for _, mean in pooled])
        noise = variance / np.array([mean.count for _, mean in pooled])
        if not pooled:
            return _Fit(x, 0.0, x, np.zeros((0, 0)), variance, OFFSET_SD**2, {}, expected)
        deviations = y - expected(x)
        base = float(np.average(deviations, weights=1 / noise))
        inverse: Floats = np.asarray(np.linalg.inv(_kernel(x, x) + np.diag(noise)), dtype=np.float64)
        fit = _Fit(x, base, inverse @ (deviations - base), inverse, variance, OFFSET_SD**2, {}, expected)
        own = self._deviations(fit)
        differ = _offset_variance(own, variance)
        usual = _usual_offset(own, variance, differ) if differ > OFFSET_SD**2 else 0.0
        return _Fit(x, base, fit.weights, inverse, variance, differ, own, expected, usual)

    def _deviations(self, fit: _Fit) -> dict[str, tuple[float, float]]:
        """Return the count and the mean deviation from the belief of each trial's stays."""
        own = {trial: _Pooled(old.count, old.mean) for trial, old in self._trials.items()}
        sizes = sorted({stay.size for stay in self._stays.values()})
        means = dict(zip(sizes, fit.means(np.log2(np.array(sizes, dtype=np.float64))), strict=True)) if sizes else {}
        for (trial, _), stay in self._stays.items():
            own.setdefault(trial, _Pooled()).add(stay.count, stay.log_rate - means[stay.size])
        return {trial: (mean.count, float(mean.mean)) for trial, mean in own.items()}

    def _expected(self) -> Callable[[Floats], Floats]:
        """Return what is expected of log(rate / n) at log2 n, up to a level."""
        prior = self._prior
        if prior is None:
            return lambda x: SLOPE * x
        return lambda x: np.log(prior.at(np.exp2(x))) - x * math.log(2)

    def _merge(self) -> None:
        """Merge the oldest stays by size, less the offsets of their trials."""
        under_way = set(self._newest.items())
        old = [key for key in self._stays if key not in under_way][:-LEAST_STAYS]
        fit = self._fit()
        sizes = sorted({self._stays[key].size for key in old})
        means = dict(zip(sizes, fit.means(np.log2(np.array(sizes, dtype=np.float64))), strict=True)) if sizes else {}
        for key in old:
            stay = self._stays.pop(key)
            offset = fit.offset(key[0])[0] if fit.differs else 0.0
            self._merged.setdefault(stay.size, _Pooled()).add(stay.count, stay.log_rate - offset, MOST_COUNT)
            deviation = float(stay.log_rate - means[stay.size])
            self._trials.setdefault(key[0], _Pooled()).add(stay.count, deviation, MOST_OWN_COUNT)
            self._scatter += stay.scatter
            self._freedom += stay.windows - 1
        if self._freedom > MOST_WINDOWS:
            self._scatter *= MOST_WINDOWS / self._freedom
            self._freedom = MOST_WINDOWS
        for trial in list(self._trials)[: max(len(self._trials) - MOST_TRIALS, 0)]:
            del self._trials[trial]

    # Storage.

    def as_json(self) -> dict[str, Any]:
        """Return everything that is known, for `from_json`."""
        prior = self._prior
        return {
            "prior": None if prior is None else {"nodes": list(prior.nodes), "rates": list(prior.rates)},
            "stays": [
                [trial, number, stay.size, stay.windows, stay.log_rate, stay.scatter]
                for (trial, number), stay in self._stays.items()
            ],
            "merged": {str(size): [old.count, old.mean] for size, old in self._merged.items()},
            "trials": {trial: [old.count, old.mean] for trial, old in self._trials.items()},
            "noise": [self._scatter, self._freedom],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> RateBelief:
        """Rebuild the belief from the result of `as_json`. Missing keys count as not known."""
        prior = found.get("prior")
        belief = cls(Curve(tuple(prior["nodes"]), tuple(prior["rates"])) if prior else None)
        for trial, number, *stay in found.get("stays", ()):
            belief._stays[trial, number] = Stay(*stay)
        belief._merged = {int(size): _Pooled(*old) for size, old in found.get("merged", {}).items()}
        belief._trials = {trial: _Pooled(*old) for trial, old in found.get("trials", {}).items()}
        belief._scatter, belief._freedom = found.get("noise", (0.0, 0.0))
        belief._changed()
        return belief


def _kernel(a: Floats, b: Floats) -> Floats:
    """Return the covariance of log(rate / n) at two lists of log2 n."""
    apart = (a[:, None] - b[None, :]) / BEND_OCTAVES
    found: Floats = LEVEL_SD**2 + SLOPE_SD**2 * a[:, None] * b[None, :] + BEND_SD**2 * np.exp(-0.5 * apart**2)
    return found


def _binned(by_size: Mapping[int, _Pooled]) -> list[tuple[float, _Pooled]]:
    """Return the means by log2 of their size. Many sizes are put together where they are close."""
    if len(by_size) <= _BINS:
        return [(math.log2(size), mean) for size, mean in sorted(by_size.items())]
    bins: dict[int, tuple[_Pooled, _Pooled]] = {}
    for size, mean in by_size.items():
        place, value = bins.setdefault(round(4 * math.log2(size)), (_Pooled(), _Pooled()))
        place.add(mean.count, math.log2(size))
        value.add(mean.count, mean.mean)
    return sorted(((place.mean, value) for place, value in bins.values()), key=lambda pair: pair[0])


def _offset_variance(own: Mapping[str, tuple[float, float]], variance: float) -> float:
    """Return τ²: how much trials differ beyond what the noise of their stays explains."""
    beyond = math.fsum(mean**2 - variance / count for count, mean in own.values())
    return max((OFFSET_WEIGHT * OFFSET_SD**2 + beyond) / (OFFSET_WEIGHT + len(own)), OFFSET_SD**2)


def _usual_offset(own: Mapping[str, tuple[float, float]], variance: float, offset_variance: float) -> float:
    """Return the mean offset of the last trials. So a script that became slower is noticed."""
    recent = list(own.values())[-RECENT_TRIALS:]
    weights = [1 / (offset_variance + variance / count) for count, _ in recent]
    return math.fsum(w * mean for w, (_, mean) in zip(weights, recent, strict=True)) / math.fsum(weights)
