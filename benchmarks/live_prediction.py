"""Does the simulator predict a live run? Two paced trainers on four virtual nodes that come and go as written.

    python benchmarks/live_prediction.py [--json]

The run is real: a controller, agents, PyTorch workers, a node that leaves and one that is killed. Steps are paced, so
that virtual nodes scale as real ones do. Then the simulator replays the run's own events with the curves and pauses
that were measured in it, and the two are compared: how long it took (or, if the simulated one was not done by the end
of the events, how much it made). The exit status is 1 if they differ by more than a tenth.
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
GOAL = 0.1
BATCH, SAMPLES, EPOCHS = 48, 600, 14


def main() -> None:
    """Run it and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    if args.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:>20}  {value}")
    sys.exit(abs(found["ratio"] - 1.0) > GOAL)


def measure(folder: Path) -> dict[str, Any]:
    """The live run, and the simulated one."""
    state, churn = folder / "state", folder / "churn.txt"
    churn.write_text("\n".join(CHURN) + "\n")
    argv = [sys.executable, "-m", "bftrainer", "serve", "--port", "0", "--state", str(state), "--nodes", "4"]
    argv += ["--set", f"pool.churn={churn}", "--set", f"policy.horizon_s={HORIZON_S:g}"]
    argv += ["--set", "trainers.snapshot_every_s=1"]  # a trainer whose only node is killed repeats a second, no more
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
        found = judge(store, policy_of(Config(policy=PolicySettings(horizon_s=HORIZON_S))))
    # A simulated run that is cut by the end of the events would have gone on at the pace it had.
    predicted_s = found.simulated_s * found.outcome_samples / found.simulated_samples
    return {
        "cores": os.cpu_count(),
        "samples": found.outcome_samples,
        "live_s": round(found.seconds, 2),
        "predicted_s": round(predicted_s, 2),
        "ratio": round(predicted_s / found.seconds, 4),
        "efficiency": round(found.efficiency, 4),
        "bound": round(found.bound, 4),
        "node_start_s": round(found.lag_s, 2),
        "load_average": round(os.getloadavg()[0], 1),
    }


def _spec(number: int, pace: dict[int, float], folder: Path) -> dict[str, Any]:
    return {
        "name": f"paced-{number}",
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
