"""What main jobs of a Slurm cluster wait for longer when BFTrainer harvests its idle nodes.

    python benchmarks/slurm_impact.py --json --figure impact.png

The same schedule of main jobs is played on a test cluster first without and then with BFTrainer and two trainers.
A job's wait is from sbatch to the first line of its script; what is added to it is the difference between both times.
Also measured: for how much of the idle node-time, in spells of 5 s and more, a pilot held the node, and a worker on it
committed steps. All virtual nodes share the machine's cores, so pilots run niced. Needs root and Slurm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slurm_schedule import (
    NAME,
    PILOT,
    MainJob,
    Played,
    failed,
    gentle_python,
    held,
    idle_spells,
    joined,
    play,
    played,
    schedule,
    share,
)

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
from support.cluster.live import Live  # type: ignore[import-not-found] # noqa: E402 - the path comes first
from support.slurm.lab import Lab, cluster  # type: ignore[import-not-found] # noqa: E402 - the path comes first

WORKER = HERE / "workers" / "ticking.py"
GOALS = {"added_wait_median_s": 0.3, "added_wait_p95_s": 1.5, "failed_jobs": 0, "drained_nodes": 0}
PACE = "0.25"
_STEP_GAP_S = 2.0
"""A worker that commits no step for so long does not train meanwhile."""
_PATIENCE_S = 180.0


def main() -> None:
    """Run it and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--nodes", type=int, default=12)
    parser.add_argument("--span", type=float, default=240.0, help="seconds in which the jobs come")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    jobs = schedule(args.seed, args.jobs, args.nodes, args.span)
    try:
        with tempfile.TemporaryDirectory() as folder:
            found, without, with_ = measure(Path(folder), jobs, args.nodes)
    except pytest.skip.Exception as problem:  # no root, or no Slurm
        sys.exit(f"cannot run: {problem}")
    if args.figure:
        draw(args.figure, without, with_)
    if args.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:>24}  {value}")


def measure(folder: Path, jobs: Sequence[MainJob], nodes: int) -> tuple[dict[str, Any], list[float], list[float]]:
    """Both runs: what was found, and the waits without and with BFTrainer."""
    with cluster(nodes) as lab:
        before, lost_before = _without(lab, jobs, folder / "without")
    with cluster(nodes) as lab:
        after, lost, shares = _with(lab, jobs, folder / "with")
    pairs = [(a.wait_s, b.wait_s) for a, b in zip(before, after, strict=True)]
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    without, with_ = [a for a, _ in both], [b for _, b in both]
    added = sorted(b - a for a, b in both)
    found = {
        "jobs": len(jobs),
        "nodes": nodes,
        "cores": os.cpu_count(),
        "added_wait_median_s": round(statistics.median(added), 3),
        "added_wait_p95_s": round(_quantile(added, 0.95), 3),
        "added_wait_max_s": round(added[-1], 3),
        "wait_without_median_s": round(statistics.median(without), 3),
        "wait_with_median_s": round(statistics.median(with_), 3),
        **lost,
        "failed_jobs_without": lost_before["failed_jobs"],
        **{name: round(value, 3) for name, value in shares.items()},
        "goals": {**GOALS, "occupied_share": 0.85},
    }
    return found, without, with_


def _without(lab: Lab, jobs: Sequence[MainJob], folder: Path) -> tuple[tuple[Played, ...], dict[str, int]]:
    folder.mkdir()
    play(lab, jobs, folder / "jobs")
    _until(lambda: not lab.jobs("-p", "main"), "the end of all main jobs")
    return played(jobs, folder / "jobs"), _lost(lab)


def _with(
    lab: Lab, jobs: Sequence[MainJob], folder: Path
) -> tuple[tuple[Played, ...], dict[str, int], dict[str, float]]:
    steps = folder / "steps"
    steps.mkdir(parents=True)
    pool = {"partition": "scavenger", "python": str(gentle_python(folder)), "interval_s": "1"}
    options = [word for name, value in pool.items() for word in ("--set", f"pool.{name}={value}")]
    env = {"SLURM_CONF": str(lab.conf)}
    with Live(folder / "state", "--pool", "slurm", "--drain", *options, env=env) as live:
        for name in ("one", "two"):
            pace = {"BFTRAINER_PACE": PACE}
            live.submit(WORKER, str(steps), nodes=f"1-{lab.count // 2}", name=name, env=pace)
        _until(lambda: len({row["node"] for row in _rows(steps)}) == lab.count, "training on all nodes")
        begin = play(lab, jobs, folder / "jobs")
        _until(lambda: not lab.jobs("-p", "main"), "the end of all main jobs")
        end = time.time()
        live.stop(timeout_s=60)
        assert not lab.jobs(), "pilots are left"
    log = lab.folder / "log" / "jobcomp.log"
    spells = idle_spells(held(log, NAME), lab.states(), begin, end)
    moments: dict[str, list[float]] = defaultdict(list)
    for row in _rows(steps):
        moments[row["node"]].append(row["at"])
    shares = {
        "idle_share": sum(b - a for pairs in spells.values() for a, b in pairs) / (lab.count * (end - begin)),
        "occupied_share": share(spells, held(log, PILOT)),
        "computing_share": share(spells, joined(moments, _STEP_GAP_S)),
    }
    return played(jobs, folder / "jobs"), _lost(lab), shares


def _lost(lab: Lab) -> dict[str, int]:
    bad = sum(any(word in state for word in ("drain", "down", "fail")) for state in lab.states().values())
    return {"failed_jobs": failed(lab.folder / "log" / "jobcomp.log"), "drained_nodes": bad}


def _rows(steps: Path) -> list[dict[str, Any]]:
    found = []
    for path in steps.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # cut by a kill
                continue
    return found


def _quantile(ordered: Sequence[float], q: float) -> float:
    return statistics.quantiles(ordered, n=100, method="inclusive")[round(100 * q) - 1]


def _until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {_PATIENCE_S:g} s")
        time.sleep(0.5)


def draw(path: Path, without: Sequence[float], with_: Sequence[float]) -> None:
    """How long jobs waited, without and with BFTrainer, and what was added to each."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.ecdf(without, label="without BFTrainer", color="#777777")
    left.ecdf(with_, label="with BFTrainer", color="#c44e52")
    left.set(xscale="log", xlabel="wait of a main job (s)", ylabel="share of jobs")
    left.legend(frameon=False, loc="lower right")
    right.ecdf([b - a for a, b in zip(without, with_, strict=True)], color="#c44e52")
    goals = GOALS["added_wait_median_s"], GOALS["added_wait_p95_s"]
    right.plot(goals, (0.5, 0.95), "kx", label=f"goals: median {goals[0]} s, 95 % {goals[1]} s")
    right.set(xlabel="added wait (s)", ylabel="share of jobs")
    right.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
