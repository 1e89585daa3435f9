"""Search plan: names of trials, the result of a trial, and the limits of a search. Pure; `driver` acts on it."""

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

PARALLEL = 10
"""Trainers at once where neither user nor policy limits them: a sampler learns only from trials that have ended."""


@dataclass(frozen=True, slots=True)
class SearchRules:
    """Options of a search."""

    n_trials: int
    metrics: tuple[str, ...]
    """Metrics, one for each objective."""
    max_parallel: int | None
    prune_by: Unit
    prune_every: int
    max_failures: int
    poll_s: float
    timeout_s: float | None

    @classmethod
    def checked(cls, *, metric: Any, objectives: int, **rest: Any) -> SearchRules:
        """Rules from a user's options; raises `InputError` with what is wrong."""
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
        """Number of trainers at once: the user's choice, else the policy's max parallel, else `PARALLEL`."""
        return int(self.max_parallel or status["policy"]["max_parallel"] or PARALLEL)

    def place(self, row: Mapping[str, Any]) -> int:
        """Position at which a trainer reported the metric that trials are compared by, in the unit of `prune_by`."""
        return int(reported_at(row, self.metrics[0])[self.prune_by]) // self.prune_every * self.prune_every


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} must be a whole number from 1, but got {value!r:.80}")


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """Outcome of a trial."""

    end: End
    values: tuple[float, ...] = ()
    reason: str = ""


def outcome(row: Mapping[str, Any], metrics: Sequence[str], *, pruned: bool) -> TrialOutcome:
    """The outcome of a finished trainer. `pruned`: the driver ended it."""
    if pruned:
        return TrialOutcome("pruned")
    if row["state"] != "done":
        return TrialOutcome("failed", reason=row["reason"] or row["state"])
    values = []
    for name in metrics:
        value = number(row, name)
        if value is None:
            told = ", ".join(sorted(row["metrics"] or ())[:12]) or "nothing"
            is_there = name in (row["metrics"] or {})
            what = f"{name} is not a number" if is_there else f"the script did not report {name}, but {told}"
            return TrialOutcome("failed", reason=what)
        values.append(value)
    return TrialOutcome("complete", tuple(values))


def number(row: Mapping[str, Any], metric: str) -> float | None:
    """The last reported value, if it is a number."""
    value = (row["metrics"] or {}).get(metric)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def reported_at(row: Mapping[str, Any], metric: str) -> Mapping[str, Any]:
    """The epoch, step and samples at which a metric was reported; if unknown, those of the trainer now."""
    found: Mapping[str, Any] = (row.get("metrics_at") or {}).get(metric) or row
    return found


def value_of_epoch(row: Mapping[str, Any], metrics: Sequence[str]) -> int | None:
    """The epoch of a finished trainer's values, if it is not the last one."""
    oldest = min(int(reported_at(row, name)["epoch"]) for name in metrics)
    return oldest if oldest < row["epoch"] else None


def tidy(text: str, most: int) -> str:
    """A text made usable as a part of a trainer's name."""
    letters = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", letters).strip("._-")[:most].rstrip("._-")


def trainer_name(group: str, tag: str, number: int) -> str:
    """The name of a trial's trainer. The tag is unique to the study, so that no other trainer ever had this name."""
    return f"{tidy(group.removesuffix(f'-{tag}'), 40)}-{tag}-{number}"
