"""Direction of a metric: whether its smaller or its greater values are better, judged by its name.

The controller uses it for requests that do not say it, and the commands to say which one applies.
"""

from __future__ import annotations

from typing import Literal

Direction = Literal["min", "max"]

LESS_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse")
"""Parts of the names of metrics of which smaller values are better."""


def default_direction(metric: str) -> Direction:
    """Return which values of a metric are better, by its name: `min` or `max`."""
    return "min" if any(part in metric.lower() for part in LESS_IS_BETTER) else "max"
