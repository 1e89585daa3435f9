"""Does the simulator predict a live run? Two paced trainers on four virtual nodes that come and go.

    python benchmarks/live_prediction.py [--seeds 10] [--json]
    python benchmarks/live_prediction.py --pool slurm [--seeds 5] [--json]

The run is real: a controller, agents, workers, nodes that leave and nodes that are killed. Steps are paced, so that
virtual nodes scale as real ones do. Then the simulator replays the run's own events with the curves, pauses and starts
that were measured in it, and the two are compared: how long it took (or, if the simulated one was not done by the end
of the events, how much it made).

With the local pool, nodes join, leave and are killed as a list says: seed 0 has a fixed one, other seeds draw theirs.
Workers train with PyTorch. With the Slurm pool, the nodes are those of a real Slurm on this machine, and main jobs come
and go by a seeded schedule. Workers make paced steps without PyTorch, so that nodes begin as soon as on machines with
cores of their own; `--torch` has them train. It needs root and Slurm.

The exit status is 1 if the mean of the absolute differences is above 3 %, with the Slurm pool above 5 %. `--keep DIR`
keeps the state folder of each run.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

from bftrainer.client.api import ApiClient, find_controller
from bftrainer.cluster.config.keys import Config, PolicySettings
from bftrainer.cluster.config.policy import policy_of
from bftrainer.cluster.report.efficiency import judge
from bftrainer.cluster.report.rerun import KINDS, check
from bftrainer.cluster.store.events import kinds_of
from bftrainer.cluster.store.replay import POOL_EVENTS, PoolReplay
from bftrainer.cluster.store.store import FILE, Store

Pool = Literal["local", "slurm"]

WORKERS = Path(__file__).resolve().parent / "workers"
TRAINING, PLAIN = WORKERS / "paced.py", WORKERS / "paced_steps.py"
NODES = 4
CHURN = ("4 join node-3", "4 join node-4", "9 leave node-1", "16 kill node-4", "22 join node-1", "29 leave node-3")
PACES = ({1: 0.3, 2: 0.16, 4: 0.1}, {1: 0.2, 2: 0.12, 4: 0.09})
HORIZON_S = 20.0
SNAPSHOT_EVERY_S = 1.0
GOALS: Mapping[Pool, float] = {"local": 0.03, "slurm": 0.05}
BATCH, SAMPLES = 48, 600
EPOCHS: Mapping[Pool, int] = {"local": 14, "slurm": 28}


def main() -> None:
    """Run it and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--pool", choices=("local", "slurm"), default="local")
    parser.add_argument("--torch", action="store_true", help="with the Slurm pool, train with PyTorch")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the state folder of each run here")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    runs = []
    for seed in range(args.first, args.first + args.seeds):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            if args.keep is not None:
                folder = args.keep / f"seed-{seed}"
                folder.mkdir(parents=True)
            runs.append(measure(folder, seed, args.pool, torch=args.torch or args.pool == "local"))
        if not args.json:
            print("  ".join(f"{name} {value}" for name, value in runs[-1].items()), flush=True)
    found = summary(runs, GOALS[args.pool])
    error, goal = found["mean_absolute_error"], found["goal"]
    print(json.dumps(found) if args.json else f"mean absolute error {error:.1%}, goal {goal:.0%}")
    sys.exit(not found["met"])


def summary(runs: Sequence[Mapping[str, Any]], goal: float) -> dict[str, Any]:
    """Return the figures of several runs."""
    error = statistics.fmean(abs(run["ratio"] - 1.0) for run in runs)
    worst = max(abs(run["ratio"] - 1.0) for run in runs)
    found = {"runs": list(runs), "mean_absolute_error": round(error, 4), "most": round(worst, 4)}
    return {**found, "goal": goal, "met": error <= goal}


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


