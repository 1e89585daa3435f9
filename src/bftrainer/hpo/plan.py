"""What a study's trials are called, what counts as their result, how far a search goes. Pure; `driver` acts on it."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from bftrainer.errors import InputError

End = Literal["complete", "failed", "pruned"]
Unit = Literal["epoch", "step", "samples"]


@dataclass(frozen=True, slots=True)
class Rules:
    """What a user asked of a search."""

    n_trials: int
    metrics: tuple[str, ...]
    """One for each objective."""
    max_parallel: int | None
    prune_by: Unit
    prune_every: int
    max_failures: int
    poll_s: float
    timeout_s: float | None

    @classmethod
    def checked(cls, *, metric: Any, objectives: int, **rest: Any) -> Rules:
        """From what a user gave; `InputError` says what is wrong with it."""
        metrics = tuple(metric) if isinstance(metric, list | tuple) else (metric,)
        if not all(isinstance(name, str) and name for name in metrics):
            raise InputError(f"metric must be the name of what the script reports, but got {metric!r:.80}")
        if len(metrics) != objectives:
            one = "one name" if objectives == 1 else f"{objectives} names, one for each objective of the study"
            raise InputError(f"metric must be {one}, but got {metric!r:.80}")
        for name in ("n_trials", "prune_every", "max_failures"):
            _check_whole(name, rest[name])
        if rest["max_parallel"] is not None:
            _check_whole("max_parallel", rest["max_parallel"])
        if rest["prune_by"] not in get_args(Unit):
            raise InputError(f"prune_by must be one of {', '.join(get_args(Unit))}, but got {rest['prune_by']!r:.80}")
        for name in ("poll_s", "timeout_s"):
            value = rest[name]
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise InputError(f"{name} must be a number of seconds above 0, but got {value!r:.80}")
        return cls(metrics=metrics, **rest)

    def parallel(self, status: Mapping[str, Any]) -> int:
        """How many trainers at once: what was asked for, else what the policy considers, else the pool's size."""
        return int(self.max_parallel or status["policy"]["max_parallel"] or max(1, status["pool"]["size"]))

    def place(self, row: Mapping[str, Any]) -> int:
        """How far a trainer was when it reported what trials are compared by, in the unit that they are compared at."""
        return int(reported_at(row, self.metrics[0])[self.prune_by]) // self.prune_every * self.prune_every


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} must be a whole number from 1, but got {value!r:.80}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial ended."""

    end: End
    values: tuple[float, ...] = ()
    reason: str = ""


def outcome(row: Mapping[str, Any], metrics: Sequence[str], *, pruned: bool) -> Outcome:
    """Of a trainer that is finished. `pruned`: we had it ended."""
    if pruned:
        return Outcome("pruned")
    if row["state"] != "done":
        return Outcome("failed", reason=row["reason"] or row["state"])
    values = []
    for name in metrics:
        value = number(row, name)
        if value is None:
            told = ", ".join(sorted(row["metrics"] or ())[:12]) or "nothing"
            is_there = name in (row["metrics"] or {})
            what = f"{name} is not a number" if is_there else f"the script did not report {name}, but {told}"
            return Outcome("failed", reason=what)
        values.append(value)
    return Outcome("complete", tuple(values))


def number(row: Mapping[str, Any], metric: str) -> float | None:
    """What was reported last, if it is a number."""
    value = (row["metrics"] or {}).get(metric)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def reported_at(row: Mapping[str, Any], metric: str) -> Mapping[str, Any]:
    """What a value is of: epoch, step and samples. Where nobody said so, of the moment."""
    found: Mapping[str, Any] = (row.get("metrics_at") or {}).get(metric) or row
    return found


def value_of_epoch(row: Mapping[str, Any], metrics: Sequence[str]) -> int | None:
    """Of which epoch the values of a finished trainer are, if that is not the last one."""
    oldest = min(int(reported_at(row, name)["epoch"]) for name in metrics)
    return oldest if oldest < row["epoch"] else None


def tidy(text: str, most: int) -> str:
    """A text as a part of a trainer's name."""
    letters = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", letters).strip("._-")[:most].rstrip("._-")


def trainer_name(group: str, tag: str, number: int) -> str:
    """The name of a trial's trainer. The tag is the study's own, so that no other trainer was ever called so."""
    return f"{tidy(group.removesuffix(f'-{tag}'), 40)}-{tag}-{number}"
