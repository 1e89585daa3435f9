"""Judges a job that `soak_gpu.py` disturbed: reads what its workers wrote down, times the recoveries, names violations.

The harness gives the events it caused and how each worker ended; the workers' ledgers and hashes are in the job's
folder.
"""

from __future__ import annotations

import json
import signal
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from support.elastic.ledger import committed

TIMES = ("recovery_s", "since_last_s", "pause_s")
AFTERWARDS = 3
"""So many commits after a change belong to it: the first ones of a new group may be slow."""


@dataclass(frozen=True)
class Commit:
    """One rank committed one step. `at` is on the monotonic clock that all processes of a machine share."""

    at: float
    generation: int
    place: tuple[int, ...]
    worker: str


@dataclass
class Event:
    """Something that the harness did to the workers."""

    kind: str
    at: float
    nodes: tuple[str, ...] = ()
    generation: int | None = None
    """Commits of later generations come after the event; None as long as that is not known (an unnoticed SIGSTOP)."""
    noticed: float | None = None
    """When the manager knew, if not at once: the time of recovery begins there."""
    in_join: bool | None = None
    """For kills in the midst of a join: whether the newcomer's first group had not formed yet."""


@dataclass(frozen=True)
class Ending:
    """A worker's process ended. `ours`: the harness sent SIGKILL or SIGSTOP, or the job was over."""

    worker: str
    status: int
    ours: bool


class Commits:
    """All commits that the workers have written down so far."""

    def __init__(self, folder: Path) -> None:
        self.all: list[Commit] = []
        self.latest: float | None = None
        self._folder = folder
        self._read: dict[Path, int] = {}

    def look(self) -> None:
        """Read what is new."""
        for log in self._folder.glob("steps-*.jsonl"):
            with log.open("rb") as lines:
                lines.seek(self._read.get(log, 0))
                text = lines.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[log] = self._read.get(log, 0) + len(whole)
            worker = log.stem.removeprefix("steps-").rpartition("-")[0]
            for line in whole.splitlines():
                if b'"commit"' in line:
                    said = json.loads(line)
                    self.all.append(Commit(said["at"], said["generation"], tuple(said["commit"]), worker))
                    self.latest = max(self.latest or 0.0, said["at"])

    def after(self, event: Event) -> list[float]:
        """When the steps after an event were first committed, in order."""
        began = event.noticed or event.at
        return self._times(c for c in self.all if c.at > began and c.generation > (event.generation or 0))

    def longest_gap(self, begin: float, end: float) -> float:
        """The longest time without a commit between the last one before `begin` and the last one before `end`."""
        times = [at for at in self._times(self.all) if at <= end]
        inside = [at for at in times if at > begin]
        before = [at for at in times if at <= begin]
        return max((b - a for a, b in pairwise([*(before[-1:] or [begin]), *inside])), default=0.0)

    @staticmethod
    def _times(commits: Iterable[Commit]) -> list[float]:
        first: dict[tuple[tuple[int, ...], int], float] = {}
        for commit in commits:
            step = commit.place, commit.generation
            first[step] = min(first.get(step, commit.at), commit.at)
        return sorted(first.values())


