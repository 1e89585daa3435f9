"""Does the simulator predict a live run? Two paced trainers on four virtual nodes that come and go as written.

    python benchmarks/live_prediction.py [--seeds 10] [--json]

The run is real: a controller, agents, PyTorch workers, nodes that leave and nodes that are killed. Steps are paced, so
that virtual nodes scale as real ones do. Then the simulator replays the run's own events with the curves, pauses and
starts that were measured in it, and the two are compared: how long it took (or, if the simulated one was not done by
the end of the events, how much it made). Seed 0 has a fixed list of events; other seeds draw theirs. The exit status is
1 if the mean of the absolute differences is above 3 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bftrainer.client.api import ApiClient, find_controller
from bftrainer.cluster.config.keys import Config, PolicySettings
from bftrainer.cluster.config.policy import policy_of
from bftrainer.cluster.report.efficiency import judge
from bftrainer.cluster.store.store import FILE, Store

WORKER = Path(__file__).resolve().parent / "workers" / "paced.py"
CHURN = ("4 join node-3", "4 join node-4", "9 leave node-1", "16 kill node-4", "22 join node-1", "29 leave node-3")
PACES = ({1: 0.3, 2: 0.16, 4: 0.1}, {1: 0.2, 2: 0.12, 4: 0.09})
HORIZON_S = 20.0
SNAPSHOT_EVERY_S = 1.0
GOAL = 0.03
BATCH, SAMPLES, EPOCHS = 48, 600, 14


def main() -> None:
    """Run it and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="how many runs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    runs = []
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(measure(Path(folder), seed))
        if not args.json:
            print("  ".join(f"{name} {value}" for name, value in runs[-1].items()), flush=True)
    error = statistics.fmean(abs(run["ratio"] - 1.0) for run in runs)
    found = {"runs": runs, "mean_absolute_error": round(error, 4), "goal": GOAL, "met": error <= GOAL}
    print(json.dumps(found) if args.json else f"mean absolute error {error:.1%}, goal {GOAL:.0%}")
    sys.exit(not found["met"])


def churn_of(seed: int) -> tuple[str, ...]:
    """The changes of the pool: nodes join, leave and are killed, at most one every three seconds; one node stays."""
    if seed == 0:
        return CHURN
    rng, here, lines, at = random.Random(seed), {1, 2, 3, 4}, [], 4.0
    while at < 60:
        away = sorted({1, 2, 3, 4} - here)
        if away and (len(here) == 1 or rng.random() < 0.5):
            node = rng.choice(away)
            here.add(node)
            lines.append(f"{at:.1f} join node-{node}")
        else:
            node = rng.choice(sorted(here))
            here.discard(node)
            lines.append(f"{at:.1f} {rng.choice(('leave', 'kill'))} node-{node}")
        at += rng.uniform(3.0, 10.0)
    return ("0 join node-3", "0 join node-4", *lines)


def measure(folder: Path, seed: int = 0) -> dict[str, Any]:
    """The live run, and the simulated one."""
    state, churn = folder / "state", folder / "churn.txt"
    churn.write_text("\n".join(churn_of(seed)) + "\n")
    argv = [sys.executable, "-m", "bftrainer", "serve", "--port", "0", "--state", str(state), "--nodes", "4"]
    argv += ["--set", f"pool.churn={churn}", "--set", f"policy.horizon_s={HORIZON_S:g}"]
    argv += [
        "--set",
        f"trainers.snapshot_every_s={SNAPSHOT_EVERY_S:g}",
    ]  # a trainer whose only node is killed repeats a second, no more
    serve = subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while not (state / "client.json").exists():
            _wait(deadline, "a controller")
        with ApiClient(find_controller(state)) as api:
            names = [str(api.submit(_spec(number, pace, folder))["id"]) for number, pace in enumerate(PACES)]
            while any(api.trainer(name)["state"] not in ("done", "failed") for name in names):
                _wait(deadline, "the end of the trainers")
    finally:
        serve.send_signal(signal.SIGTERM)
        serve.wait(30)
    with Store.open(state / FILE, read_only=True) as store:
        policy = policy_of(Config(policy=PolicySettings(horizon_s=HORIZON_S)))
        found = judge(store, policy, snapshot_every_s=SNAPSHOT_EVERY_S)
    # A simulated run that is cut by the end of the events would have gone on at the pace it had.
    predicted_s = found.simulated_s * found.outcome_samples / found.simulated_samples
    return {
        "seed": seed,
        "cores": os.cpu_count(),
        "samples": found.outcome_samples,
        "live_s": round(found.seconds, 2),
        "predicted_s": round(predicted_s, 2),
        "ratio": round(predicted_s / found.seconds, 4),
        "efficiency": round(found.efficiency, 4),
        "bound": round(found.bound, 4),
        "work_done": round(found.work.live, 4),
        "simulated_work_done": round(found.work.simulated, 4),
        "equal_work_done": round(found.work.equal, 4),
        "node_start_s": round(found.start_s, 2),
        "load_average": round(os.getloadavg()[0], 1),
    }


def _spec(number: int, pace: dict[int, float], folder: Path) -> dict[str, Any]:
    return {
        "name": f"paced-{number}",
        "model": f"pace-{number}",  # one script, two curves
        "script": str(WORKER),
        "args": [str(EPOCHS), str(SAMPLES), str(BATCH)],
        "min_nodes": 1,
        "max_nodes": 4,
        "cwd": str(folder),
        "env": {"BFTRAINER_PACE": ",".join(f"{size}:{step_s}" for size, step_s in pace.items())},
        "curve": {"nodes": list(pace), "rates": [BATCH / step_s for step_s in pace.values()]},  # as profiled before
    }


def _wait(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{what} did not come in time")
    time.sleep(0.1)


if __name__ == "__main__":
    main()
