"""First-fit layout of jobs onto nodes, for logs that give processor counts but no nodes.

Jobs are laid out in order of their start. The outcome has the machine's true load at every instant. Which node is idle,
and so how long each fragment is, depends on the first-fit rule; the report of `importing.py` says so.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bftrainer.core.trace import Floats, Indices
from bftrainer.traces.ranges import NodeSpans
from bftrainer.traces.readers.idle import IdleSpans

_BLOCK = 256
"""Nodes whose free processors are added up, so that full parts of the machine are passed over at once."""

Amounts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Outcome of first-fit: when nodes were without jobs, and what did not fit."""

    idle: NodeSpans
    """From minus to plus infinity: before its first and after its last job a node is idle too."""
    clipped_jobs: int
    clipped_share: float
    """Share of all processor-seconds beyond the machine's processors."""


class _Machine:
    """Free processors of every node, and since when nodes without any job are idle."""

    def __init__(self, nodes: int, processors: int) -> None:
        # As even as whole processors allow, and exact in total: 2004 on 151 nodes are 41 nodes of 14 and 110 of 13.
        self._whole = np.diff(np.arange(nodes + 1, dtype=np.int64) * processors // nodes)
        self._free = self._whole.copy()
        self._free_in_block = np.add.reduceat(self._free, np.arange(0, nodes, _BLOCK))
        self._idle_since = np.full(nodes, -np.inf)
        self.free = processors
        self.idle = IdleSpans()

    def take(self, need: int, now: float) -> tuple[Indices, Amounts]:
        """Take `need` processors, at most the free ones, of the lowest-numbered nodes: these nodes and the amounts."""
        through = self._free_in_block.cumsum()
        low = int(through.searchsorted(0, "right")) * _BLOCK
        high = (int(through.searchsorted(need)) + 1) * _BLOCK
        part = self._free[low:high]
        where = part.nonzero()[0]
        amount = part[where]
        taken = amount.cumsum()
        last = int(taken.searchsorted(need))
        nodes: Indices = (where[: last + 1] + low).astype(np.int32)
        amount = amount[: last + 1].copy()
        was_idle = nodes[amount == self._whole[nodes]]
        self.idle.add(was_idle, self._idle_since[was_idle], now)
        amount[-1] -= int(taken[last]) - need
        self._free[nodes] -= amount
        np.subtract.at(self._free_in_block, nodes // _BLOCK, amount)
        self.free -= need
        return nodes, amount

    def give(self, where: Indices, amount: Amounts, now: float) -> None:
        """Free what `take` returned."""
        free = self._free[where] + amount
        self._free[where] = free
        np.add.at(self._free_in_block, where // _BLOCK, amount)
        self._idle_since[where[free == self._whole[where]]] = now
        self.free += int(amount.sum())

    def idle_for_ever(self) -> None:
        """Note that the nodes without jobs stay so."""
        idle = np.flatnonzero(self._free == self._whole).astype(np.int32)
        self.idle.add(idle, self._idle_since[idle], np.inf)


def lay_first_fit(start: Floats, end: Floats, processors: Sequence[int], nodes: int, machine_processors: int) -> Layout:
    """Give each job the free processors of the lowest-numbered nodes. Jobs beyond the machine's size are clipped."""
    machine = _Machine(nodes, machine_processors)
    releases: list[tuple[float, int]] = []
    held: dict[int, tuple[Indices, Amounts]] = {}
    clipped_jobs, clipped, asked_for = 0, 0.0, 0.0

    def release(now: float) -> None:
        while releases and releases[0][0] <= now:
            until, job = heapq.heappop(releases)
            machine.give(*held.pop(job), until)

    for job in np.lexsort((end, start)).tolist():
        now, until, need = float(start[job]), float(end[job]), processors[job]
        release(now)
        asked_for += need * (until - now)
        if machine.free < need:
            clipped_jobs += 1
            clipped += (need - machine.free) * (until - now)
            need = machine.free
        if need <= 0 or until <= now:
            continue
        held[job] = machine.take(need, now)
        heapq.heappush(releases, (until, job))
    release(np.inf)
    machine.idle_for_ever()
    return Layout(machine.idle.spans(), clipped_jobs, clipped / asked_for if asked_for else 0.0)
