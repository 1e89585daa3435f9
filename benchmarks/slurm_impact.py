"""What main jobs of a Slurm cluster wait for longer when BFTrainer harvests its idle nodes.

    python benchmarks/slurm_impact.py --json --figure impact.png
    python benchmarks/slurm_impact.py --nodes 32 --counting --runs 1 --json

A run plays the same schedule of main jobs on test clusters, one after the other: without pilots, with pilots that only
sleep (the floor: what preemption itself costs), and with BFTrainer and two trainers. The order changes from run to
run. The test cluster's Slurm looks at its queue once per second: all arms begin at the same point of this cycle. With
`--twice` the floor is played once more: how far two floors differ is what the machine and Slurm add by chance. The
schedule has bursts that want all nodes, arrays, `--exclusive`, `--nodelist`, dependencies and a reservation. A job's
wait is from sbatch, or from when it could start, to the first line of its script. BFTrainer's share of it is the
difference to the floor, job by job. Also measured: for how much of the idle node-time, in spells of 5 s and more, a
pilot held the node, and a worker on it worked. All virtual nodes share the machine's cores, so workers run at idle
priority and the controller, which has a host of its own elsewhere, behind Slurm's daemons and the main jobs. The kernel
is told meanwhile not to group processes by session. With `--counting` the workers count instead of training with
PyTorch. Needs root and Slurm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pytest

from slurm_schedule import (
    NAME,
    PILOT,
    MainJob,
    Played,
    behind_others,
    cycle_phase,
    failed,
    gentle_python,
    held,
    idle_spells,
    joined,
    play,
    played,
    priorities_across_sessions,
    reserved,
    share,
    together,
    varied,
)

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
from support.cluster.live import Live  # type: ignore[import-not-found] # noqa: E402 - the path comes first
from support.slurm.lab import Lab, cluster  # type: ignore[import-not-found] # noqa: E402 - the path comes first

TRAINING, COUNTING = HERE / "workers" / "ticking.py", HERE / "workers" / "counting.py"
ARMS = ("none", "floor", "bftrainer")
AGAIN = "floor_again"
GOALS = {"over_floor_median_s": 0.1, "over_floor_p95_s": 0.5, "failed_jobs": 0, "drained_nodes": 0}
LEAST_OCCUPIED = 0.85
PACE = "0.25"
_STEP_GAP_S = 2.0
"""A worker that commits no step for so long does not train meanwhile."""
_PATIENCE_S = 240.0
_BEFORE = 0.5
"""Seconds after a look of Slurm at its queue, at which a schedule begins."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one arm plays."""

    jobs: tuple[MainJob, ...]
    folder: Path
    phase: float
    """The fraction of a second at which it begins: in all arms at the same point of Slurm's cycle."""

    def play(self, lab: Lab) -> float:
        """Play it; when it began."""
        return play(lab, self.jobs, self.folder, phase=self.phase)


@dataclass(frozen=True, slots=True)
class Arm:
    """What was measured in one arm of a run."""

    jobs: tuple[Played, ...]
    failed_jobs: int
    drained_nodes: int
    shares: dict[str, float]

    @property
    def waits(self) -> list[float | None]:
        """The wait of each job; None: it never started."""
        return [job.wait_s for job in self.jobs]


