"""Workers that are not there: how fast their trainer is, how far, and what they report of it.

`simulated_agents.py` has one for each process that a controller has started.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

WINDOW_S = 5.0
"""How often a measured rate changes: it is a median over many steps."""


@dataclass(slots=True)
class Training:
    """One trainer as its workers see it: how fast it is and how far."""

    rate: float
    total: int
    samples: float = 0.0
    world: int = 0
    at: float = 0.0

    @classmethod
    def of(cls, argv: tuple[str, ...]) -> Training:
        """By the arguments of its script, `--rate` and `--total`."""
        given = dict(zip(argv[1::2], argv[2::2], strict=False))
        return cls(float(given.get("--rate", 100)), int(given.get("--total", 1 << 60)))

    def speed(self, world: int) -> float:
        """Samples per second on so many nodes."""
        return float(self.rate * world**0.9)

    def advance(self, now: float) -> None:
        """Train up to now."""
        if self.world:
            self.samples = min(self.samples + self.speed(self.world) * (now - self.at), self.total)
        self.at = now


@dataclass(slots=True)
class Worker:
    """One process that is not there."""

    id: str
    trainer: str
    training: Training
    ready: bool = False
    newest: int = 0
    formed: int = 0
    members: tuple[str, ...] = ()
    ended: bool = False
    rates: dict[str, float] = field(default_factory=dict)
    measured_at: float = 0.0
    printed: int = 0
    printed_at: float = 0.0
    logged: bool = True

    def measure(self, now: float, rng: random.Random) -> None:
        """Have a new rate now and then."""
        if now - self.measured_at > WINDOW_S:
            self.measured_at = now
            measured = self.training.speed(self.training.world) * rng.uniform(0.98, 1.02)
            self.rates = {**self.rates, str(self.training.world): round(measured, 3)}

    def report(self, rng: random.Random) -> dict[str, Any]:
        """What it says once a second, a `protocol.Report`."""
        samples = int(self.training.samples)
        return {
            "generation": self.formed,
            "step": samples // 64,
            "epoch": 1,
            "samples": samples,
            "world": self.training.world,
            "rates": self.rates,
            "metrics": {"loss": round(rng.uniform(0.1, 2.0), 4), "accuracy": 0.5},
            "snapshot_step": samples // 640,
            "total": self.training.total,
            "epochs": None,
            "redone": 0,
            "windows": 12,
        }