def timed(event: Event, commits: Commits, events: Sequence[Event]) -> dict[str, Any]:
    """An event with its times. None: there was no commit after it.

    recovery_s    from the event until the next commit of a later generation
    since_last_s  the same from the last of the events before that commit: a second kill prolongs the first recovery
    pause_s       the longest time without a commit around the event

    While a stopped worker is not noticed nobody can commit: the time of an event in between begins when it is.
    """
    row: dict[str, Any] = {"kind": event.kind, "nodes": list(event.nodes)} | dict.fromkeys(TIMES)
    if event.in_join is not None:
        row["in_join"] = event.in_join
    times = commits.after(event) if event.generation is not None else []
    if not times:
        return row
    began = event.noticed or event.at
    hangs = [other for other in events if other.noticed is not None and other.at < times[0] and other.noticed > began]
    if hangs:
        row["in_hang"] = True
        began = max(other.noticed or 0.0 for other in hangs)
        times = [at for at in times if at > began] or times
    moments = [other.noticed or other.at for other in events if other.kind != "stop" or other.noticed]
    next_at = min((other.at for other in events if other.at > event.at), default=times[-1])
    row["recovery_s"] = round(times[0] - began, 3)
    row["since_last_s"] = round(times[0] - max([began, *(at for at in moments if at < times[0])]), 3)
    row["pause_s"] = round(commits.longest_gap(event.at, max(times[0], min(next_at, times[:AFTERWARDS][-1]))), 3)
    return row


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Median and worst times by kind of event. Pauses in which a worker hung unnoticed are those of `stop` alone."""
    found = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in rows if row["kind"] == kind]
        found[kind] = (
            {"events": len(mine)}
            | median_and_worst(mine, "recovery_s")
            | median_and_worst([row for row in mine if "in_hang" not in row], "pause_s")
        )
    return found


def median_and_worst(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, float | None]:
    """Of one of the times of events."""
    values = [row[key] for row in rows if row[key] is not None]
    median = round(statistics.median(values), 3) if values else None
    return {f"{key}_median": median, f"{key}_worst": max(values, default=None)}


@dataclass(frozen=True)
class Run:
    """A finished job, as the harness saw it."""

    folder: Path
    samples: int
    survivors: tuple[str, ...]
    """The ranks that trained at the end."""
    endings: Sequence[Ending]
    rows: Sequence[Mapping[str, Any]] = field(default=())
    silent: Sequence[str] = ()
    """Workers that the manager took for lost though nobody had stopped them."""
    left: Sequence[int] = ()
    """Processes that are still there."""
    limit_s: float | None = None
    """A recovery may take so long; None: any time."""


def violations(run: Run) -> list[str]:
    """What must not be; nothing if all is well."""
    return [*_samples(run), *_weights(run), *_endings(run), *_times(run)]


def _samples(run: Run) -> list[str]:
    counts = committed(run.folder)
    finals = _finals(run.folder)
    epochs = max([len(counts), *(final["epoch"] for final in finals)])
    once = Counter(range(run.samples))
    found = [] if counts else ["samples: no step was ever committed"]
    for epoch in range(epochs):
        seen = counts.get(epoch, Counter[int]())
        more, less = seen - once, once - seen
        under_way = not finals and epoch + 1 == epochs  # the job was stopped in its midst
        if more or (less and not under_way):
            found.append(f"samples: epoch {epoch}: taken too often {dict(more)}, too seldom {dict(less)}"[:600])
    return found


def _weights(run: Run) -> list[str]:
    finals = _finals(run.folder)
    found = []
    missing = sorted(set(run.survivors) - {final["worker"] for final in finals})
    if missing or not finals:
        found.append(f"weights: no final state of {', '.join(missing) or 'any worker'}")
    for what in ("weights", "optimizer", "step", "epoch"):
        values = {final["worker"]: final[what] for final in finals}
        if len(set(values.values())) > 1:
            found.append(f"{what}: differ between ranks at the end: {values}")
    return found


def _endings(run: Run) -> list[str]:
    found = [
        f"endings: {ending.worker} ended with {describe(ending.status)}, which the harness did not cause"
        for ending in run.endings
        if ending.status != 0 and not (ending.ours and ending.status == -signal.SIGKILL)
    ]
    found += [f"endings: the manager heard nothing of {worker}, which nobody had stopped" for worker in run.silent]
    found += [f"endings: process {pid} is still there" for pid in run.left]
    return found


def _times(run: Run) -> list[str]:
    found = []
    for number, row in enumerate(run.rows):
        took_s = row["since_last_s"]
        if took_s is None:
            found.append(f"times: no commit after event {number}, {row['kind']} of {row['nodes']}")
        elif run.limit_s is not None and row["kind"] not in ("join", "leave") and took_s > run.limit_s:
            found.append(f"times: {took_s} s until the commit after event {number}, {row['kind']} of {row['nodes']}")
    return found


def describe(status: int) -> str:
    """An exit status in words."""
    try:
        return f"status {status}" if status >= 0 else signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _finals(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("final-*.json"))]
