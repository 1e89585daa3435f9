"""Decisions are stored as changes: which nodes each trainer gave up and got since the decision before.

A decision of ten thousand nodes takes 130 kB in full and a few hundred bytes as changes. `EventLog` writes decisions
through `DecisionWriter` and reads them through `DecisionReader`, so that its callers always see whole decisions. Every
`FULL_EVERY`-th decision is stored in full, as older versions stored all of them. `event_log.py` keeps the assignment
where a trimmed log begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.events import Decided
from bftrainer.cluster.store.json_columns import decoded_object

FULL_EVERY = 200
"""A reader that wants one decision reads at most this many."""
AT_THE_CUT = "store.assigned_at_cut"
"""Key in the store of the nodes by trainer after the last decision that was dropped."""

_MOVED, _AFTER = "moved", "after"
"""Keys of a decision in changes. `moved`: by trainer, the nodes given up and the nodes got; None: it has none any more.
`after`: number of the decision before. `moved` is the first key, so that SQL finds it without reading all of the JSON.
"""
_IS_FULL = "data NOT GLOB '{\"moved\":*'"
_DECISIONS = f"SELECT seq, data FROM events WHERE kind = '{Decided.kind}' AND seq > ? AND seq < ? ORDER BY seq"  # noqa: S608 - names from this program
_LAST = f"SELECT max(seq) FROM events WHERE kind = '{Decided.kind}'"  # noqa: S608
_LAST_FULL = (
    f"SELECT seq, data FROM events WHERE kind = '{Decided.kind}' AND seq < ? AND {_IS_FULL} ORDER BY seq DESC LIMIT 1"  # noqa: S608
)

Assignment = Mapping[str, Sequence[str]]


class DecisionWriter:
    """Shortens the decisions of one process before they are stored."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._last = 0
        self._nodes: Assignment = {}
        self._since_full = 0

    def shortened(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON to store for a decision: its changes, or all of it."""
        nodes, counts = data["nodes"], data["counts"]
        # A transaction may have been rolled back, or the log trimmed, since the last decision was written.
        known = self._last and self._db.rows(_LAST)[0][0] == self._last
        if not known or self._since_full >= FULL_EVERY or not nodes.keys() <= counts.keys():
            return data
        moved: dict[str, Any] = {name: None for name in self._nodes if name not in nodes}
        for name, now in nodes.items():
            before = self._nodes.get(name, ())
            if now != before or name not in self._nodes:
                changed = _change(before, now)
                if changed is None:
                    return data
                moved[name] = changed
        rest = {key: value for key, value in data.items() if key not in ("nodes", "counts")}
        odd = {name: count for name, count in counts.items() if name not in nodes or count != len(nodes[name])}
        return {_MOVED: moved, _AFTER: self._last, "counts": odd, **rest}

    def written(self, seq: int, data: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        """Remember the decision that was stored under a number."""
        self._since_full = self._since_full + 1 if _MOVED in stored else 0
        self._last, self._nodes = seq, data["nodes"]


class DecisionReader:
    """Restores decisions that are read in order. The first one may be any."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._last = 0
        self._nodes: Assignment = {}

    def whole(self, seq: int, data: dict[str, Any]) -> dict[str, Any]:
        """Return the data of a decision with the nodes and counts of all its trainers."""
        if _MOVED not in data:
            self._last, self._nodes = seq, _nodes_of(data)
            return data
        if data.get(_AFTER) != self._last or not self._last:
            self._nodes = assigned_before(self._db, seq)
        self._last, self._nodes = seq, _applied(self._nodes, data)
        rest = {key: value for key, value in data.items() if key not in (_MOVED, _AFTER, "counts")}
        counts = {name: len(nodes) for name, nodes in self._nodes.items()}
        return {**rest, "counts": counts | data.get("counts", {}), "nodes": dict(self._nodes)}


def assigned_before(database: Database, seq: int) -> Assignment:
    """Return the nodes by trainer after the last decision below a number."""
    full = database.row(_LAST_FULL, (seq,))
    if full is not None:
        start, nodes = full[0], _nodes_of(decoded_object(full[1]))
    else:
        cut = database.row("SELECT value FROM kept WHERE key = ?", (AT_THE_CUT,))
        start, nodes = 0, decoded_object(cut[0]) if cut is not None else {}
    for _, stored in database.rows(_DECISIONS, (start, seq)):
        nodes = _applied(nodes, decoded_object(stored))
    return nodes


def assignments(database: Database, first: int, last: int) -> Iterator[tuple[int, Assignment]]:
    """Yield the decisions from number `first` to `last`, each with the nodes by trainer after it."""
    reader = DecisionReader(database)
    for seq, stored in database.rows(_DECISIONS, (first - 1, last + 1)):
        yield seq, _nodes_of(reader.whole(seq, decoded_object(stored)))


def is_in_changes(stored: str) -> bool:
    """Return whether the stored JSON of a decision has changes only."""
    return stored.startswith(f'{{"{_MOVED}":')


def _nodes_of(data: Mapping[str, Any]) -> Assignment:
    """Return the nodes of a whole decision. A row that is damaged has none."""
    nodes = data.get("nodes")
    return nodes if isinstance(nodes, dict) else {}


def _change(before: Sequence[str], now: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Return the nodes given up and got. None if the nodes that stay are in another order than before."""
    kept, held = set(now), set(before)
    gone = [node for node in before if node not in kept]
    got = [node for node in now if node not in held]
    stays = [node for node in before if node in kept]
    return (gone, got) if [*stays, *got] == list(now) else None


def _applied(nodes: Assignment, data: Mapping[str, Any]) -> Assignment:
    """Return the nodes by trainer after a decision in changes."""
    after = dict(nodes)
    for name, change in data.get(_MOVED, {}).items():
        if change is None:
            after.pop(name, None)
            continue
        gone = set(change[0])
        after[name] = [*(node for node in after.get(name, ()) if node not in gone), *change[1]]
    return after
