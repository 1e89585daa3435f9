"""Queries on the controller's database return the past of the pool: nodes, workers, rescales.

The dashboard's charts are drawn from them. Queries are read-only and use their own connection, so they can run in
another thread than the controller's. SQLite does as much of the work as possible, because it lets other threads run
meanwhile.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bftrainer.cluster.launchers.base import HEAD
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.event_log import EventLog
from bftrainer.cluster.store.events import NodeJoined, Rescaled, kinds_of, quoted_kinds
from bftrainer.cluster.store.replay import POOL_EVENTS, PoolReplay
from bftrainer.errors import InputError

MOST_ROWS = 1_000_000
"""Limit of rows in a window, before they are reduced to a chart: a busy week of a thousand nodes."""


class WorkerSpan(NamedTuple):
    """Time that a worker spent on a node.

    A tuple, because there may be a hundred thousand and tuples are the fastest to create.
    """

    trainer: int
    node: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Known:
    """Name and owner of a trainer."""

    name: str
    owner: str


@dataclass(frozen=True, slots=True)
class PoolHistory:
    """Everything that happened to the pool in a window of time."""

    start: float
    end: float
    present: tuple[tuple[str, float, float], ...]
    """Node, start and end of each presence, cut to the window."""
    held: tuple[WorkerSpan, ...]
    taken: tuple[tuple[float, str, int], ...]
    """Time, node and trainer of each departure of a node with a worker on it."""
    rescales: tuple[tuple[float, int, str], ...]
    """Time, trainer and reason."""
    gpus: Mapping[str, int]
    """How many GPUs nodes have, or had when they were last in the pool. Nodes without GPUs are left out."""
    trainers: dict[int, Known]


_COUNT = f"""
SELECT (SELECT count(*) FROM events
        WHERE kind IN ({quoted_kinds(*POOL_EVENTS, Rescaled)}) AND seq >= ?1 AND seq < ?2)
     + (SELECT count(*) FROM workers WHERE (ended IS NULL OR ended > ?3) AND started < ?4)
     + (SELECT count(*) FROM trainers WHERE (ended IS NULL OR ended > ?3) AND submitted < ?4)
