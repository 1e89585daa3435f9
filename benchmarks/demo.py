"""The demo: are learned curves better than equal shares, and how far from known ones? In simulation, and live.

    python benchmarks/demo.py [--json] [--seeds 10] [--seconds 120] [--start-s 1.5] [--noise 0.05]
    python benchmarks/demo.py --live 3 [--keep DIR] [--json]

The nodes of `bftrainer demo`, which come and go as on Summit 90 times as fast, with other random seeds; its three
trainers, its objective and its horizon. Work does not run out in the window. Curves, pauses and starts of nodes are
hidden; reports are noisy. The rules:

    learned  as the live system decides when it knows nothing of the scripts at first
    known    curves and costs are known
    equal    equal shares

Each figure is the work done as a share of the best that the pool allows at no cost, as `bftrainer demo` prints it: the
bound is 1. The exit status is 1 if `learned` is not 5 points above `equal` on the mean.

With `--live N`, `bftrainer demo` itself is run N times. `ours` is the work that the live run did while all trainers had
work, `equal` that of equal shares on the same nodes in the simulator, both as shares of `bound`. The same of the whole
run are `ours_makespan`, `equal_makespan` and `bound_makespan`. The exit status is 1 if `ours` is not above `equal` in
every run. `--keep DIR` keeps the state folder of each run. Run it on a machine that does nothing else: the demo needs
two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from bftrainer.allocate.registry import make_allocator
from bftrainer.cluster.config.keys import Config, PolicySettings
from bftrainer.cluster.config.policy import policy_of
from bftrainer.cluster.demo import HORIZON_S, PARTS, POOL
from bftrainer.cluster.pools.local.churn import Schedule, make_schedule
from bftrainer.core.curve import Curve
from bftrainer.core.pool import Fragment
from bftrainer.core.trace import Trace, Window
from bftrainer.core.trainer import Trainer
from bftrainer.elastic.pacing import Pace
from bftrainer.simulate.knowledge import Knowledge, KnownTruth, LearnedTruth, Noise
from bftrainer.simulate.replay import ReplaySettings, replay

NODES, SPEED = 8, 90.0
BATCHES: Mapping[str, Callable[[int], int]] = {
    "digits": lambda nodes: 32 * nodes,
    "images": lambda nodes: 16 * nodes,
    "chars": lambda nodes: 64,
}
"""Samples per step of the demo's scripts."""
GOAL = 0.05


def main() -> None:
    """Replay everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=10, help="how many schedules of nodes")
    parser.add_argument("--seconds", type=float, default=120.0, help="length of the window")
    parser.add_argument("--start-s", type=float, default=1.5, help="seconds from a node's assignment to its first step")
    parser.add_argument("--up-s", type=float, default=0.1, help="pause of a trainer that grows")
    parser.add_argument("--down-s", type=float, default=0.05, help="pause of a trainer that shrinks")
    parser.add_argument("--noise", type=float, default=0.05, help="relative noise of a report")
    parser.add_argument("--live", type=int, metavar="N", help="run `bftrainer demo` so many times instead")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="with --live, keep the state folder of each run here")
    options = parser.parse_args()
    if options.live is not None:
        sys.exit(live(options.live, options.keep, as_json=options.json))
    trainers = demo_trainers(options.up_s, options.down_s, options.start_s)
    rows = []
    for seed in range(options.seeds):
        trace = demo_trace(seed, options.seconds)
        rows.append({"seed": seed, **shares(trace, trainers, Noise(options.noise, seed))})
        if not options.json:
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    mean = {name: round(fmean(row[name] for row in rows), 4) for name in rows[0] if name != "seed"}
    above = mean["learned"] - mean["equal"]
    found = {"rows": rows, "mean": mean, "above_equal": round(above, 4), "goal": GOAL, "met": above >= GOAL}
    if options.json:
        print(json.dumps(found))
    else:
        print("mean  ", "  ".join(f"{name} {value}" for name, value in mean.items()))
        print(f"learned is {100 * above:+.1f} points above equal, goal {100 * GOAL:+.0f}")
    sys.exit(not found["met"])


def live(runs: int, keep: Path | None, *, as_json: bool) -> int:
    """Run the live demo so many times, print each run's figures, and return the exit status."""
    rows = []
    for number in range(runs):
        load = round(os.getloadavg()[0], 1)
        argv = [sys.executable, "-m", "bftrainer", "demo", "--json"]
        argv += ["--folder", str(keep / f"run-{number + 1}")] if keep is not None else []
        done = subprocess.run(argv, stdout=subprocess.PIPE, check=True)
        rows.append({**live_figures(json.loads(done.stdout)), "load_before": load})
        output = sys.stderr if as_json else sys.stdout
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), file=output, flush=True)
    above = sum(row["ours"] > row["equal"] for row in rows)
    if as_json:
        print(json.dumps({"rows": rows, "above_equal": above, "runs": runs, "met": above == runs}))
    else:
        print(f"ours is above equal in {above} of {runs} runs")
    return int(above < runs)


