"""Decisions as the page lists them, with the nodes that trainers lost before each: so that sizes add up.

A decision says from how many nodes a trainer goes to how many. What was taken from it since the decision before is in
the log of nodes alone; both are put together here, read-only and beside the controller, as in `history_rows.py`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any, NamedTuple

from bftrainer.cluster.database import Database

MOST_DECISIONS = 200
MOST_LOOKED_AT = 2000
"""Decisions that a question goes through: each holds where every trainer was."""
_CHUNK = 100

_DECISIONS = """
SELECT seq, time, json_extract(data, '$.pool'), json_extract(data, '$.horizon_s'), json_extract(data, '$.changes'),
    json_extract(data, '$.reasons'), json_extract(data, '$.waiting'), json_extract(data, '$.ms')
FROM events WHERE kind = 'decision' AND seq < ? ORDER BY seq DESC LIMIT ?
"""
_GONE = """
SELECT seq, time, node FROM events WHERE kind IN ('node.leaving', 'node.left') AND seq > ? AND seq < ? ORDER BY seq
"""
_HOLDERS = """
SELECT holder.key, json_array_length(holder.value), node.value
FROM events, json_each(data, '$.nodes') AS holder, json_each(holder.value) AS node
WHERE seq = ? AND node.value IN (SELECT value FROM json_each(?))
"""
_TRAINER = "SELECT name, owner, json_extract(spec, '$.min_nodes'), ended FROM trainers WHERE number = ?"


class _Known(NamedTuple):
    name: str
    owner: str
    min_nodes: int
    ended: float | None


def read_decisions(db: Database, before: int, limit: int, owner: str | None) -> tuple[list[dict[str, Any]], int | None]:
    """Decisions that changed something or came after a loss, newest first; to an owner, what concerns their trainers.

    So many are looked at and no more, whatever is found among them. Also: what to ask for next, if there may be more.
    """
    found: list[dict[str, Any]] = []
    known: dict[str, _Known] = {}
    at, looked = before, 0
    with db.transaction():
        while looked < MOST_LOOKED_AT:
            rows = db.rows(_DECISIONS, (at, _CHUNK + 1))
            gone = _gone(db, rows)
            for row, earlier in pairwise([*rows, None] if len(rows) <= _CHUNK else rows):
                assert row is not None
                at, looked = row[0], looked + 1
                lost = _lost(db, earlier[0], gone[at], known) if earlier is not None and at in gone else []
                one = _decision(db, row, lost, known, owner)
                if one["changes"] or one["lost"]:
                    found.append(one)
                if len(found) == limit:
                    return found, at if earlier is not None else None
            if len(rows) <= _CHUNK:
                return found, None
    return found, at


def _gone(db: Database, rows: list[tuple[Any, ...]]) -> dict[int, list[tuple[float, str]]]:
    """Times and names of nodes that left, by the decision that followed. One that had said so before leaves once."""
    found: defaultdict[int, list[tuple[float, str]]] = defaultdict(list)
    if len(rows) < 2:
        return found
    following = sorted(row[0] for row in rows)
    place = 1
    for seq, time, node in db.rows(_GONE, (following[0], following[-1])):
        while following[place] < seq:
            place += 1
        if all(node != other for _, other in found[following[place]]):
            found[following[place]].append((time, node))
    return found


def _lost(db: Database, earlier: int, gone: list[tuple[float, str]], known: dict[str, _Known]) -> list[dict[str, Any]]:
    """What trainers lost of the nodes that the decision before gave them. Below its minimum a trainer has stopped."""
    times = {node: time for time, node in gone}
    taken: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    for trainer, held, node in db.rows(_HOLDERS, (earlier, json.dumps(list(times)))):
        ended = _about(db, trainer, known).ended
        if ended is None or ended > times[node]:
            taken[trainer, held].append(node)
    return [
        {
            "trainer": trainer,
            "time": max(times[node] for node in nodes),
            "nodes": sorted(nodes),
            "before": held,
            "after": left if (left := held - len(nodes)) >= known[trainer].min_nodes else 0,
            "min_nodes": known[trainer].min_nodes,
        }
        for (trainer, held), nodes in taken.items()
    ]


def _about(db: Database, trainer: str, known: dict[str, _Known]) -> _Known:
    if trainer not in known:
        row = db.row(_TRAINER, (int(trainer[1:]),)) if trainer[1:].isdigit() else None
        known[trainer] = (
            _Known(row[0], row[1], row[2] or 1, row[3]) if row is not None else _Known(trainer, "", 1, None)
        )
    return known[trainer]


def _decision(
    db: Database, row: tuple[Any, ...], lost: list[dict[str, Any]], known: dict[str, _Known], owner: str | None
) -> dict[str, Any]:
    seq, time, pool, horizon_s, changes, reasons, waiting, ms = row

    def visible(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        about = [(one, _about(db, one["trainer"], known)) for one in found]
        return [{**one, "name": trainer.name} for one, trainer in about if owner is None or trainer.owner == owner]

    told = zip(json.loads(changes or "[]"), json.loads(reasons or "[]"), strict=False)
    return {
        "seq": seq,
        "time": time,
        "pool": pool,
        "horizon_s": horizon_s,
        "changes": visible([{**change, "reason": reason} for change, reason in told]),
        "lost": visible(lost),
        "waiting": waiting if owner is None else None,
        "ms": ms,
    }
