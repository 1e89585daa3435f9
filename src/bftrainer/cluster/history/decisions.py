"""The decision list shows each decision with the nodes lost before it.

A decision event holds each trainer's size before and after it. Nodes lost since the previous decision appear only in
the node events. This module combines both, so that the sizes add up. It only reads, on its own connection, as in
`queries.py`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any, NamedTuple

from bftrainer.cluster.store.assignments import assignments
from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.events import Decided, NodeJoined, quoted_kinds
from bftrainer.cluster.store.replay import POOL_EVENTS, PoolReplay

MOST_DECISIONS = 200
MOST_LOOKED_AT = 2000
"""Limit of decisions that one request reads: each holds the nodes of every trainer."""
_CHUNK = 100

_DECISIONS = f"""
SELECT seq, time, json_extract(data, '$.pool'), json_extract(data, '$.horizon_s'), json_extract(data, '$.changes'),
    json_extract(data, '$.reasons'), json_extract(data, '$.waiting'), json_extract(data, '$.ms')
FROM events WHERE kind = '{Decided.kind}' AND seq < ? ORDER BY seq DESC LIMIT ?
"""  # noqa: S608 - names from this program
_POOL = f"""
SELECT seq, time, kind, node FROM events WHERE kind IN ({quoted_kinds(*POOL_EVENTS)}) AND seq > ? AND seq < ?
ORDER BY seq
"""  # noqa: S608
_TRAINER = "SELECT name, owner, json_extract(spec, '$.min_nodes'), ended FROM trainers WHERE number = ?"


class _Known(NamedTuple):
    name: str
    owner: str
    min_nodes: int
    ended: float | None


def read_decisions(db: Database, before: int, limit: int, owner: str | None) -> tuple[list[dict[str, Any]], int | None]:
    """Return decisions that changed something or followed a loss, newest first.

    With an `owner`, they contain only what concerns that owner's trainers. At most `MOST_LOOKED_AT` decisions are read,
    however few match. The second value is the `before` of the next page, or None if there is no more.
    """
    found: list[dict[str, Any]] = []
    known: dict[str, _Known] = {}
    at, looked = before, 0
    with db.transaction():
        while looked < MOST_LOOKED_AT:
            rows = db.rows(_DECISIONS, (at, _CHUNK + 1))
            gone = _gone(db, rows)
            holders = _holders(db, [row[0] for row in rows], gone)
            for row, earlier in pairwise([*rows, None] if len(rows) <= _CHUNK else rows):
                assert row is not None
                at, looked = row[0], looked + 1
                lost = _lost(db, holders[earlier[0]], gone[at], known) if earlier is not None and at in gone else []
                one = _decision(db, row, lost, known, owner)
                if one["changes"] or one["lost"]:
                    found.append(one)
                if len(found) == limit:
                    return found, at if earlier is not None else None
            if len(rows) <= _CHUNK:
                return found, None
    return found, at


def _gone(db: Database, rows: list[tuple[Any, ...]]) -> dict[int, dict[str, float]]:
    """Return when nodes were lost, by the number of the decision that followed and by node."""
    found: defaultdict[int, dict[str, float]] = defaultdict(dict)
    if len(rows) < 2:
        return found
    following = sorted(row[0] for row in rows)
    place, pool = 1, PoolReplay()
    for seq, time, kind, node in db.rows(_POOL, (following[0], following[-1])):
        while following[place] < seq:
            place += 1
        if kind == NodeJoined.kind:
            pool.join(node, time)
        elif pool.depart(node):
            found[following[place]].setdefault(node, time)
    return found


def _holders(
    db: Database, decisions: list[int], gone: dict[int, dict[str, float]]
) -> dict[int, list[tuple[str, int, str]]]:
    """Return who held the nodes that were lost after a decision: trainer, number of its nodes, node, by decision.

    `decisions` are numbers, newest first; `gone` is what `_gone` found.
    """
    lost_after = {earlier: gone[at] for at, earlier in pairwise(decisions) if at in gone}
    if not lost_after:
        return {}
    return {
        seq: [
            (trainer, len(held), node)
            for trainer, held in nodes.items()
            if isinstance(held, list)
            for node in held
            if node in lost_after[seq]
        ]
        for seq, nodes in assignments(db, min(lost_after), max(lost_after))
        if seq in lost_after
    }


def _lost(
    db: Database, holders: list[tuple[str, int, str]], times: dict[str, float], known: dict[str, _Known]
) -> list[dict[str, Any]]:
    """Return the nodes that trainers lost out of those that the previous decision gave them.

    A trainer below its minimum has stopped.
    """
    taken: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    for trainer, held, node in holders:
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
