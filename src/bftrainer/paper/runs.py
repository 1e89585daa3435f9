"""Runs: replays that experiments share, each executed once and cached on disk.

An experiment names the `PaperRun`s it needs. `Runs.complete` replays those not in the cache yet, several at a time, and
writes each as it ends, so that an interrupted reproduction continues where it stopped. `Runs.result` reads one back.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import bftrainer
from bftrainer.allocate.registry import make_allocator
from bftrainer.core.objective import find_objective
from bftrainer.core.trace import Trace, Window
from bftrainer.core.trainer import Trainer
from bftrainer.paper.setting import Setting, paper_name
from bftrainer.scheduler import Policy
from bftrainer.simulate.metrics import as_json, measure
from bftrainer.simulate.replay import ReplaySettings, replay
from bftrainer.simulate.timeline import Timeline
from bftrainer.traces.files import writing

_DECIDES_RESULTS = (
    *("core", "allocate", "scheduler.py", "traces/synthetic", "paper/setting.py"),
    *(f"simulate/{name}.py" for name in ("accounting", "best", "metrics", "replay", "workload")),
)
"""Code that results depend on: a change of it invalidates cached results."""


@dataclass(frozen=True, slots=True)
class PaperRun:
    """One replay: a workload under a policy, by the paper's accounting, deciding at changes of the pool."""

    workload: str
    horizon_s: float
    max_parallel: int
    allocator: str = "exact"
    objective: str = "throughput"
    cost_factor: float = 1.0
    """Factor on the rescale costs of all trainers."""
    hours: float | None = None
    """Replay only this many hours from the start of the trace."""

    def policy(self) -> Policy:
        """The policy of the run."""
        return Policy(
            allocator=make_allocator(self.allocator),
            objective=find_objective(self.objective),
            horizon_s=self.horizon_s,
            max_parallel=self.max_parallel,
        )

    def trace(self, setting: Setting) -> Trace:
        """The trace to replay."""
        trace = setting.trace()
        if self.hours is None or self.hours >= trace.window.hours:
            return trace
        return trace.clip(Window(trace.window.start, trace.window.start + self.hours * 3600))

    def trainers(self, setting: Setting, trace: Trace) -> tuple[Trainer, ...]:
        """The trainers of the run: those submitted before the trace ends."""
        factor = self.cost_factor
        some = (t for t in setting.workload(self.workload) if t.submit < trace.window.end)
        return tuple(replace(t, up_s=t.up_s * factor, down_s=t.down_s * factor) for t in some)


@dataclass(frozen=True, slots=True, eq=False)
class RunResult:
    """Result of a run: the figures that `simulate --json` prints, and the timeline."""

    run: PaperRun
    metrics: dict[str, Any]
    timeline: Timeline

    def number(self, key: str) -> float:
        """One figure of the result by its JSON key."""
        return float(self.metrics[key])

    def run_hours(self) -> dict[str, float]:
        """Mean run time of the trainers that finished, by model."""
        hours: dict[str, list[float]] = {}
        for row in self.metrics["trainers"]:
            if row["run_hours"] is not None:
                hours.setdefault(paper_name(row["model"]), []).append(row["run_hours"])
        return {model: float(np.mean(values)) for model, values in hours.items()}


class Runs:
    """Results by run under one setting, cached in a folder."""

    def __init__(self, setting: Setting, cache: Path, workers: int = 2) -> None:
        self.setting, self.cache, self.workers = setting, cache, workers
        self.replayed = 0
        """Number of replays executed, not taken from the cache."""
        self._identity = {**setting.identity(), "code": code_hash()}

    def missing(self, runs: Sequence[PaperRun]) -> list[PaperRun]:
        """The `runs` that are not in the cache, each once; the longest first, so that no core waits at the end."""
        lacking = [run for run in dict.fromkeys(runs) if not self._path(asdict(run)).is_file()]
        return sorted(lacking, key=lambda run: (run.workload != "diverse", -run.max_parallel))

    def complete(self, runs: Sequence[PaperRun], done: Callable[[], None] = lambda: None) -> None:
        """Make sure that all runs are in the cache; `done` is called after each replay."""
        todo = self.missing(runs)
        self.cache.mkdir(parents=True, exist_ok=True)
        for _ in self._replays(todo):
            self.replayed += 1
            done()

    def result(self, run: PaperRun) -> RunResult:
        """The result of a run; it is replayed now if it is not cached."""
        self.complete([run])
        path = self._path(asdict(run))
        with np.load(path.with_suffix(".npz")) as columns:
            timeline = Timeline(**{field.name: columns[field.name] for field in fields(Timeline)})
        return RunResult(run, json.loads(path.read_text()), timeline)

    def remember(self, what: dict[str, Any], make: Callable[[], Any]) -> Any:
        """A JSON value that takes long to compute, computed unless the cache has it."""
        path = self._path(what)
        if not path.is_file():
            self.cache.mkdir(parents=True, exist_ok=True)
            _write_json(path, make())
        return json.loads(path.read_text())

    def _path(self, what: dict[str, Any]) -> Path:
        key = json.dumps([self._identity, what], sort_keys=True)
        return self.cache / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"

    def _replays(self, todo: Sequence[PaperRun]) -> Iterator[None]:
        workers = min(self.workers, len(todo), os.cpu_count() or 1)
        if workers <= 1:
            for run in todo:
                replay_to(self.setting, run, self._path(asdict(run)))
                yield
            return
        # A fresh interpreter for each worker: forking a process whose libraries run threads may hang it.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            futures = [pool.submit(replay_to, self.setting, run, self._path(asdict(run))) for run in todo]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


def replay_to(setting: Setting, run: PaperRun, path: Path) -> None:
    """Replay and write the result. The JSON file is written last, so if it exists, the result is complete."""
    policy = run.policy()
    trace = run.trace(setting)
    trainers = run.trainers(setting, trace)
    settings = ReplaySettings(policy, accounting="paper", decide_on="pool", snapshot_every_s=0.0)
    result = replay(trace, trainers, settings)
    columns = {field.name: getattr(result.timeline, field.name) for field in fields(Timeline)}
    with writing(path.with_suffix(".npz"), "wb") as out:
        np.savez_compressed(out, **columns)
    _write_json(path, {"run": asdict(run), **as_json(measure(result, trainers, policy), result)})


def _write_json(path: Path, value: Any) -> None:
    with writing(path, "w") as out:
        json.dump(value, out)


@lru_cache(maxsize=1)
def code_hash() -> str:
    """A hash of the code that results depend on."""
    package = Path(bftrainer.__file__).parent
    digest = hashlib.sha256()
    for name in _DECIDES_RESULTS:
        place = package / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(file.read_bytes())
    return digest.hexdigest()
