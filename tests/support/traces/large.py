"""Generated SWF logs in the shape of large machines' real ones: as many jobs, nodes and processors, and like sizes."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

EPOCH = 1_230_768_000


@dataclass(frozen=True)
class Shape:
    """What a generated log looks like. `sizes` are processors of a job, `weights` how often they occur."""

    jobs: int
    nodes: int
    processors: int
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    days: float
    busy: float
    """Share of processor-time in use."""

    def shorter(self, jobs: int) -> Shape:
        """The first part of such a log, with the same load."""
        return replace(self, jobs=jobs, days=self.days * jobs / self.jobs)


WIDE = Shape(
    jobs=68_936,
    nodes=40_960,
    processors=163_840,
    sizes=tuple(4 * n for n in (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 40960)),
    weights=(0.06, 0.11, 0.42, 0.2, 0.12, 0.055, 0.026, 0.006, 0.002, 0.001),
    days=240,
    busy=0.6,
)
"""A machine that gives nodes out by the hundred, four processors each."""

LONG = Shape(
    jobs=301_914,
    nodes=5_544,
    processors=93_312,
    sizes=(1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    weights=(0.15, 0.04, 0.06, 0.1, 0.09, 0.07, 0.08, 0.09, 0.08, 0.09, 0.085, 0.05, 0.015),
    days=600,
    busy=0.62,
)
"""A machine of many small jobs that share nodes; 93,312 processors do not divide evenly among its nodes."""


def write_swf(path: Path, shape: Shape, seed: int = 1) -> None:
    """Write a log: jobs arrive at random and start first come, first served as soon as they fit."""
    rng = np.random.default_rng(seed)
    weights = np.array(shape.weights)
    size = rng.choice(np.array(shape.sizes), shape.jobs, p=weights / weights.sum())
    span = shape.days * 86400
    submit = np.sort(rng.integers(0, int(span), shape.jobs))
    run = rng.lognormal(0.0, 1.4, shape.jobs)
    run = np.maximum(1, run * (shape.busy * span * shape.processors / (run * size).sum())).astype(np.int64)
    free, now = shape.processors, 0
    ends: list[tuple[int, int]] = []
    with path.open("w") as log:
        log.write(f"; Version: 2.2\n; UnixStartTime: {EPOCH}\n")
        log.write(f"; MaxNodes: {shape.nodes}\n; MaxProcs: {shape.processors}\n")
        for job, (at, need, seconds) in enumerate(zip(submit.tolist(), size.tolist(), run.tolist(), strict=True), 1):
            now = max(now, at)
            while ends and (ends[0][0] <= now or free < need):
                end, freed = heapq.heappop(ends)
                now, free = max(now, end), free + freed
            free -= need
            heapq.heappush(ends, (now + seconds, need))
            log.write(f"{job} {at} {now - at} {seconds} {need} -1 -1 {need} {2 * seconds} -1 1 1 1 1 1 -1 -1 -1\n")
