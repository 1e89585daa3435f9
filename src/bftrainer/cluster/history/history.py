"""`History` serves the dashboard's data, limited to what one viewer may see.

The data are the pool and its nodes over time, decisions, finished trainers and one trainer's reports.
`http/dashboard.py` calls it. Reading (`queries.py`), drawing and compressing happen in threads, one at a time. Results
are cached briefly, because every open page asks for the same. Users see the names of their own trainers only.
"""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bftrainer.cluster.history.best import GroupTrial, read_trials
from bftrainer.cluster.history.decisions import MOST_DECISIONS, read_decisions
from bftrainer.cluster.history.queries import PoolHistory, read_finished, read_past, read_points, read_rescales
from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.json_columns import encoded
from bftrainer.dashboard import timeline
from bftrainer.dashboard.timeline import Cells, Interval

SHORTEST_S, LONGEST_S = 60.0, 31 * 86400.0
OTHERS = "someone else"
_KEPT_S = 2.0
_PAST_KEPT_S = 30.0
_MOST_ANSWERS, _MOST_PASTS = 16, 2
"""Limits of the two caches. One `PoolHistory` may take a hundred megabytes."""
_PACKED_FROM = 20_000
"""Bytes from which a body is compressed; compressing less is not worth it."""
_MOST_RESCALES = 100

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Viewer:
    """The owner whose data may be seen. None: an admin, who sees everything."""

    owner: str | None


@dataclass(frozen=True, slots=True)
class Asked:
    """Requested window of time and its resolution."""

    seconds: float
    cells: int
    end: float | None = None
    """End of the window; None: now."""


class JsonBody(NamedTuple):
    """A JSON body, plain and compressed. `packed` is None if the body is too short to compress."""

    plain: bytes
    packed: bytes | None


class History:
    """History of one controller, for its dashboard."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._turn = asyncio.Semaphore(1)
        self._pasts: dict[float, tuple[float, PoolHistory]] = {}
        self._answers: dict[tuple[str, Asked, Viewer], tuple[float, JsonBody]] = {}

    async def pool(self, asked: Asked, viewer: Viewer) -> JsonBody:
        """Return the pool's size and use over time, as JSON."""
        return await self._answer("pool", asked, viewer, pool_over_time)

    async def nodes(self, asked: Asked, viewer: Viewer) -> JsonBody:
        """Return which trainer was on which node over time, as JSON."""
        return await self._answer("nodes", asked, viewer, nodes_over_time)

    async def decisions(self, before: int | None, limit: int, viewer: Viewer) -> JsonBody:
        """Return decisions, newest first, as JSON.

        `before` in the result is the argument for the next page; it is null if there is no more.
        """
        limit = min(limit, MOST_DECISIONS)

        def read(db: Database) -> JsonBody:
            found, following = read_decisions(db, before or 1 << 62, limit, viewer.owner)
            return _written({"decisions": found, "before": following})

        return await self._read(read)

    async def finished(self, search: str, before: int | None, limit: int, viewer: Viewer) -> JsonBody:
        """Return finished trainers, newest first, as JSON. `before` in the result is the argument for the next page."""

        def read(db: Database) -> JsonBody:
            found, following = read_finished(db, search, before or 1 << 62, limit, viewer.owner)
            return _written({"trainers": found, "before": following})

        return await self._read(read)

    async def trainer(self, trainer: str) -> JsonBody:
        """Return what a trainer reported over time and its newest rescales, as JSON."""

        def read(db: Database) -> JsonBody:
            points = read_points(db, int(trainer[1:]))
            return _written({"points": points, "rescales": read_rescales(db, trainer, _MOST_RESCALES)})

        return await self._read(read)

    async def trials(self, group: str, viewer: Viewer) -> list[GroupTrial]:
        """Return the stored trainers of a group, with the extremes of their metrics."""
        return await self._read(lambda db: read_trials(db, group, viewer.owner))

    async def _answer(
        self, what: str, asked: Asked, viewer: Viewer, make: Callable[[PoolHistory, int, Viewer], dict[str, Any]]
    ) -> JsonBody:
        key = (what, asked, viewer)
        async with self._turn:
            now = self._clock()
            fresh_s = max(_KEPT_S, asked.seconds / asked.cells / 2)
            kept = self._answers.get(key)
            if kept is not None and 0 <= now - kept[0] < fresh_s:
                return kept[1]
            past = await self._past(asked, now, fresh_s)
            made = await asyncio.to_thread(lambda: _written(make(past, asked.cells, viewer)))
            _put(self._answers, key, (now, made), _MOST_ANSWERS)
            return made

    async def _past(self, asked: Asked, now: float, fresh_s: float) -> PoolHistory:
        """Return everything that happened in a window.

        Only a window that ends now is cached, and only briefly, because it is large.
        """
        if asked.end is not None:
            end = min(asked.end, now)
            return await self._in_thread(lambda db: read_past(db, end - asked.seconds, end))
        kept = self._pasts.get(asked.seconds)
        if kept is None or not 0 <= now - kept[0] < min(fresh_s, _PAST_KEPT_S):
            self._pasts.pop(asked.seconds, None)
            kept = now, await self._in_thread(lambda db: read_past(db, now - asked.seconds, now))
            _put(self._pasts, asked.seconds, kept, _MOST_PASTS)
            asyncio.get_running_loop().call_later(_PAST_KEPT_S, self._drop, asked.seconds, kept)
        return kept[1]

    def _drop(self, seconds: float, old: tuple[float, PoolHistory]) -> None:
        if self._pasts.get(seconds) is old:
            del self._pasts[seconds]

    async def _read(self, read: Callable[[Database], T]) -> T:
        async with self._turn:
            return await self._in_thread(read)

    async def _in_thread(self, read: Callable[[Database], T]) -> T:
        def run() -> T:
            db = Database.open(self._path, read_only=True)
            try:
                return read(db)
            finally:
                db.close()

        return await asyncio.to_thread(run)


