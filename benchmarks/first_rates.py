"""Does a later trial of a script begin with the right speed? A live sweep of one script on nodes that come and go.

    python benchmarks/first_rates.py [--trials 50] [--at-once N] [--json]

The run is real: a controller, agents, PyTorch workers with paced steps, on six virtual nodes that come and go as on
Summit, 90 times as fast. For each trial of the second half, the rate that the scheduler expected when it first gave it
nodes is compared with what the trial then measured on so many nodes. The exit status is 1 if fewer than nine in ten are
within 10 %. A trial whose size changed before it measured anything at its first one is not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bftrainer.client.api import ApiClient, find_controller
from bftrainer.cluster.store.events import Decided, TrainerLearned, kinds_of
from bftrainer.cluster.store.replay import PoolReplay
from bftrainer.cluster.store.scheduling_events import learned_trainer
from bftrainer.cluster.store.store import FILE, Store

WORKER = Path(__file__).resolve().parent / "workers" / "paced.py"
PACE = "1:0.3,2:0.17,4:0.11,6:0.1"
POOL = {"nodes": 6, "churn": "summit", "speed": 90, "hours": 6, "loop": "true", "seed": 3}
BATCH, SAMPLES, EPOCHS = 48, 600, 3
WITHIN, GOAL = 0.10, 0.9


def main() -> None:
    """Run the sweep and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--at-once", type=int, metavar="N", help="how many trials are considered at once")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), args.trials, args.at_once)
        rows = compare(Path(folder) / "state")
    later = [row for row in rows if row["number"] > args.trials // 2]
    compared = [row for row in later if row["measured"] is not None]
    good = sum(abs(row["expected"] / row["measured"] - 1) <= WITHIN for row in compared)
    share = good / len(compared) if compared else 0.0
    found = {"rows": rows, "later": len(later), "compared": len(compared), "within": good, "share": round(share, 3)}
    sizes = Counter(str(row["nodes"]) for row in compared)
    worst = max((abs(row["expected"] / row["measured"] - 1) for row in compared), default=0.0)
    found |= {"first_sizes": dict(sorted(sizes.items())), "most": round(worst, 4)}
    found |= {"goal": GOAL, "met": share >= GOAL, "load_average": round(os.getloadavg()[0], 1)}
    if args.json:
        print(json.dumps(found))
    else:
        print(f"{good} of {len(compared)} of the last {len(later)} trials are within {WITHIN:.0%}, goal {GOAL:.0%}")
        print(
            f"the largest difference is {worst:.1%}; trials by the nodes they began on: {dict(sorted(sizes.items()))}"
        )
    sys.exit(not found["met"])


def run(folder: Path, trials: int, at_once: int | None) -> None:
    """Run the sweep to its end."""
    state = folder / "state"
    argv = [sys.executable, "-m", "bftrainer", "serve", "--port", "0", "--state", str(state)]
    argv += [word for key, value in POOL.items() for word in ("--set", f"pool.{key}={value}")]
    argv += ["--set", "policy.horizon_s=20", "--set", "trainers.snapshot_every_s=1"]
    argv += ["--set", f"policy.max_parallel={at_once}"] if at_once is not None else []
    serve = subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 600
        while not (state / "client.json").exists():
            _wait(deadline)
        with ApiClient(find_controller(state)) as api:
            for number in range(trials):
                api.submit(_spec(number, folder))
            while any(row["state"] not in ("done", "failed") for row in api.trainers()):
                _wait(deadline)
    finally:
        serve.send_signal(signal.SIGTERM)
        serve.wait(30)


def compare(state: Path) -> list[dict[str, Any]]:
    """Return for each trial its first size, the rate that was expected there, and the one that it measured."""
    told: dict[str, TrainerLearned] = {}
    first: dict[str, tuple[int, float]] = {}
    with Store.open(state / FILE, read_only=True) as store:
        for at in PoolReplay().read(store.all_events(kinds_of(TrainerLearned, Decided))):
            match at.event:
                case TrainerLearned() as learned:
                    told[learned.trainer] = learned
                case Decided(nodes=nodes):
                    for trainer, held in nodes.items():
                        if held and trainer not in first:
                            first[trainer] = len(held), learned_trainer(told[trainer]).curve.rate(len(held))
        rows = []
        for number, row in enumerate(store.trainers(), 1):
            size, expected = first[row.id]
            measured = (row.learned or {}).get("in_use", {}).get(str(size))
            rows.append({"number": number, "nodes": size, "expected": round(expected, 2), "measured": measured})
    return rows


def _spec(number: int, folder: Path) -> dict[str, Any]:
    return {
        "name": f"trial-{number}",
        "group": "sweep",
        "script": str(WORKER),
        "args": [str(EPOCHS), str(SAMPLES), str(BATCH)],
        "min_nodes": 1,
        "max_nodes": 6,
        "cwd": str(folder),
        "env": {"BFTRAINER_PACE": PACE},
    }


def _wait(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("the sweep did not end in time")
    time.sleep(0.2)


if __name__ == "__main__":
    main()
