"""How much is lost because curves and costs are learned, and not known?

    python benchmarks/learning.py [--json] [--nodes 0:1024] [--from 2021-02-10T20:21:15] [--hours 24] [--seed 1]

Replays of the authors' Summit trace with their two workloads, where true curves, pauses and starts of nodes are hidden
from the scheduler, and trainers report noisy rates. The rules:

    known             the scheduler knows curves and pauses, but not that nodes take time to start (the paper)
    known-start-term  it knows all of it
    equal             equal shares, which need no curves
    learned-0.1       what version 0.1.0 learned, each trainer by itself
    learned           what this version learns, one belief per model

`efficiency` is U, always against the same static pool, shared by `exact` at no cost. `q` is what was made against the
most that the pool could make of the trainers then considered; of `equal` it says nothing where models differ, because
other trainers are considered. A reversal is a change that is undone within 60 s. Needs the folder ../shared/data/summit
beside the clone, or --data.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC
from itertools import product
from pathlib import Path
from statistics import fmean

from bftrainer.allocate.equal import EqualAllocator
from bftrainer.core.trace import Trace, Window
from bftrainer.core.trainer import Trainer
from bftrainer.paper.setting import DIVERSE, HPO, PAPER_START, TRACE
from bftrainer.scheduler import Plan, Policy, State
from bftrainer.simulate.knowledge import Knowledge, KnownTruth, LearnedTruth, Noise
from bftrainer.simulate.metrics import measure
from bftrainer.simulate.replay import ReplaySettings, replay
from bftrainer.simulate.workload import load_workload
from bftrainer.traces.files import load_trace
from bftrainer.traces.times import parse_time
from learning_0_1 import LearnedAlone

DATA = Path(__file__).parents[2] / "shared" / "data" / "summit"
WORKLOADS = {"hpo": HPO, "diverse": DIVERSE}
COSTS = ((18.0, 12.0), (5.0, 3.0), (0.5, 0.3))
STARTS = (0.0, 15.0)
NOISES = (0.03, 0.10)
UNDONE_S = 60.0


class KnownButStart(KnownTruth):
    """The scheduler knows all but that nodes take time to start."""

    def submitted(self, trainers: Sequence[Trainer]) -> Sequence[Trainer]:
        """Return the trainers as if their nodes started at once."""
        return [replace(trainer, start_s=0.0) for trainer in trainers]


RULES: Mapping[str, Callable[[Noise], Knowledge]] = {
    "known": lambda noise: KnownButStart(),
    "known-start-term": lambda noise: KnownTruth(),
    "equal": lambda noise: KnownTruth(),
    "learned-0.1": LearnedAlone,
    "learned": LearnedTruth,
}
LEARNS = ("learned-0.1", "learned")


@dataclass(frozen=True, slots=True)
class Row:
    """The outcome of one replay."""

    workload: str
    up_s: float
    down_s: float
    start_s: float
    noise: float
    rule: str
    efficiency: float
    q: float
    reversals_per_trainer_hour: float
    decisions: int
    cpu_s: float


class Reversals:
    """Counts changes of running trainers that are undone soon, and the hours of the trainers that run."""

    def __init__(self) -> None:
        self.undone = 0
        self.hours = 0.0
        self._last: dict[str, tuple[float, int]] = {}
        self._seen: tuple[float, int] | None = None

    def watch(self, now: float, plan: Plan, before: State) -> None:
        """Look at a decision."""
        if self._seen is not None:
            self.hours += self._seen[1] * (now - self._seen[0]) / 3600
        self._seen = now, sum(change.after > 0 for change in plan.changes)
        for change in plan.changes:
            if change.before == change.after or not (change.before and change.after):
                continue
            way = 1 if change.after > change.before else -1
            at, last_way = self._last.get(change.trainer, (0.0, 0))
            self.undone += last_way == -way and now - at < UNDONE_S
            self._last[change.trainer] = now, way


def one_replay(trace: Trace, trainers: Sequence[Trainer], rule: str, noise: Noise) -> dict[str, float]:
    """Return the figures of one replay."""
    reference = Policy(horizon_s=120.0, max_parallel=10)
    policy = replace(reference, allocator=EqualAllocator()) if rule == "equal" else reference
    reversals = Reversals()
    began = time.process_time()
    found = replay(trace, trainers, ReplaySettings(policy), reversals.watch, knowledge=RULES[rule](noise))
    cpu_s = time.process_time() - began
    metrics = measure(found, trainers, reference)
    return {
        "efficiency": round(metrics.efficiency, 5),
        "q": round(found.value / found.best_value, 5) if found.best_value else 0.0,
        "reversals_per_trainer_hour": round(reversals.undone / reversals.hours, 4) if reversals.hours else 0.0,
        "decisions": metrics.decisions,
        "cpu_s": round(cpu_s, 2),
    }


def rows_of(trace: Trace, workloads: Mapping[str, Sequence[Trainer]], seed: int) -> Iterator[Row]:
    """Yield a row for each workload, costs, start, noise and rule. Without noise, a rule is replayed once."""
    for (name, trainers), (up_s, down_s), start_s in product(workloads.items(), COSTS, STARTS):
        costly = [replace(trainer, up_s=up_s, down_s=down_s, start_s=start_s) for trainer in trainers]
        known = {rule: one_replay(trace, costly, rule, Noise()) for rule in RULES if rule not in LEARNS}
        for noise, rule in product(NOISES, RULES):
            figures = known[rule] if rule in known else one_replay(trace, costly, rule, Noise(noise, seed))
            yield Row(name, up_s, down_s, start_s, noise, rule, **figures)  # type: ignore[arg-type]


def goals(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return how far `learned` is from what it should reach, each with whether it does."""
    at = {(row.workload, row.up_s, row.start_s, row.noise, row.rule): row for row in rows}
    learned = [row for row in rows if row.rule == "learned"]

    def other(row: Row, rule: str) -> Row:
        return at[row.workload, row.up_s, row.start_s, row.noise, rule]

    found: list[dict[str, object]] = []

    def add(what: str, value: float, most: float) -> None:
        found.append({"goal": what, "value": round(value, 3), "at_most": most, "reached": value <= most})

    hpo = [row for row in learned if row.workload == "hpo"]
    behind = {row: 100 * (other(row, "known-start-term").efficiency - row.efficiency) for row in hpo}
    add("hpo: mean points behind known-start-term", fmean(behind.values()), 0.3)
    for noise, most in zip(NOISES, (0.6, 1.0), strict=True):
        worst = max(points for row, points in behind.items() if row.noise == noise)
        add(f"hpo: most points behind, noise {noise}", worst, most)
    add("hpo: most points below equal", max(100 * (other(r, "equal").efficiency - r.efficiency) for r in hpo), 0.0)
    more = (r.reversals_per_trainer_hour - other(r, "known").reversals_per_trainer_hour for r in hpo)
    add("hpo: most reversals per trainer-hour above known", max(more), 0.2)
    for noise, most in zip(NOISES, (0.8, 1.5), strict=True):
        diverse = (row for row in learned if row.workload == "diverse" and row.noise == noise)
        worst = max(100 * (other(row, "known-start-term").q - row.q) for row in diverse)
        add(f"diverse: most points of q behind, noise {noise}", worst, most)
    return found


