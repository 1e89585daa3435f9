"""The timeline reduces node intervals and pool sizes to a chart's resolution.

The controller (`cluster/history/history.py`) and the simulation report pass intervals in; the values that `draw.js`
draws come out. The result is bounded, however long the window and however large the machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bftrainer.util.text import natural

Floats = npt.NDArray[np.float64]

MOST_CELLS = 2000
MOST_ROWS = 1500
MOST_RUNS = 150_000
MOST_TAKEN = 4000
"""Limit of marks on single nodes."""

ABSENT, FREE = -1, 0
"""Values in a grid; trainers follow from 1."""


class Interval(NamedTuple):
    """Something that held on a node for a while.

    A tuple, because there may be a hundred thousand and tuples are the fastest to create.
    """

    node: str
    start: float
    end: float
    who: int = FREE


@dataclass(frozen=True, slots=True)
class Cells:
    """A window cut into equal cells: the pixels of a chart."""

    start: float
    end: float
    count: int

    @property
    def seconds(self) -> float:
        """Duration of one cell."""
        return (self.end - self.start) / self.count

    def at(self, time: float) -> int:
        """Return the cell in which a time lies; a time outside belongs to the nearest cell."""
        return min(max(int((time - self.start) / self.seconds), 0), self.count - 1)

    def edges(self) -> Floats:
        """Return the starts of all cells, and the end of the last one."""
        return np.linspace(self.start, self.end, self.count + 1)


def gantt(
    cells: Cells,
    present: Iterable[Interval],
    used: Iterable[Interval],
    nodes: Sequence[str] = (),
    most_runs: int = MOST_RUNS,
) -> dict[str, Any]:
    """Return one row per node (if there are very many: every second, third, …), with its users as runs of cells.

    A cell shows what held in its middle, so intervals too short for a pixel appear in the right proportion. `nodes`
    gives the order of the rows, if there is one.
    """
    layers = [list(present), list(used)]
    seen = {interval.node for layer in layers for interval in layer}
    names = [node for node in nodes if node in seen] if nodes else sorted(seen, key=natural)
    stride = math.ceil(len(names) / MOST_ROWS) or 1
    shown = names[::stride]
    row = {node: i for i, node in enumerate(shown)}
    count = min(cells.count, MOST_CELLS)
    while True:
        cells = Cells(cells.start, cells.end, count)
        grid = np.full((len(shown), count), ABSENT, dtype=np.int32)
        for layer in layers:
            _paint(grid, cells, layer, row)
        first, length, who, ends = _runs(grid)
        if len(first) <= most_runs or count <= 16:
            break
        count = max(16, int(0.7 * count))
    columns = np.stack((first, length, who), axis=1).ravel().tolist()
    return {
        "start": cells.start,
        "end": cells.end,
        "cells": count,
        "nodes": shown,
        "of_nodes": len(names),
        "runs": [columns[3 * a : 3 * b] for a, b in zip([0, *ends[:-1]], ends, strict=True)] if shown else [],
    }


def _paint(grid: npt.NDArray[np.int32], cells: Cells, layer: Sequence[Interval], row: dict[str, int]) -> None:
    columns = np.array([(row.get(node, -1), start, end, who) for node, start, end, who in layer], dtype=np.float64)
    columns = columns.reshape(-1, 4)[columns.reshape(-1, 4)[:, 0] >= 0]
    # From the first cell whose middle is not before the start, up to the first whose middle is not before the end.
    inside = np.clip(np.ceil((columns[:, 1:3] - cells.start) / cells.seconds - 0.5), 0, cells.count).astype(np.int64)
    length = np.maximum(inside[:, 1] - inside[:, 0], 0)
    first = columns[:, 0].astype(np.int64) * cells.count + inside[:, 0]
    # All cells of all spans at once; if two spans share a cell, the later one counts.
    before = np.cumsum(length) - length
    at = np.repeat(first - before, length) + np.arange(int(length.sum()))
    grid.ravel()[at] = np.repeat(columns[:, 3].astype(np.int32), length)


def _runs(
    grid: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[Any], list[int]]:
    """Return runs of equal cells, row after row, without absent ones; and the number of runs up to each row's end."""
    rows, count = grid.shape
    if not rows:
        none = np.zeros(0, dtype=np.int64)
        return none, none, none, []
    begins = np.ones(grid.shape, dtype=bool)
    begins[:, 1:] = grid[:, 1:] != grid[:, :-1]
    at = np.flatnonzero(begins.ravel())
    length = np.diff(np.append(at, rows * count))
    who = grid.ravel()[at]
    there = who != ABSENT
    at, length, who = at[there], length[there], who[there]
    ends = np.searchsorted(at, np.arange(1, rows + 1) * count).tolist()
    return at % count, length, who, ends


