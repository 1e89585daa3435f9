"""Profiles of the machines that can be synthesised: how often nodes join the pool, in what groups, and for how long.

`synth` turns a profile into a trace. It is calibrated by these numbers; its docstring says to what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from bftrainer.core.trace import Floats


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A positive heavy-tailed distribution: its quantiles at a few shares, log-linear between them."""

    points: tuple[tuple[float, float], ...]
    """(share, value), both ascending, from share 0 to share 1."""

    def at(self, share: Floats) -> Floats:
        """The values below which `share` of the distribution lies."""
        shares, values = np.array(self.points).T
        logs: Floats = np.interp(share, shares, np.log(values))
        return np.exp(logs)

    @property
    def smallest(self) -> float:
        """The value at share 0."""
        return self.points[0][1]

    @property
    def largest(self) -> float:
        """The value at share 1."""
        return self.points[-1][1]


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """Properties of the idle nodes of a machine."""

    name: str
    nodes: int
    """The machine's size, which `group_nodes` refers to."""
    groups_per_hour: float
    """How often a job ends and leaves nodes idle. Groups that coincide on the clock's grid are one join event."""
    group_nodes: Quantiles
    """Number of nodes of such a group."""
    length_s: Quantiles
    """How long a node stays idle, each node counting once."""
    split: float
    """A group of n nodes falls into 1 + Poisson(split · ln n) blocks; the nodes of a block leave together."""
    slack: float
    """Blocks whose drawn lengths allow a common end within this share of each need only one leave event."""
    sway: float
    """A block may leave earlier or later than drawn by this share of its length, to leave together with others."""
    appetite: float
    """The tail exponent of how strongly leave events draw blocks: the smaller, the more leave in few large events."""
    mood: float
    """How strongly large groups and long lengths come at the same times, 0 to 1: it makes the pool bursty."""
    mood_hours: float
    """How long such bursty times last."""
    hourly_cv: float
    """How much the rate of groups varies from hour to hour: its standard deviation over its mean."""
    resolution_s: float
    """Events happen at multiples of this: the polling interval, or the resolution of the scheduler's log."""
    grain: int = 1
    """Nodes are handed out in multiples of this."""


_SUMMIT = MachineProfile(
    name="summit",
    nodes=4608,
    groups_per_hour=45.0,
    group_nodes=Quantiles(
        (
            (0.0, 1),
            (0.30, 1),
            (0.50, 4),
            (0.75, 16),
            (0.90, 51),
            (0.95, 116),
            (0.98, 285),
            (0.99, 570),
            (0.995, 1060),
            (0.999, 1700),
            (1.0, 2800),
        )
    ),
    length_s=Quantiles(
        (
            (0.0, 70),
            (0.05, 80),
            (0.10, 91),
            (0.20, 138),
            (0.25, 160),
            (0.30, 197),
            (0.40, 280),
            (0.50, 430),
            (0.58, 600),
            (0.70, 1250),
            (0.75, 1560),
            (0.80, 1950),
            (0.85, 2550),
            (0.90, 3450),
            (0.95, 5000),
            (0.98, 7300),
            (0.99, 10300),
            (0.995, 13000),
            (0.999, 22000),
            (1.0, 70000),
        )
    ),
    split=0.65,
    slack=0.08,
    sway=0.3,
    appetite=0.6,
    mood=0.37,
    mood_hours=1.0,
    hourly_cv=0.46,
    resolution_s=10.0,
)

_THETA = MachineProfile(
    name="theta",
    nodes=4392,
    groups_per_hour=6.3,
    group_nodes=Quantiles(
        (
            (0.0, 4),
            (0.10, 32),
            (0.25, 128),
            (0.70, 128),
            (0.80, 256),
            (0.90, 384),
            (0.95, 768),
            (0.99, 1600),
            (1.0, 3000),
        )
    ),
    length_s=Quantiles(
        (
            (0.0, 30),
            (0.10, 75),
            (0.25, 200),
            (0.50, 600),
            (0.75, 1650),
            (0.90, 3700),
            (0.95, 5500),
            (0.99, 11000),
            (0.999, 24000),
            (1.0, 90000),
        )
    ),
    split=0.13,
    slack=0.05,
    sway=0.3,
    appetite=0.6,
    mood=0.3,
    mood_hours=2.0,
    hourly_cv=0.46,
    resolution_s=1.0,
)

_MIRA = MachineProfile(
    name="mira",
    nodes=49152,
    groups_per_hour=2.8,
    group_nodes=Quantiles(
        (
            (0.0, 512),
            (0.45, 512),
            (0.55, 1024),
            (0.70, 1024),
            (0.78, 2048),
            (0.86, 4096),
            (0.93, 8192),
            (0.98, 12288),
            (1.0, 24576),
        )
    ),
    length_s=Quantiles(
        (
            (0.0, 60),
            (0.10, 150),
            (0.25, 450),
            (0.50, 1400),
            (0.75, 3500),
            (0.90, 7900),
            (0.95, 12000),
            (0.99, 22000),
            (0.999, 45000),
            (1.0, 120000),
        )
    ),
    split=0.18,
    slack=0.05,
    sway=0.3,
    appetite=0.6,
    mood=0.3,
    mood_hours=2.0,
    hourly_cv=0.46,
    resolution_s=1.0,
    grain=512,
)

PROFILES: Mapping[str, MachineProfile] = MappingProxyType({p.name: p for p in (_SUMMIT, _THETA, _MIRA)})
