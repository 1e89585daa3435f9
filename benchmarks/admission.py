"""How long does a decision of the live system take, and how many nodes does it leave idle, by max parallel?

    python benchmarks/admission.py [--json] [--sizes 1000x200,2000x300] [--repetitions 10]

A pool of N nodes and a queue of J trainers of 1 to 64 nodes, which cycle through the seven models of the paper under
the live default objective. The first decision starts all that it can. Each further one follows a node that leaves or
joins. `max_parallel` is the paper's 10, `auto` (the live default) and the whole queue. Times are those of
`Scheduler.decide`, with admission and placement, without compiled code, as in the controller. They are CPU times: a
decision uses one core, and what else the machine does counts little.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from typing import Any

from bftrainer.allocate.exact import ExactAllocator
from bftrainer.core.models import PAPER_CURVES
from bftrainer.core.objective import find_objective
from bftrainer.core.pool import Event
from bftrainer.core.trainer import Trainer
from bftrainer.scheduler import Policy, Scheduler, State

SIZES = "200x300,1000x200,2000x300,10000x2000,40000x3000"


def measure(nodes: int, trainers: int, max_parallel: int | None, repetitions: int) -> dict[str, Any]:
    """One row."""
    curves = list(PAPER_CURVES.values())
    queue = [Trainer(f"t{j}", curves[j % len(curves)], 1, 64, 18.0, 12.0, submit=float(j)) for j in range(trainers)]
    names = [f"n{i}" for i in range(nodes)]
    state = State().pool_changed(Event(0.0, joined=tuple(names)))[0].submitted(*queue)
    objective = find_objective("weighted-efficiency")
    scheduler = Scheduler(Policy(ExactAllocator(compiled=False), objective, max_parallel=max_parallel))
    times_ms, idle = [], 0
    for repetition in range(repetitions + 1):
        began = time.process_time()
        plan = scheduler.decide(state)
        times_ms.append((time.process_time() - began) * 1e3)
        state = state.after(plan)
        idle = max(idle, len(state.pool) - sum(plan.counts.values()))
        node = (names[repetition // 2 * 7 % nodes],)
        event = Event(60.0 * (repetition + 1), *(((), node) if repetition % 2 == 0 else (node, ())))
        state, _ = state.pool_changed(event)
    return {
        "nodes": nodes,
        "trainers": trainers,
        "max_parallel": "auto" if max_parallel is None else max_parallel,
        "considered": len(state.admitted),
        "idle": idle,
        "first_ms": round(times_ms[0], 2),
        "median_ms": round(statistics.median(times_ms[1:]), 2),
        "most_ms": round(max(times_ms[1:]), 2),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sizes", default=SIZES, help="nodes x trainers, separated by commas")
    parser.add_argument("--repetitions", type=int, default=10)
    args = parser.parse_args()
    rows = []
    for size in args.sizes.split(","):
        nodes, trainers = map(int, size.split("x"))
        for max_parallel in (10, None, trainers):
            rows.append(measure(nodes, trainers, max_parallel, args.repetitions))
            if not args.json:
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if args.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
