"""Weeks of a large site in minutes: how large the database and the state folder become, and how long trimming takes.

    python benchmarks/years.py --days 30 --json

A machine of 10,000 nodes with Summit's churn (synthetic) and 100 trainers per day, in a virtual clock. Every pool event
is stored as the controller stores it: nodes, workers, a decision with all its nodes, rescales and reported metrics.
Between events the controller's own housekeeper trims the database, a piece per tick of 0.25 s, and every two hours it
measures and removes files. Snapshots, logs and output are sparse files: they have a size and need no room.

Printed per day: size of the database file, bytes in use, events kept, size of the folder; and in all: how many pieces
trimming took, and the longest of them by the wall clock and by the processor's time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from bftrainer.cluster.config.keys import DEFAULTS, Config, RetentionSettings, Server
from bftrainer.cluster.controller.metric_history import MetricHistory
from bftrainer.cluster.controller.owners import OwnerLimits
from bftrainer.cluster.launchers.base import StateLayout
from bftrainer.cluster.retention.files import measure
from bftrainer.cluster.retention.housekeeper import Housekeeper
from bftrainer.cluster.store import events
from bftrainer.cluster.store.database import checkpoint
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.elastic.snapshot_header import HEADER, Lineage, header
from bftrainer.traces.synthetic.synth import synthesise

TICK_S = 0.25
CLEAN_EVERY_S = 7200.0
DAY_S = 86400.0
MB, GB = 10**6, 10**9
PAYLOAD = bytes(1000)
"""That of the last snapshots, which are read before others are removed."""


@dataclass(slots=True)
class Running:
    """A trainer that has nodes, or waits for some."""

    id: str
    name: str
    most: int
    end: float
    points: MetricHistory
    nodes: list[str] = field(default_factory=list)
    workers: dict[str, str] = field(default_factory=dict)
    generation: int = 0
    next_worker: int = 1


class Site:
    """A machine and its users, as the database sees them."""

    def __init__(self, config: Config, seed: int) -> None:
        self.store = Store.open(config.state / FILE)
        self.layout = StateLayout(config.state, "benchmark")
        self.rng = random.Random(seed)
        self.trainers: dict[str, Running] = {}
        self.here: dict[str, str] = {}
        """The trainer on each node; empty: none."""
        self.free: dict[str, None] = {}

    def event(self, now: float, joined: tuple[str, ...], left: tuple[str, ...], submits: int) -> None:
        """Store everything that one event of the pool causes."""
        with self.store.transaction():
            for _ in range(submits):
                self._submit(now)
            for node in left:
                self._leave(now, node)
            for node in joined:
                self.store.put_node(node, host=f"{node}.site", agent=f"{node}-agent", pid=4711, joined=now)
                self.store.log(now, events.NodeJoined(node, f"{node}.site", f"{node}-agent"))
                self.here[node] = ""
                self.free[node] = None
            for live in [live for live in self.trainers.values() if live.end <= now]:
                self._finish(now, live)
            self._decide(now)

    def _submit(self, now: float) -> None:
        owner, most = f"user{self.rng.randrange(20)}", self.rng.choice((8, 32, 64, 128, 256))
        number = self.store.add_trainer(
            name=f"training-{self.rng.random()}", owner=owner, spec={"script": "/home/user/train.py"}, time=now
        )
        live = Running(number.id, number.name, most, now + self.rng.uniform(1, 24) * 3600, MetricHistory(number.id))
        self.trainers[live.id] = live
        self.store.log(now, events.TrainerSubmitted(live.id, live.name, owner))
        self.store.log(now, events.StateChanged(live.id, "", "queued", ""))
        self.layout.prepare(live.id)
        folder = self.layout.folder(live.id)
        for step in (1000, 2000):
            _sparse(folder / "snapshots" / f"snapshot-{step:012d}.bft", 200 * MB)
        last = folder / "snapshots" / f"snapshot-{3000:012d}.bft"
        _sparse(last, HEADER + len(PAYLOAD))
        with last.open("r+b") as file:
            file.write(header(3000, len(PAYLOAD), sha256(PAYLOAD).hexdigest(), Lineage()))
        _sparse(folder / "log", 5 * MB)
        _sparse(folder / "output" / "model.pt", 100 * MB)

    def _leave(self, now: float, node: str) -> None:
        self.store.update_node(node, left=now)
        self.store.log(now, events.NodeLeft(node, "taken"))
        trainer = self.here.pop(node)
        self.free.pop(node, None)
        if trainer:
            live = self.trainers[trainer]
            live.nodes.remove(node)
            self._end_worker(now, live, node, "lost")

    def _end_worker(self, now: float, live: Running, node: str, outcome: str) -> None:
        worker = live.workers.pop(node)
        self.store.end_worker(worker, ended=now, status=0, outcome=outcome)
        self.store.log(now, events.WorkerEnded(live.id, node, worker, 0, outcome))

    def _finish(self, now: float, live: Running) -> None:
        for node in live.nodes:
            self._end_worker(now, live, node, "done")
            self.here[node] = ""
            self.free[node] = None
        self.store.log(now, events.StateChanged(live.id, "running", "done", ""))
        self.store.update_trainer(live.id, state="done", ended=now, samples=10**6, learned={"rates": [1.5] * 200})
        del self.trainers[live.id]

    def _decide(self, now: float) -> None:
        changes, reasons = [], []
        for live in self.trainers.values():
            before = len(live.nodes)
            for _ in range(min(live.most - before, len(self.free))):
                node = next(iter(self.free))
                del self.free[node]
                self.here[node] = live.id
                live.nodes.append(node)
                worker = live.workers[node] = f"{live.id}-{live.next_worker}"
                live.next_worker += 1
                self.store.put_worker(worker, trainer=live.id, node=node, agent=f"{node}-agent", started=now)
                self.store.log(now, events.WorkerStarted(live.id, node, worker))
            if len(live.nodes) != before:
                change = {"trainer": live.id, "action": "grow", "before": before, "after": len(live.nodes)}
                changes.append({**change, "gain": 12.5, "cost": 1.25})
                reasons.append(f"{live.name} grows from {before} to {len(live.nodes)} nodes: worth 12.5, costs 1.25")
                live.generation += 1
                self.store.update_trainer(live.id, generation=live.generation)
                self.store.log(
                    now,
                    events.Rescaled(
                        live.id, live.generation, before, len(live.nodes), 0.8, 0.1, 0.2, False, [1.5], "grow"
                    ),
                )
            live.points.note(self.store, now, int(now), {"loss": self.rng.random(), "accuracy": self.rng.random()})
        nodes = {live.id: list(live.nodes) for live in self.trainers.values() if live.nodes}
        counts = {live.id: len(live.nodes) for live in self.trainers.values()}
        pool = len(self.here)
        self.store.log(now, events.Decided("exact", None, pool, 120.0, counts, nodes, changes, reasons, 0, 12.5))


def _sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


@dataclass(slots=True)
class Slices:
    """How long the pieces of trimming took."""

    count: int = 0
    longest_s: float = 0.0
    longest_cpu_s: float = 0.0
    over_50_ms: int = 0
    cpu_over_50_ms: int = 0

    def tick(self, housekeeper: Housekeeper, now: float) -> bool:
        """Let the housekeeper do one piece, and note how long it took."""
        wall, cpu = time.perf_counter(), time.thread_time()
        more = housekeeper.tick(now)
        took, worked = time.perf_counter() - wall, time.thread_time() - cpu
        self.count += more
        self.longest_s, self.longest_cpu_s = max(self.longest_s, took), max(self.longest_cpu_s, worked)
        self.over_50_ms += took > 0.05
        self.cpu_over_50_ms += worked > 0.05
        return more


def run(folder: Path, days: float, nodes: int, per_day: int, retention: RetentionSettings, seed: int) -> dict[str, Any]:
    """Let the days pass, and return what was measured."""
    config = replace(DEFAULTS, server=Server(state=folder), retention=retention)
    site = Site(config, seed)
    keeper = Housekeeper(site.store, config, OwnerLimits(site.store, config.policy.max_weight), site.trainers)
    site.store.leave_checkpoints()
    slices, rows, rng = Slices(), [], random.Random(seed)
    began = time.perf_counter()
    next_clean, next_row = 0.0, DAY_S
    pool = list(synthesise("summit", nodes=nodes, hours=days * 24, seed=seed).events())
    first = pool[0].time
    for event, following in zip(pool, [*pool[1:], None], strict=True):
        now = event.time
        share = per_day * ((following.time if following else now) - now) / DAY_S
        site.event(now, event.joined, event.left, int(share) + (rng.random() < share % 1))
        checkpoint(site.store.path)  # in the controller a thread does it, every second
        for tick in range(int(min((following.time - now) if following else TICK_S, 3600.0) / TICK_S)):
            if not slices.tick(keeper, now + tick * TICK_S):
                break
        if now - first >= next_clean:
            next_clean += CLEAN_EVERY_S
            asyncio.run(keeper.clean(now))
        if now - first >= next_row or following is None:
            next_row += DAY_S
            rows.append(_row(site, folder, (now - first) / DAY_S))
            print(
                f"{rows[-1]}  longest slice {slices.longest_s * 1e3:.1f} ms, cpu {slices.longest_cpu_s * 1e3:.1f} ms",
                file=sys.stderr,
            )
    site.store.close()
    return {
        "days": days,
        "nodes": nodes,
        "trainers_per_day": per_day,
        "events_written": rows[-1]["last_event"],
        "database_mb_most": max(row["database_mb"] for row in rows),
        "folder_gb_most": max(row["folder_gb"] for row in rows),
        "slices": slices.count,
        "longest_slice_ms": round(slices.longest_s * 1e3, 1),
        "longest_slice_cpu_ms": round(slices.longest_cpu_s * 1e3, 1),
        "slices_over_50_ms": slices.over_50_ms,
        "slices_over_50_ms_cpu": slices.cpu_over_50_ms,
        "took_s": round(time.perf_counter() - began, 1),
        "over_time": rows,
    }


def _row(site: Site, folder: Path, day: float) -> dict[str, Any]:
    files = [folder / f"{FILE}{end}" for end in ("", "-wal")]
    first, last = site.store.event_log.ends()
    return {
        "day": round(day, 2),
        "database_mb": round(sum(path.stat().st_size for path in files if path.exists()) / MB, 1),
        "in_use_mb": round(site.store.size()[0] / MB, 1),
        "events": last - first + 1,
        "last_event": last,
        "trainers": len(site.store.trainers(brief=True)),
        "folder_gb": round(sum(measure(path).total for path in _folders(folder)) / GB, 2),
    }


def _folders(folder: Path) -> Iterator[Path]:
    yield from (folder / "trainers").glob("t*")


def main() -> None:
    """Run it and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--trainers", type=int, default=100, help="how many are submitted per day")
    parser.add_argument("--results-days", type=float, default=7.0, help="retention.results_days")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    retention = replace(DEFAULTS.retention, results_days=args.results_days)
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), args.days, args.nodes, args.trainers, retention, args.seed)
    if args.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:>24}  {value}")


if __name__ == "__main__":
    main()