"""  # noqa: S608 - names from this program
_NEXT = f"""
SELECT node, kind, min(seq) FROM events WHERE kind IN ({quoted_kinds(*POOL_EVENTS)}) AND seq >= ? GROUP BY node
"""  # noqa: S608 - with min(), SQLite takes `kind` from the row that has the minimum


def read_past(db: Database, start: float, end: float) -> PoolHistory:
    """Read the history from `start` to `end`."""
    with db.transaction():
        log = EventLog(db)
        first, after = log.first_since(start), log.first_since(end)
        ((count,),) = db.rows(_COUNT, (first, after, start, end))
        if count > MOST_ROWS:
            raise InputError(
                f"too much happened in {end - start:,.0f} seconds to be drawn ({count:,} changes, at most "
                f"{MOST_ROWS:,}); ask for a shorter window"
            )
        changes = [
            (seq, time, kind, node)
            for kind in kinds_of(*POOL_EVENTS)
            for seq, time, node in db.rows(
                "SELECT seq, time, node FROM events WHERE kind = ? AND seq >= ? AND time < ?", (kind, first, end)
            )
        ]
        stayed = [node for node, kind, _ in db.rows(_NEXT, (after,)) if kind != NodeJoined.kind]
        here = db.rows("SELECT node, joined, leaving FROM nodes WHERE left IS NULL AND node <> ?", (HEAD,))
        workers = db.rows(
            "SELECT trainer, node, max(started, ?), min(ifnull(ended, ?), ?) FROM workers "
            "WHERE (ended IS NULL OR ended > ?) AND started < ? AND node <> ?",
            (start, end, end, start, end, HEAD),
        )
        rescales = db.rows(
            "SELECT time, trainer, ifnull(json_extract(data, '$.why'), '') FROM events "
            "WHERE kind = ? AND seq >= ? AND time < ?",
            (Rescaled.kind, first, end),
        )
        gpus = db.rows("SELECT node, gpus FROM nodes WHERE gpus > 0 AND node <> ?", (HEAD,))
        known = db.rows(
            "SELECT number, name, owner FROM trainers WHERE (ended IS NULL OR ended > ?) AND submitted < ?",
            (start, end),
        )
    held = tuple(map(WorkerSpan._make, workers))
    present = _present(sorted(changes), here, stayed, start, end)
    return PoolHistory(
        start,
        end,
        present,
        held,
        _taken(present, held, end),
        tuple((time, int(trainer[1:]), why) for time, trainer, why in rescales if trainer[1:].isdigit()),
        dict(gpus),
        {number: Known(name, owner) for number, name, owner in known},
    )


def _present(
    changes: Sequence[tuple[int, float, str, str]],
    here: Sequence[tuple[Any, ...]],
    stayed: Sequence[str],
    start: float,
    end: float,
) -> tuple[tuple[str, float, float], ...]:
    """Return when nodes were in the pool.

    A node that leaves in the window without having joined in it was present from the start. `here` are the nodes that
    are in the pool today. `stayed` are the nodes whose first event after the window is a departure.
    """
    found = []
    pool = PoolReplay()
    since, gone = pool.here, pool.gone
    for _, time, kind, node in changes:
        if kind == NodeJoined.kind:
            pool.join(node, time)
            continue
        began = since.get(node, start)
        if pool.depart(node) and time > began:
            found.append((node, max(began, start), min(time, end)))
    for node, joined, leaving in here:
        if node not in gone and joined < end and leaving is None:
            since.setdefault(node, max(joined, start))
    for node in stayed:
        if node not in gone:
            since.setdefault(node, start)
    found += [(node, max(began, start), end) for node, began in since.items() if began < end]
    return tuple(found)


def _taken(
    present: Sequence[tuple[str, float, float]], held: Sequence[WorkerSpan], end: float
) -> tuple[tuple[float, str, int], ...]:
    by_node: dict[str, list[WorkerSpan]] = {}
    for one in held:
        by_node.setdefault(one.node, []).append(one)
    for list_ in by_node.values():
        list_.sort(key=lambda one: one.start)
    found = []
    for node, _, left in present:
        spans = by_node.get(node)
        if left >= end or not spans:
            continue
        at = bisect_left(spans, left, key=lambda one: one.start) - 1
        if at >= 0 and spans[at].end >= left:
            found.append((left, node, spans[at].trainer))
    return tuple(sorted(found))


def read_points(db: Database, trainer: int) -> list[dict[str, Any]]:
    """Return the samples and metrics that a trainer reported over time."""
    sql = "SELECT time, samples, metrics, metrics_at FROM points WHERE trainer = ? ORDER BY time"
    return [
        {"time": time, "samples": samples, "metrics": json.loads(metrics), "metrics_at": json.loads(at)}
        for time, samples, metrics, at in db.rows(sql, (trainer,))
    ]


def read_rescales(db: Database, trainer: str, limit: int) -> list[dict[str, Any]]:
    """Return the newest rescales of a trainer, with their cost."""
    rows = db.rows(
        "SELECT time, data FROM events WHERE trainer = ? AND +kind = ? ORDER BY seq DESC LIMIT ?",
        (trainer, Rescaled.kind, limit),
    )
    keys = ("why", "world_before", "world", "pause_s", "form_s", "sync_s", "parts")
    return [
        {"time": time, **{key: found.get(key) for key in keys}} for time, data in rows for found in (json.loads(data),)
    ]


_OVER = """
SELECT number, name, owner, ifnull(json_extract(spec, '$.group'), ''), state, reason, submitted, ended, samples,
    node_seconds, gpu_seconds, metrics
FROM trainers WHERE state IN (SELECT value FROM json_each(?1)) AND number < ?2 AND (?3 IS NULL OR owner = ?3)
    AND (?4 = '' OR instr(lower(name || ' t' || number || ' ' || owner || ' ' || state || ' '
        || ifnull(json_extract(spec, '$.group'), '')), ?4) > 0)
ORDER BY number DESC LIMIT ?5
"""
_OVER_KEYS = (
    *("name", "owner", "group", "state", "reason", "submitted", "ended", "samples"),
    *("node_seconds", "gpu_seconds"),
)


def read_finished(
    db: Database, search: str, before: int, limit: int, owner: str | None
) -> tuple[list[dict[str, Any]], int | None]:
    """Return finished trainers, the newest first, with a text in their name, id, group, owner or state.

    With an `owner`, only that owner's trainers. The second value is the `before` of the next page, or None if there is
    no more.
    """
    rows = db.rows(_OVER, (json.dumps(FINISHED), before, owner, search.strip().lower(), limit))
    found = [
        {"id": f"t{number}", **dict(zip(_OVER_KEYS, columns, strict=True)), "metrics": json.loads(metrics or "{}")}
        for number, *columns, metrics in rows
    ]
    return found, rows[-1][0] if len(rows) == limit else None