def measure(folder: Path, seed: int, pool: Pool, *, torch: bool) -> dict[str, Any]:
    """The live run, and the simulated one."""
    load = os.getloadavg()[0]
    specs = [spec(number, pool, folder, torch=torch) for number in range(len(PACES))]
    if pool == "local":
        churn = folder / "churn.txt"
        churn.write_text("\n".join(churn_of(seed)) + "\n")
        run_live(folder, specs, ["--nodes", str(NODES), "--set", f"pool.churn={churn}"])
        return {"seed": seed, **judged(folder, torch=torch), "load_before": round(load, 1)}
    import pytest

    from live_slurm import slurm_site

    with ExitStack() as stack:
        try:
            site = stack.enter_context(slurm_site(folder, NODES, seed))
        except pytest.skip.Exception as problem:  # no root, or no Slurm
            sys.exit(f"cannot run: {problem}")
        run_live(folder, specs, site.options(torch=torch), site.env, site.disturb)
        found = {"seed": seed, **judged(folder, torch=torch), "pilots": site.pilots()}
    return {**found, "load_before": round(load, 1)}


def run_live(
    folder: Path,
    specs: Sequence[Mapping[str, Any]],
    options: Sequence[str],
    env: Mapping[str, str] | None = None,
    disturb: Callable[[Callable[[], bool]], None] | None = None,
) -> None:
    """Run the trainers to their end. `disturb` is called once all nodes are there; it gets a test of the end."""
    state, log = folder / "state", folder / "serve.log"
    argv = [sys.executable, "-m", "bftrainer", "serve", "--port", "0", "--state", str(state), *options]
    # A trainer whose only node is killed repeats a second, no more.
    argv += ["--set", f"policy.horizon_s={HORIZON_S:g}", "--set", f"trainers.snapshot_every_s={SNAPSHOT_EVERY_S:g}"]
    with log.open("wb") as output:
        serve = subprocess.Popen(
            argv, stdout=output, stderr=output, start_new_session=True, env={**os.environ, **(env or {})}
        )
    try:
        deadline = time.monotonic() + 300
        while not (state / "client.json").exists():
            if serve.poll() is not None:
                raise RuntimeError(f"the controller did not start: {log.read_text()[-2000:]}")
            _wait(deadline, "a controller")
        with ApiClient(find_controller(state)) as api:
            names = [str(api.submit(dict(one))["id"]) for one in specs]

            def is_over() -> bool:
                return all(api.trainer(name)["state"] in ("done", "failed") for name in names)

            while disturb is not None and len(api.nodes()) < NODES:
                _wait(deadline, "the nodes")
            if disturb is not None:
                disturb(is_over)
            while not is_over():
                _wait(deadline, "the end of the trainers")
    finally:
        serve.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            serve.wait(60)
        if serve.poll() is None:
            serve.kill()
            serve.wait()


def judged(folder: Path, *, torch: bool) -> dict[str, Any]:
    """The simulated run, compared with the live one."""
    # Without PyTorch, every step is a snapshot.
    snapshot_every_s = SNAPSHOT_EVERY_S if torch else 0.0
    with Store.open(folder / "state" / FILE, read_only=True) as store:
        policy = policy_of(Config(policy=PolicySettings(horizon_s=HORIZON_S)))
        found = judge(store, policy, snapshot_every_s=snapshot_every_s)
        rows = store.trainers()
        end = max(row.ended or 0.0 for row in rows)
        events = PoolReplay().read(store.all_events(kinds_of(*POOL_EVENTS)))
        losses = sum(at.lost for at in events if at.time <= end)
        again = check(store.all_events(KINDS), policy)
    if any(row.state != "done" for row in rows):
        raise RuntimeError(f"the trainers are {', '.join(row.state for row in rows)}; see {folder}")
    # A simulated run that is cut by the end of the events would have gone on at the pace it had.
    predicted_s = found.simulated_s * found.outcome_samples / found.simulated_samples
    return {
        "cores": os.cpu_count(),
        "torch": torch,
        "samples": found.outcome_samples,
        "losses": losses,
        "decisions": again.decisions,
        "decisions_that_differ_when_repeated": len(again.mismatches),
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


def spec(number: int, pool: Pool, folder: Path, *, torch: bool) -> dict[str, Any]:
    """The specification of a trainer."""
    pace, samples = PACES[number], EPOCHS[pool] * SAMPLES
    args = (EPOCHS[pool], SAMPLES, BATCH) if torch else (folder, samples, BATCH)
    return {
        "name": f"paced-{number}",
        "model": f"pace-{number}",  # one script, two curves
        "script": str(TRAINING if torch else PLAIN),
        "args": [str(value) for value in args],
        "min_nodes": 1,
        "max_nodes": NODES,
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