def _written(values: dict[str, Any]) -> JsonBody:
    plain = encoded(values).encode()
    return JsonBody(plain, gzip.compress(plain, 1) if len(plain) > _PACKED_FROM else None)


def _put(kept: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    kept.pop(key, None)
    while len(kept) >= most:
        del kept[next(iter(kept))]
    kept[key] = value


def pool_over_time(past: PoolHistory, cells: int, viewer: Viewer) -> dict[str, Any]:
    """Return the number of nodes and of nodes with a worker over time, and count preemptions and rescales."""
    window = Cells(past.start, past.end, cells)
    gpu_hours, used_gpu_hours = _gpu_hours(past)
    there = np.array([(start, end) for _, start, end in past.present]).reshape(-1, 2)
    busy = timeline.busy_times(
        [Interval(*one) for one in past.present], [Interval(one.node, one.start, one.end) for one in past.held]
    )
    return {
        "start": past.start,
        "end": past.end,
        "cells": cells,
        "pool": timeline.series(window, there[:, 0], there[:, 1]),
        "used": timeline.series(window, *busy),
        "node_hours": float((there[:, 1] - there[:, 0]).sum()) / 3600,
        "used_node_hours": float((busy[1] - busy[0]).sum()) / 3600,
        "gpu_hours": gpu_hours,
        "used_gpu_hours": used_gpu_hours,
        "preemptions": len(past.taken),
        "rescales": sum(why != "start" for _, _, why in past.rescales),
    }


def _gpu_hours(past: PoolHistory) -> tuple[float, float]:
    """Return the GPU-hours of the nodes, and of the nodes with a worker."""
    pool = used = 0.0
    for count in set(past.gpus.values()):
        there = [Interval(*one) for one in past.present if past.gpus.get(one[0]) == count]
        held = [Interval(one.node, one.start, one.end) for one in past.held if past.gpus.get(one.node) == count]
        starts, ends = timeline.busy_times(there, held)
        pool += count * sum(one.end - one.start for one in there) / 3600
        used += count * float((ends - starts).sum()) / 3600
    return pool, used


def nodes_over_time(past: PoolHistory, cells: int, viewer: Viewer) -> dict[str, Any]:
    """Return a grid of nodes (rows) and time (cells), with the trainers in it by number.

    In the runs, 1 stands for `who[0]`, 2 for `who[1]`, and so on.
    """
    who: list[dict[str, Any]] = []
    index: dict[int, int] = {}

    def number(trainer: int) -> int:
        if trainer not in index:
            known = past.trainers.get(trainer)
            visible = viewer.owner is None or (known is not None and known.owner == viewer.owner)
            if not visible and (other := next((i for i, one in enumerate(who) if one["id"] is None), None)) is not None:
                index[trainer] = other + 1
                return other + 1
            name = (known.name if known is not None else f"t{trainer}") if visible else OTHERS
            who.append({"id": f"t{trainer}" if visible else None, "name": name, "place": trainer if visible else -1})
            index[trainer] = len(who)
        return index[trainer]

    present = [Interval(node, start, end) for node, start, end in past.present]
    used = [Interval(one.node, one.start, one.end, number(one.trainer)) for one in past.held]
    found = timeline.gantt(Cells(past.start, past.end, cells), present, used)
    window = Cells(past.start, past.end, found["cells"])
    row = {node: i for i, node in enumerate(found["nodes"])}
    taken = [[row[node], window.at(time)] for time, node, _ in past.taken if node in row]
    return {
        **found,
        "who": who,
        **timeline.preemption_marks(taken),
        "preemptions": timeline.events_per_cell(window, (time for time, _, _ in past.taken)),
        "rescales": timeline.events_per_cell(window, (time for time, _, why in past.rescales if why != "start")),
    }
