"""Records of a controller's database that predictions are made from: the pool's past, and earlier trainers.

`PoolLog` reads the log once, and then only what was added. It is used in the process that predicts, on a read-only
connection.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bftrainer.cluster.eta.beliefs import ScriptRun
from bftrainer.cluster.eta.question import AskedTrainer
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.event_log import EventLog
from bftrainer.cluster.store.events import NodeJoined, ServeStarted, quoted_kinds
from bftrainer.cluster.store.replay import POOL_EVENTS, PoolReplay
from bftrainer.cluster.store.scripts.beliefs import BeliefKey, BeliefTable
from bftrainer.core.trace import Trace, Window
from bftrainer.errors import BFTrainerError
from bftrainer.forecast.past import DAY_S
from bftrainer.learning.trials import ScriptBelief

PAST_S = 28 * DAY_S
"""How far back the pool's past is read."""
RECENT_S = 7 * DAY_S
MOST_RUNS = 500
"""How many earlier trainers are read, the newest first."""
SETTLE_S, SETTLE_SHARE = 60.0, 0.1
"""After the first start of a controller its nodes join one after the other. This is not what the pool is like: so much
of the past is left out, but at most this share of it."""

_NEW = f"""
SELECT seq, time, kind, node FROM events
WHERE kind IN ({quoted_kinds(*POOL_EVENTS)}) AND seq > ? ORDER BY seq
"""  # noqa: S608 - names from this program
_RUNS = """
SELECT spec, owner, state, samples, total, submitted FROM trainers ORDER BY number DESC LIMIT ?
"""


class PoolLog:
    """When nodes were in the pool."""

    def __init__(self) -> None:
        self._pool = PoolReplay()
        self._stays: list[tuple[str, float, float]] = []
        self._seq: int | None = None
        self._first: float | None = None

    def trace(self, db: Database, now: float) -> Trace | None:
        """Return the pool's past up to now; None if there is none yet."""
        if self._seq is None:
            self._seq = EventLog(db).first_since(now - PAST_S) - 1
        for seq, time, kind, node in db.rows(_NEW, (self._seq,)):
            self._seq = seq
            self._first = time if self._first is None else self._first
            if kind == NodeJoined.kind:
                self._pool.join(node, time)
                continue
            since = self._pool.here.get(node)
            if self._pool.depart(node) and since is not None and time > since:
                self._stays.append((node, since, time))
        return None if self._first is None else self._built(max(self._first, now - PAST_S), now)

    def _built(self, first: float, now: float) -> Trace | None:
        start = first + min(SETTLE_S, SETTLE_SHARE * (now - first))
        self._stays = [stay for stay in self._stays if stay[2] > first]
        rows = [(node, since, end, False) for node, since, end in self._stays if start < end <= now]
        rows += [(node, since, now, True) for node, since in self._pool.here.items() if since < now]
        names = {node: place for place, node in enumerate(dict.fromkeys(row[0] for row in rows))}
        if not rows or now <= start:
            return None
        return Trace.build(
            tuple(names),
            [names[row[0]] for row in rows],
            np.maximum([row[1] for row in rows], start),
            [row[2] for row in rows],
            [row[3] for row in rows],
            Window(start, now),
        )


@dataclass(frozen=True, slots=True)
class EarlierTrainers:
    """Trainers that were submitted before, finished or not, the newest first."""

    runs: tuple[ScriptRun, ...]
    submitted: tuple[AskedTrainer, ...]
    """Those of the last days whose samples are known, as they were submitted."""
    since: float
    """When the controller's database began, or the last days did."""


def has_ended(path: Path) -> bool:
    """Whether a trainer that has trained has ever ended."""
    db = Database.open(path, read_only=True)
    try:
        return db.row("SELECT 1 FROM trainers WHERE ended IS NOT NULL AND samples > 0 LIMIT 1") is not None
    finally:
        db.close()


def read_trainers(db: Database, now: float) -> EarlierTrainers:
    """Read the newest trainers."""
    runs, submitted = [], []
    rows = db.rows(_RUNS, (MOST_RUNS,))
    oldest = now
    for place, (spec_text, owner, state, samples, total, time) in enumerate(rows):
        try:
            spec = TrainerSpec.model_validate(json.loads(spec_text))
        except (ValueError, BFTrainerError):  # of another version
            continue
        oldest = min(oldest, time)
        work = samples if state == "done" and samples else total
        runs.append(ScriptRun(spec.identity, spec.args, spec.group, work))
        if now - time <= RECENT_S and (work or samples):
            asked = AskedTrainer.of_spec(spec, f"earlier-{place}", owner, time)
            submitted.append(replace(asked, total=int(work or samples)))
    began = db.row("SELECT min(time) FROM events WHERE kind = ?", (ServeStarted.kind,))
    since = max(began[0] if began and began[0] is not None else now, now - RECENT_S)
    if len(rows) == MOST_RUNS:
        since = max(since, oldest)
    return EarlierTrainers(tuple(runs), tuple(submitted), min(since, now))


def read_beliefs(db: Database, keys: Iterable[BeliefKey]) -> dict[BeliefKey, ScriptBelief]:
    """Read what was learned of scripts."""
    table = BeliefTable(db)
    return {key: ScriptBelief.from_json(table.of(key) or {}) for key in dict.fromkeys(keys)}