def series(cells: Cells, starts: Floats, ends: Floats) -> dict[str, list[float]]:
    """Return how many intervals hold at a time: lowest, mean and highest of each cell."""
    times = np.concatenate((starts, ends))
    deltas = np.concatenate((np.ones(len(starts)), -np.ones(len(ends))))
    order = np.argsort(times, kind="stable")
    times, levels = times[order], np.cumsum(deltas[order])
    edges = cells.edges()
    moments = np.unique(np.concatenate((times[(times > edges[0]) & (times < edges[-1])], edges)))
    # If several changes fall on one instant, the value after the last one held.
    found = np.searchsorted(times, moments[:-1], "right") - 1
    value = np.where(found >= 0, levels[found], 0.0) if len(levels) else np.zeros(len(moments) - 1)
    first = np.searchsorted(moments, edges[:-1])
    mean = np.add.reduceat(value * np.diff(moments), first) / np.diff(edges)
    return rounded_lines(np.minimum.reduceat(value, first), mean, np.maximum.reduceat(value, first))


def busy_times(present: Sequence[Interval], used: Sequence[Interval]) -> tuple[Floats, Floats]:
    """Return when present nodes had a worker: starts and ends.

    A worker may outlive its node's time in the pool (it shuts down while the node leaves), and the next worker may
    start meanwhile. A node counts once, and only while it is present.
    """
    nodes = {interval.node: i for i, interval in enumerate((*present, *used))}
    layers = [np.array([(nodes[one.node], one.start, one.end) for one in layer]) for layer in (present, used)]
    first, second = (layer.reshape(-1, 3) for layer in layers)
    counts = (len(first), len(first), len(second), len(second))
    times = np.concatenate((first[:, 1], first[:, 2], second[:, 1], second[:, 2]))
    order = np.lexsort((times, np.concatenate((first[:, 0], first[:, 0], second[:, 0], second[:, 0]))))
    times = times[order]
    # Each node's changes add up to zero, so the sums can run on from node to node.
    there, busy = (np.cumsum(np.repeat(steps, counts)[order]) for steps in ((1, -1, 0, 0), (0, 0, 1, -1)))
    on = np.flatnonzero((there > 0) & (busy > 0))
    return times[on], times[on + 1]


def rounded_lines(low: Floats, mean: Floats, high: Floats) -> dict[str, list[float]]:
    """Return the three lines of a series, with as few characters as possible."""
    return {"low": np.round(low, 2).tolist(), "mean": np.round(mean, 2).tolist(), "high": np.round(high, 2).tolist()}


def events_per_cell(cells: Cells, times: Iterable[float]) -> list[list[int]]:
    """Return the cells in which something happened, each with the number of times."""
    found: dict[int, int] = {}
    for time in times:
        if cells.start <= time <= cells.end:
            at = cells.at(time)
            found[at] = found.get(at, 0) + 1
    return [[at, found[at]] for at in sorted(found)]


def preemption_marks(taken: Sequence[list[int]]) -> dict[str, Any]:
    """Return where nodes were taken, as rows and cells in order of time.

    If there are too many, every second, third, … is marked: spread over all of the time, the marks show where more were
    taken and where less.
    """
    every = math.ceil(len(taken) / MOST_TAKEN) or 1
    return {"taken": list(taken[::every]), "taken_every": every}