def main() -> None:
    """Run it and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--jobs", type=int, default=40, help="jobs of the schedule, besides five of special kinds")
    parser.add_argument("--nodes", type=int, default=12)
    parser.add_argument("--span", type=float, default=240.0, help="seconds in which the jobs come")
    parser.add_argument("--runs", type=int, default=3, help="how often the three arms are played")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run's schedule")
    parser.add_argument("--counting", action="store_true", help="workers that count, without PyTorch")
    parser.add_argument("--twice", action="store_true", help="play the floor twice: how far two floors differ")
    parser.add_argument("--figure", type=Path, help="draw the waits of the first run")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    try:
        with priorities_across_sessions(), tempfile.TemporaryDirectory() as folder:
            for number in range(args.runs):
                jobs = varied(args.seed + number, args.jobs, args.nodes, args.span)
                names = (*ARMS, AGAIN) if args.twice else ARMS
                worker = COUNTING if args.counting else TRAINING
                arms = play_arms(
                    Path(folder) / str(number), jobs, args.nodes, _turned(names, args.seed + number), worker
                )
                runs.append(found_in(arms))
                show(number + 1, runs[-1], sys.stderr if args.json else sys.stdout)
                if args.figure and number == 0:
                    draw(args.figure, arms)
    except pytest.skip.Exception as problem:  # no root, or no Slurm
        sys.exit(f"cannot run: {problem}")
    if args.json:
        facts = {"nodes": args.nodes, "cores": os.cpu_count(), "counting": args.counting, "span_s": args.span}
        goals = {**GOALS, "occupied_share": LEAST_OCCUPIED}
        print(json.dumps({**facts, "runs": runs, "met": sum(run["met"] for run in runs), "goals": goals}))


def _turned(names: Sequence[str], by: int) -> tuple[str, ...]:
    first = by % len(names)
    return (*names[first:], *names[:first])


def play_arms(
    folder: Path, jobs: tuple[MainJob, ...], nodes: int, order: Sequence[str], worker: Path
) -> dict[str, Arm]:
    """Play the schedule in all arms, in this order."""
    players = {"none": _none, "floor": _floor, AGAIN: _floor, "bftrainer": _bftrainer}
    found = {}
    for name in order:
        here = folder / name
        here.mkdir(parents=True)
        with cluster(nodes) as lab:
            phase = cycle_phase(lab, here / "looks", next(iter(lab.states())))
            found[name] = players[name](lab, Schedule(jobs, here / "jobs", (phase + _BEFORE) % 1.0), here, worker)
    return found


def found_in(arms: dict[str, Arm]) -> dict[str, Any]:
    """The figures of one run."""
    floor, ours = arms["floor"], arms["bftrainer"]
    found: dict[str, Any] = {"jobs": len(ours.jobs), "order": list(arms)}
    for name, arm in arms.items():
        waits = sorted(wait for wait in arm.waits if wait is not None)
        found[f"wait_{name}"] = {
            "median_s": round(statistics.median(waits), 3),
            "p95_s": round(_quantile(waits, 0.95), 3),
            "max_s": round(waits[-1], 3),
            "failed_jobs": arm.failed_jobs + len(arm.jobs) - len(waits),
            "drained_nodes": arm.drained_nodes,
        }
    found |= _over("over_floor", floor, ours)
    found["over_floor_by_kind_s"] = _by_kind(floor, ours)
    if AGAIN in arms:
        found |= _over("floors_differ", floor, arms[AGAIN])
    found["failed_jobs"] = found["wait_bftrainer"]["failed_jobs"]
    found["drained_nodes"] = ours.drained_nodes
    found["occupied_share_floor"] = round(floor.shares["occupied_share"], 3)
    found |= {name: round(value, 3) for name, value in ours.shares.items()}
    found["met"] = (
        all(found[name] <= goal for name, goal in GOALS.items()) and found["occupied_share"] >= LEAST_OCCUPIED
    )
    return found


def _over(name: str, floor: Arm, arm: Arm) -> dict[str, float]:
    """How much longer jobs waited in an arm than on the floor: job by job, and the 95 % of all waits of either."""
    over = sorted(b - a for a, b in zip(floor.waits, arm.waits, strict=True) if a is not None and b is not None)
    slowest = [_quantile(sorted(wait for wait in one.waits if wait is not None), 0.95) for one in (floor, arm)]
    return {
        f"{name}_median_s": round(statistics.median(over), 3),
        f"{name}_p95_s": round(_quantile(over, 0.95), 3),
        f"{name}_max_s": round(over[-1], 3),
        f"{name}_p95_of_waits_s": round(slowest[1] - slowest[0], 3),
    }


def _by_kind(floor: Arm, ours: Arm) -> dict[str, float]:
    """The median difference to the floor of each kind of job."""
    found: dict[str, list[float]] = defaultdict(list)
    for a, b in zip(floor.jobs, ours.jobs, strict=True):
        if a.wait_s is not None and b.wait_s is not None:
            found[a.job.kind].append(b.wait_s - a.wait_s)
    return {kind: round(statistics.median(values), 3) for kind, values in sorted(found.items())}


def show(number: int, found: dict[str, Any], output: TextIO) -> None:
    """Print the figures of one run: a later one may fail."""
    print(f"run {number}", file=output)
    for name, value in found.items():
        print(f"{name:>24}  {value}", file=output, flush=True)


def _none(lab: Lab, schedule: Schedule, folder: Path, worker: Path) -> Arm:
    return _measured(lab, schedule, schedule.play(lab), {})


def _floor(lab: Lab, schedule: Schedule, folder: Path, worker: Path) -> Arm:
    """Play with a pilot on every idle node that does nothing and ends at its first signal."""
    with _sleepers(lab):
        _until(lambda: len(lab.jobs("-p", "scavenger", "-t", "R")) == lab.count, "a pilot on every node")
        begin = schedule.play(lab)
        _until(lambda: not lab.jobs("-p", "main"), "the end of all main jobs")
        end = time.time()
    lab.run("scancel", "--partition=scavenger")
    _until(lambda: not lab.jobs(), "the end of all pilots")
    return _measured(lab, schedule, begin, {}, end)


@contextmanager
def _sleepers(lab: Lab) -> Iterator[None]:
    """Keep sleeping pilots on all idle nodes."""
    ending = threading.Event()
    script = lab.folder / "sleeper.sh"
    script.write_text("#!/bin/sh\nexec sleep 14400\n")
    script.chmod(0o755)

    def keep() -> None:
        while not ending.wait(1.0):
            there = {line.partition(" ")[0] for line in lab.run("squeue", "-h", "-o", "%n %i").splitlines()}
            states = lab.run("sinfo", "-N", "-h", "-p", "scavenger", "-o", "%N %T").splitlines()
            for node in (line.split()[0] for line in states if line.split()[1] == "idle"):
                if node not in there and not ending.is_set():
                    lab.run(
                        "sbatch", "--parsable", "-p", "scavenger", "--nodes=1", f"--nodelist={node}", "--exclusive",
                        "--time=4:00:00", "--signal=B:TERM@1", "--no-requeue", "--output=/dev/null",
                        f"--job-name={PILOT}floor", f"--chdir={lab.folder}", str(script),
                    )  # fmt: skip

    keeper = threading.Thread(target=keep)
    keeper.start()
    try:
        yield
    finally:
        ending.set()
        keeper.join()


def _bftrainer(lab: Lab, schedule: Schedule, folder: Path, worker: Path) -> Arm:
    steps = folder / "steps"
    steps.mkdir()
    pool = {"partition": "scavenger", "python": str(gentle_python(folder)), "interval_s": "1"}
    options = [word for name, value in pool.items() for word in ("--set", f"pool.{name}={value}")]
    env = {"SLURM_CONF": str(lab.conf)}
    python = str(behind_others(folder))
    with Live(folder / "state", "--pool", "slurm", "--drain", *options, env=env, python=python) as live:
        for name in ("one", "two"):
            pace = {"BFTRAINER_PACE": PACE}
            live.submit(worker, str(steps), nodes=f"1-{lab.count // 2}", name=name, env=pace)
        _until(lambda: len({row["node"] for row in _rows(steps)}) == lab.count, "work on all nodes")
        begin = schedule.play(lab)
        _until(lambda: not lab.jobs("-p", "main"), "the end of all main jobs")
        end = time.time()
        live.stop(timeout_s=60)
        assert not lab.jobs(), "pilots are left"
    moments: dict[str, list[float]] = defaultdict(list)
    for row in _rows(steps):
        moments[row["node"]].append(row["at"])
    return _measured(lab, schedule, begin, moments, end)


def _measured(
    lab: Lab,
    schedule: Schedule,
    begin: float,
    moments: dict[str, list[float]],
    end: float | None = None,
) -> Arm:
    """Wait for the end of all main jobs and read what has become of them and of the nodes."""
    _until(lambda: not lab.jobs("-p", "main"), "the end of all main jobs")
    log = lab.folder / "log" / "jobcomp.log"
    finished = played(schedule.jobs, schedule.folder)
    end = end or max((job.ended or begin for job in finished), default=begin)
    busy = together(held(log, NAME), reserved(schedule.jobs, schedule.folder))
    spells = idle_spells(busy, lab.states(), begin, end)
    shares = {
        "idle_share": sum(b - a for pairs in spells.values() for a, b in pairs) / (lab.count * (end - begin)),
        "occupied_share": share(spells, together(held(log, PILOT))),
        "computing_share": share(spells, joined(moments, _STEP_GAP_S)),
    }
    lost = _lost(lab)
    return Arm(finished, lost["failed_jobs"], lost["drained_nodes"], shares)


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


def draw(path: Path, arms: dict[str, Arm]) -> None:
    """How long jobs waited in each arm, and how much longer than on the floor with BFTrainer."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    colours = {"none": "#777777", "floor": "#4c72b0", AGAIN: "#9db7dc", "bftrainer": "#c44e52"}
    labels = {"none": "no pilots", "floor": "sleeping pilots", AGAIN: "the same again", "bftrainer": "BFTrainer"}
    for name, arm in arms.items():
        left.ecdf([wait for wait in arm.waits if wait is not None], label=labels[name], color=colours[name])
    left.set(xscale="log", xlabel="wait of a main job (s)", ylabel="share of jobs")
    left.legend(frameon=False, loc="lower right")
    pairs = zip(arms["floor"].waits, arms["bftrainer"].waits, strict=True)
    right.ecdf([b - a for a, b in pairs if a is not None and b is not None], color=colours["bftrainer"])
    goals = GOALS["over_floor_median_s"], GOALS["over_floor_p95_s"]
    right.plot(goals, (0.5, 0.95), "kx", label=f"goals: median {goals[0]} s, 95 % {goals[1]} s")
    right.set(xlabel="BFTrainer minus sleeping pilots (s)", ylabel="share of jobs")
    right.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
