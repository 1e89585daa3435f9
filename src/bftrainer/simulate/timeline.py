"""Timeline of a replay: what was in force after each step of its clock.

`replay.py` adds a `TimelineStep` per step. Charts, pages and the paper's experiments read the `Timeline` by column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bftrainer.core.trace import Floats


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """One row per step of the clock: the values in force until the next step, and the losses at this step."""

    time: Floats
    pool: Floats
    used: Floats
    value: Floats
    """Value per second if no trainer stalled: samples per second under the throughput objective."""
    best_value: Floats
    """Best possible value per second for the trainers considered, at no cost."""
    outcome: Floats
    """Samples so far."""
    preemption: Floats
    """Samples lost to preemption so far."""
    rescale: Floats
    """Samples lost to rescaling so far."""
    decided: npt.NDArray[np.bool_]
    pool_event: npt.NDArray[np.bool_]


class TimelineStep(NamedTuple):
    """One row of the `Timeline`. A tuple, because a replay makes a hundred thousand."""

    time: float
    pool: int
    used: int
    value: float
    best_value: float
    outcome: float
    preemption: float
    rescale: float
    decided: bool
    pool_event: bool


def timeline_of(steps: Sequence[TimelineStep]) -> Timeline:
    """Return the timeline of the steps of a replay."""
    columns = dict(zip(TimelineStep._fields, np.array(steps, dtype=np.float64).T, strict=True))
    flags = {name: columns.pop(name).astype(bool) for name in ("decided", "pool_event")}
    return Timeline(**columns, **flags)