def main() -> None:
    """Replay everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--nodes", default="0:1024", metavar="A:B", help="nodes A up to B of the machine")
    parser.add_argument("--from", dest="start", metavar="TIME", help="start of the window, by default the paper's")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the Summit trace and workloads")
    options = parser.parse_args()
    start = PAPER_START if options.start is None else parse_time(options.start, UTC, "--from")
    first, last = (int(text) for text in options.nodes.split(":"))
    whole = load_trace(options.data / TRACE)
    trace = whole.select(whole.nodes[first:last]).clip(Window(start, start + 3600 * options.hours))
    workloads = {}
    for name, file in WORKLOADS.items():
        trainers = load_workload(options.data / file, None, UTC, PAPER_START).trainers
        moved = [replace(trainer, submit=trainer.submit + start - PAPER_START) for trainer in trainers]
        workloads[name] = [trainer for trainer in moved if trainer.submit < trace.window.end]
    rows: list[Row] = []
    for row in rows_of(trace, workloads, options.seed):
        rows.append(row)
        if not options.json:
            print(
                f"{row.workload:8s} {row.up_s:4g}/{row.down_s:<4g} start {row.start_s:2g} noise {row.noise:4g} "
                f"{row.rule:17s} U {row.efficiency:.4f} q {row.q:.4f} "
                f"reversals/h {row.reversals_per_trainer_hour:6.3f} cpu {row.cpu_s:5.1f} s",
                flush=True,
            )
    reached = goals(rows)
    if options.json:
        json.dump({"rows": [asdict(row) for row in rows], "goals": reached}, sys.stdout, indent=1)
        print()
    else:
        for goal in reached:
            verdict = "reached" if goal["reached"] else "MISSED"
            print(f"{goal['goal']}: {goal['value']} (at most {goal['at_most']}): {verdict}")


if __name__ == "__main__":
    main()
