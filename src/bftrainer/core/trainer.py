"""A trainer is an elastic training job that may grow and shrink while it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bftrainer.core.curve import Curve
from bftrainer.errors import InputError


@dataclass(frozen=True, slots=True)
class Trainer:
    """Description of an elastic training job. The paper's symbols appear beside our words once, here."""

    name: str
    curve: Curve
    min_nodes: int = 1  # N_j^min
    max_nodes: int = 64  # N_j^max
    up_s: float = 0.0  # R_j^up, seconds lost when it grows
    down_s: float = 0.0  # R_j^dw, seconds lost when it shrinks
    work: float = math.inf
    """Samples to process before the trainer is done."""
    submit: float = 0.0
    """Submission time, in seconds since 1970 UTC."""
    owner: str = ""
    weight: float = 1.0
    """Priority, used by the weighted objectives."""
    model: str = ""
    start_s: float = 0.0
    """Seconds from giving a node to the trainer to the node's first step. The others go on meanwhile."""

    def __post_init__(self) -> None:
        def require(good: bool, field: str, rule: str, value: object) -> None:
            if not good:
                raise InputError(f"trainer {self.name!r}: {field} must be {rule}, but got {value!r}")

        require(bool(self.name), "name", "a name", self.name)
        for field in ("min_nodes", "max_nodes"):
            value = getattr(self, field)
            require(isinstance(value, int) and not isinstance(value, bool), field, "a whole number", value)
        require(self.min_nodes >= 1, "min_nodes", "1 or more", self.min_nodes)
        require(self.max_nodes >= self.min_nodes, "max_nodes", f"at least min_nodes ({self.min_nodes})", self.max_nodes)
        for field in ("up_s", "down_s", "start_s"):
            value = getattr(self, field)
            require(math.isfinite(value) and value >= 0, field, "a number of seconds, 0 or more", value)
        require(self.work > 0, "work", "a number of samples above 0", self.work)
        require(math.isfinite(self.submit), "submit", "a time", self.submit)
        require(math.isfinite(self.weight) and self.weight > 0, "weight", "a number above 0", self.weight)
