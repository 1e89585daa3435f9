"""What the page draws, as one viewer may see it: the pool and its nodes over time, decisions, a trainer's reports.

`page.py` asks; reading (`history_rows.py`), drawing and compressing take place in threads, one at a time, and what was
found is kept for a moment, since every open page asks the same. Users see the names of their own trainers only.
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

from bftrainer.cluster.columns import encoded
from bftrainer.cluster.database import Database
from bftrainer.cluster.decisions import MOST_DECISIONS, read_decisions
from bftrainer.cluster.history_rows import Past, read_finished, read_past, read_points, read_rescales
from bftrainer.dashboard import timeline
from bftrainer.dashboard.timeline import Cells, Interval

SHORTEST_S, LONGEST_S = 60.0, 31 * 86400.0
OTHERS = "someone else"
_KEPT_S = 2.0
_PAST_KEPT_S = 30.0
_MOST_ANSWERS, _MOST_PASTS = 16, 2
"""Kept. A past may take a hundred megabytes."""
_PACKED_FROM = 20_000
"""Bytes; less is not worth it."""
_MOST_RESCALES = 100

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks. None: an admin, who sees all."""

    owner: str | None


@dataclass(frozen=True, slots=True)
class Asked:
    """Which window, and how fine."""

    seconds: float
    cells: int
    end: float | None = None
    """None: now."""


class Answer(NamedTuple):
    """JSON, as it is and compressed; None: too little to compress."""

    plain: bytes
    packed: bytes | None


class History:
    """The past of one controller, for its page."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._turn = asyncio.Semaphore(1)
        self._pasts: dict[float, tuple[float, Past]] = {}
        self._answers: dict[tuple[str, Asked, Viewer], tuple[float, Answer]] = {}

    async def pool(self, asked: Asked, viewer: Viewer) -> Answer:
        """The pool's size and use over time, as JSON."""
        return await self._answer("pool", asked, viewer, pool_over_time)

    async def nodes(self, asked: Asked, viewer: Viewer) -> Answer:
        """Who was on which node, as JSON."""
        return await self._answer("nodes", asked, viewer, nodes_over_time)

    async def decisions(self, before: int | None, limit: int, viewer: Viewer) -> Answer:
        """Decisions, newest first, as JSON; `before` in it is what to ask for next, if there may be more."""
        limit = min(limit, MOST_DECISIONS)

        def read(db: Database) -> Answer:
            found, following = read_decisions(db, before or 1 << 62, limit, viewer.owner)
            return _written({"decisions": found, "before": following})

        return await self._read(read)

    async def finished(self, search: str, before: int | None, limit: int, viewer: Viewer) -> Answer:
        """Trainers that are finished, newest first, as JSON; `before` in it is what to ask for next."""

        def read(db: Database) -> Answer:
            found, following = read_finished(db, search, before or 1 << 62, limit, viewer.owner)
            return _written({"trainers": found, "before": following})

        return await self._read(read)

    async def trainer(self, trainer: str) -> Answer:
        """What a trainer reported over time and its newest rescales, as JSON."""

        def read(db: Database) -> Answer:
            points = read_points(db, int(trainer[1:]))
            return _written({"points": points, "rescales": read_rescales(db, trainer, _MOST_RESCALES)})

        return await self._read(read)

    async def _answer(
        self, what: str, asked: Asked, viewer: Viewer, make: Callable[[Past, int, Viewer], dict[str, Any]]
    ) -> Answer:
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

    async def _past(self, asked: Asked, now: float, fresh_s: float) -> Past:
        """All of a window; only of one that ends now is it kept, and not for long: it is large."""
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

    def _drop(self, seconds: float, old: tuple[float, Past]) -> None:
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


def _written(values: dict[str, Any]) -> Answer:
    plain = encoded(values).encode()
    return Answer(plain, gzip.compress(plain, 1) if len(plain) > _PACKED_FROM else None)


def _put(kept: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    kept.pop(key, None)
    while len(kept) >= most:
        del kept[next(iter(kept))]
    kept[key] = value


def pool_over_time(past: Past, cells: int, viewer: Viewer) -> dict[str, Any]:
    """How many nodes there were, how many of those had a worker, and when nodes were taken and trainers rescaled."""
    window = Cells(past.start, past.end, cells)
    there = np.array([(start, end) for _, start, end in past.present]).reshape(-1, 2)
    busy = timeline.together(
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
        "preemptions": len(past.taken),
        "rescales": sum(why != "start" for _, _, why in past.rescales),
    }


def nodes_over_time(past: Past, cells: int, viewer: Viewer) -> dict[str, Any]:
    """Nodes as rows and time as cells; trainers by number, `who[0]` standing for 1 in the runs."""
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
        **timeline.marks(taken),
        "preemptions": timeline.counted(window, (time for time, _, _ in past.taken)),
        "rescales": timeline.counted(window, (time for time, _, why in past.rescales if why != "start")),
    }