def live_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return what counts of the summary that `bftrainer demo --json` prints."""
    busy, whole = summary["busy"], summary["judgement"]
    found = {
        "ours": busy["live"],
        "equal": busy["equal"],
        "bound": 1.0,
        "simulated": busy["simulated"],
        "busy_s": summary["busy_s"],
        "ours_makespan": whole["efficiency"],
        "equal_makespan": whole["equal"],
        "bound_makespan": whole["bound"],
        "seconds": whole["seconds"],
        "node_start_s": whole["start_s"],
    }
    return {name: round(value, 4) for name, value in found.items()}


def demo_trainers(up_s: float, down_s: float, start_s: float) -> list[Trainer]:
    """Return the demo's trainers with the curves of their paces, and work that does not end."""
    found = []
    for part in PARTS:
        pace, batch = Pace.parse(part.pace), BATCHES[part.name]
        curve = Curve((0, *range(1, NODES + 1)), (0.0, *(batch(n) / pace.step_s(n) for n in range(1, NODES + 1))))
        endless = Trainer(part.name, curve, 1, NODES, up_s, down_s, math.inf, model=part.name, start_s=start_s)
        found.append(endless)
    return found


def demo_trace(seed: int, seconds: float) -> Trace:
    """Return when the demo's nodes are there, with a random seed."""
    schedule = make_schedule(
        POOL["churn"], NODES, speed=SPEED, hours=POOL["hours"], seed=seed, abrupt=POOL["abrupt"], loop=True
    )
    return Trace.from_fragments(_fragments(schedule, seconds), schedule.nodes, Window(0.0, seconds))


def _fragments(schedule: Schedule, seconds: float) -> list[Fragment]:
    since = dict.fromkeys(schedule.start, 0.0)
    found = []
    for action in schedule.between(0.0, seconds):
        if action.kind == "join":
            since[action.node] = action.time_s
        elif (start := since.pop(action.node)) < action.time_s:
            found.append(Fragment(action.node, start, action.time_s))
    return found + [Fragment(node, start, seconds, open=True) for node, start in since.items()]


def shares(trace: Trace, trainers: Sequence[Trainer], noise: Noise) -> dict[str, float]:
    """Return the work done by each rule, as a share of the best."""
    policy = policy_of(Config(policy=PolicySettings(horizon_s=HORIZON_S)))
    equal = replace(policy, allocator=make_allocator("equal"))
    runs: dict[str, tuple[Knowledge, ReplaySettings]] = {
        "learned": (LearnedTruth(noise), ReplaySettings(policy)),
        "known": (KnownTruth(), ReplaySettings(policy)),
        "equal": (KnownTruth(), ReplaySettings(equal)),
    }
    found = {}
    for name, (knowledge, settings) in runs.items():
        made = replay(trace, trainers, settings, knowledge=knowledge)
        found[name] = round(made.value / made.best_value, 4)
    return found


if __name__ == "__main__":
    main()
