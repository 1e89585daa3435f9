"""The best trials of a group: each trainer of a sweep or study with its last and its best value of one metric.

The best value comes from the extremes that the controller stores for each trainer. Trainers of older versions have
none; for them it comes from the points of their history. `http/results.py` calls it, and adds what is newer than the
database.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bftrainer.cluster.history.queries import read_points
from bftrainer.cluster.store.database import Database
from bftrainer.cluster.wire.api import BestView, PositionView, TrialView
from bftrainer.cluster.wire.direction import Direction, default_direction
from bftrainer.elastic import protocol
from bftrainer.errors import InputError
from bftrainer.util.suggest import unknown

_TRIALS = """
SELECT number, name, owner, spec, state, reason, started, ended, epoch, step, metrics, metrics_at, node_seconds,
    extremes
FROM trainers WHERE json_extract(spec, '$.group') = ?1 AND (?2 IS NULL OR owner = ?2) ORDER BY number
"""


@dataclass(frozen=True, slots=True)
class GroupTrial:
    """A trainer of a group, as far as it is judged."""

    id: str
    name: str
    owner: str
    params: Mapping[str, Any]
    state: str
    reason: str
    started: float | None
    ended: float | None
    epoch: int
    step: int
    metrics: Mapping[str, Any]
    metrics_at: Mapping[str, Sequence[int]]
    node_seconds: float
    extremes: Mapping[str, Mapping[str, Sequence[Any]]]
    """See `MetricExtremes.as_json`."""
    output: str
    """The output folder that its user chose; empty: the usual one."""


def read_trials(db: Database, group: str, owner: str | None) -> list[GroupTrial]:
    """Return the trainers of a group; with an `owner`, only that owner's."""
    with db.transaction():
        return [_trial(db, *row) for row in db.rows(_TRIALS, (group, owner))]


def _trial(db: Database, number: int, *columns: Any) -> GroupTrial:
    name, owner, spec, state, reason, started, ended, epoch, step, metrics, metrics_at, node_seconds, extremes = columns
    known = json.loads(spec)
    found = json.loads(extremes) or _from_points(read_points(db, number))
    return GroupTrial(
        f"t{number}",
        name,
        owner,
        known.get("params", {}),
        state,
        reason,
        started,
        ended,
        epoch,
        step,
        json.loads(metrics),
        json.loads(metrics_at),
        node_seconds,
        found,
        known.get("env", {}).get(protocol.OUTPUT) or "",
    )


def _from_points(points: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """Return the extremes of the points of a history, as `MetricExtremes.as_json` does."""
    found: dict[str, dict[str, list[Any]]] = {}
    for point in points:
        for name, value in point["metrics"].items():
            if value is None:
                continue
            place = [value, *point["metrics_at"].get(name, (None, None, point["samples"]))]
            known = found.setdefault(name, {"min": place, "max": place})
            if value < known["min"][0]:
                known["min"] = place
            elif value > known["max"][0]:
                known["max"] = place
    return found


def best_trials(
    group: str,
    trials: Sequence[GroupTrial],
    by: str,
    direction: Direction | None,
    limit: int | None,
    now: float,
    folders: Mapping[str, str],
) -> BestView:
    """Return the trials of a group, the best first. Raises InputError if none of them has reported the metric `by`.

    While no trial has reported anything at all, all of them are returned without a value. `folders` has the output
    folder of each trial by id.
    """
    names = sorted({name for trial in trials for name in (*trial.extremes, *trial.metrics)})
    if names and by not in names:
        raise InputError(f"group {group}: {unknown('metric', by, names)}")
    wanted = direction or default_direction(by)
    rows = [_row(trial, by, wanted, now, folders[trial.id]) for trial in trials]
    sign = 1 if wanted == "min" else -1
    rows.sort(key=lambda row: math.inf if row["best"] is None else sign * row["best"])
    return {
        "group": group,
        "by": by,
        "direction": wanted,
        "metrics": names,
        "count": len(trials),
        "trainers": rows if limit is None else rows[:limit],
    }


def _row(trial: GroupTrial, by: str, direction: Direction, now: float, folder: str) -> TrialView:
    value, at = trial.metrics.get(by), trial.metrics_at.get(by)
    value = value if value is not None and math.isfinite(value) else None
    extreme = trial.extremes.get(by, {}).get(direction) or (None if value is None else [value, *(at or ())])
    end = trial.ended if trial.ended is not None else now
    run_s = max(end - trial.started, 0.0) if trial.started is not None else 0.0
    return {
        "id": trial.id,
        "name": trial.name,
        "owner": trial.owner,
        "params": dict(trial.params),
        "state": trial.state,
        "reason": trial.reason,
        "value": value,
        "at": _position(at),
        "best": None if extreme is None else extreme[0],
        "best_at": None if extreme is None else _position(extreme[1:]),
        "epoch": trial.epoch,
        "step": trial.step,
        "run_s": run_s,
        "node_seconds": trial.node_seconds,
        "folder": folder,
    }


def _position(found: Sequence[int] | None) -> PositionView | None:
    if not found or None in found:
        return None
    epoch, step, samples = found
    return {"epoch": epoch, "step": step, "samples": samples}
