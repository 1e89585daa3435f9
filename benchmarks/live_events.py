"""From an event of the pool to training again, on a live system: a controller, four virtual nodes, one PyTorch trainer.

    python benchmarks/live_events.py --json

A node's agent is killed (the node vanishes); some time later the pool has it back. Measured from the workers' own
records of committed steps:
- leave: from the kill to the first step that the others commit without it;
- join: from the agent's connection to the first step of a generation with the new node in it, the newcomer's process
  being forked from a warm one;
- pause: what those who trained lost when it came, by their own clocks.
The machine's cores are shared by all: `cores` says how many there are.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bftrainer.client.api import ApiClient, find_controller

WORKER = Path(__file__).resolve().parent / "workers" / "ticking.py"


def main() -> None:
    """Run it and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=5, help="the pool waits longer after each, up to 30 s")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), args.nodes, args.repetitions)
    if args.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:>24}  {value}")


def measure(folder: Path, nodes: int, repetitions: int) -> dict[str, Any]:
    """All repetitions, one after the other, on one controller."""
    state, steps = folder / "state", folder / "steps"
    steps.mkdir()
    argv = [sys.executable, "-m", "bftrainer", "serve", "--port", "0", "--state", str(state), "--nodes", str(nodes)]
    serve = subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        _until(lambda: (state / "client.json").exists(), "a controller")
        with ApiClient(find_controller(state)) as api:
            _until(lambda: len(api.nodes()) == nodes, "the nodes")
            spec = {"script": str(WORKER), "args": [str(steps)], "min_nodes": 1, "max_nodes": nodes, "cwd": str(folder)}
            trainer = str(api.submit(spec)["id"])
            _until(lambda: _world(steps) == nodes, "training on all nodes")
            rows = [_repeat(api, trainer, steps, nodes) for _ in range(repetitions)]
            api.cancel(trainer)
    finally:
        serve.send_signal(signal.SIGTERM)
        serve.wait(30)
    leaves, joins, pauses = ([row[key] for row in rows] for key in ("leave", "join", "pause"))
    return {
        "nodes": nodes,
        "cores": os.cpu_count(),
        "repetitions": repetitions,
        "leave_to_step_median_s": round(statistics.median(leaves), 3),
        "leave_to_step_max_s": round(max(leaves), 3),
        "join_to_compute_median_s": round(statistics.median(joins), 3),
        "join_to_compute_max_s": round(max(joins), 3),
        "survivors_pause_median_s": round(statistics.median(pauses), 4),
        "survivors_pause_max_s": round(max(pauses), 4),
        "goals": {"leave_to_step_median_s": 1.0, "join_to_compute_median_s": 3.0, "survivors_pause_median_s": 0.5},
    }


def _repeat(api: ApiClient, trainer: str, steps: Path, nodes: int) -> dict[str, float]:
    last = int(api.events(limit=1)["last"])
    victim = api.nodes()[-1]
    before = max(row["generation"] for row in _rows(steps))
    killed = time.time()
    os.kill(victim["agent_pid"], signal.SIGKILL)
    _until(lambda: _first(steps, before, nodes - 1), "a step without the node")
    leave = _first(steps, before, nodes - 1) - killed
    _until(lambda: _first(steps, before, nodes), "a step with the node")
    joined = next(e["time"] for e in api.events(after=last, limit=1000, kind="node.joined")["events"])
    join = _first(steps, before, nodes) - joined
    rescales = api.events(after=last, limit=1000, trainer=trainer, kind="rescale")["events"]
    pause = next(e["data"]["pause_s"] for e in rescales if e["data"]["why"] == "grow")
    return {"leave": leave, "join": join, "pause": pause}


def _rows(steps: Path) -> list[dict[str, Any]]:
    found = []
    for path in steps.glob("*.jsonl"):
        for line in path.read_text().splitlines()[-400:]:
            try:
                found.append(json.loads(line))
            except ValueError:  # it is being written, or was cut by a kill
                continue
    return found


def _first(steps: Path, after: int, world: int) -> float:
    """When the first step of a generation after this one was committed by so many nodes; 0: not yet."""
    return min((row["at"] for row in _rows(steps) if row["generation"] > after and row["world"] == world), default=0.0)


def _world(steps: Path) -> int:
    rows = _rows(steps)
    return int(max(rows, key=lambda row: row["at"])["world"]) if rows else 0


def _until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {timeout_s:g} s")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
