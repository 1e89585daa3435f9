"""How long does training stand still when nodes come and go? In place against torchrun, one run, one machine.

    python benchmarks/rescale.py [--json] [--repetitions 5] [--torchrun-repetitions 3]

Two ranks train a CNN of 100,000 parameters; a third joins (`grow`), leaves with notice (`shrink`), joins again and is
killed with SIGKILL (`kill`). The figure is the longest time without a committed step around the change. torchrun has
the settings that made it quickest here (`bftrainer.elastic.local.torchrun`), its script saves a checkpoint at every
step. A newcomer in place is forked from a warm parent at low priority: `warm_join` has the pause and the share of their
normal rate that the others keep from its start until it is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from bftrainer import __version__
from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings, Happening
from bftrainer.elastic.local.torchrun import StoreHost, agent_command
from bftrainer.elastic.protocol import Ready
from bftrainer.processes.launch import ColdLauncher, Process
from bftrainer.processes.warm import WarmLauncher

HERE = Path(__file__).parent / "workers"
CHANGES = ("grow", "shrink", "kill")
CALM_S = 2.0
"""Undisturbed training before each change, which tells the normal rate."""
DEADLINE_S = 180.0


def commits(folder: Path) -> list[tuple[float, int, int]]:
    """When a step was first committed, which, and by how many ranks; by time."""
    first: dict[int, tuple[float, int]] = {}
    for log in folder.glob("commits-*"):
        for line in log.read_text().splitlines():
            fields = line.split()
            if len(fields) == 3:
                at, step, world = float(fields[0]), int(fields[1]), int(fields[2])
                if step not in first or at < first[step][0]:
                    first[step] = (at, world)
    return sorted((at, step, world) for step, (at, world) in first.items())


def longest_gap(found: list[tuple[float, int, int]], begin: float, end: float) -> float:
    """The longest time without a commit between two moments."""
    times = [at for at, _, _ in found]
    before = [at for at in times if at <= begin]
    inside = [at for at in times if begin < at <= end]
    points = [before[-1] if before else begin, *inside]
    return max((b - a for a, b in pairwise(points)), default=0.0)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"rescale: {what} did not happen within {DEADLINE_S:g} s")
        await asyncio.sleep(0.05)


async def settled(folder: Path, world: int, after: float, steps: int = 20) -> float:
    """Wait until so many ranks have committed some steps since a moment; the moment when they had."""
    found: list[float] = []

    def enough() -> bool:
        found[:] = [at for at, _, ranks in commits(folder) if at > after and ranks == world]
        return len(found) >= steps

    await until(enough, f"training on {world} ranks")
    return found[steps - 1]


async def in_place(repetitions: int) -> tuple[dict[str, list[float]], list[dict[str, float]]]:
    """The elastic side: gaps by change, and what the newcomers did to the others."""
    gaps: dict[str, list[float]] = {change: [] for change in CHANGES}
    joins: list[dict[str, float]] = []
    ready: dict[str, float] = {}

    def watch(happening: Happening) -> None:
        if isinstance(happening.message, Ready):
            ready[happening.node] = time.monotonic()

    with tempfile.TemporaryDirectory() as name:
        folder, launcher = Path(name), WarmLauncher()
        argv = [str(HERE / "rescale_worker.py"), name]
        async with Coordinator(argv, launcher, nodes=(1, 3), settings=CoordinatorSettings(), watch=watch) as job:
            await job.add(2)
            await settled(folder, 2, 0.0)

            async def grow() -> str:
                calm = time.monotonic()
                await asyncio.sleep(CALM_S)
                begin = time.monotonic()
                (node,) = await job.add(1)
                end = await settled(folder, 3, begin)
                found = commits(folder)
                gap = longest_gap(found, begin, end)
                gaps["grow"].append(gap)
                normal = sum(calm < at <= begin for at, _, _ in found) / (begin - calm)
                meanwhile = sum(begin < at <= ready[node] for at, _, _ in found) / (ready[node] - begin)
                joins.append({"pause_s": gap, "rate_share": meanwhile / normal, "start_s": ready[node] - begin})
                return node

            for _ in range(repetitions):
                for change in ("shrink", "kill"):
                    node = await grow()
                    await asyncio.sleep(CALM_S)
                    begin = time.monotonic()
                    if change == "shrink":
                        job.remove(node)
                    else:
                        job.signal(node, signal.SIGKILL)
                    end = await settled(folder, 2, begin)
                    gaps[change].append(longest_gap(commits(folder), begin, end))
        await launcher.close()
    return gaps, joins


async def by_torchrun(repetitions: int) -> dict[str, list[float]]:
    """The other side: agents come and go, workers are restarted."""
    gaps: dict[str, list[float]] = {change: [] for change in CHANGES}
    launcher = ColdLauncher()
    store = await StoreHost.start()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        async def agent() -> Process:
            command = agent_command(
                [str(HERE / "torchrun_worker.py"), name],
                nodes=(1, 3),
                node="127.0.0.1",
                endpoint=store.endpoint,
                run_id="rescale",
                env=environment,
                cwd=name,
                output=str(folder / "agents.log"),
                silence_s=3,
            )
            return await launcher.start(command)

        try:
            for _ in range(2):
                await agent()
            await settled(folder, 2, 0.0)
            for _ in range(repetitions):
                for change in ("shrink", "kill"):
                    await asyncio.sleep(CALM_S)
                    begin = time.monotonic()
                    third = await agent()
                    end = await settled(folder, 3, begin)
                    gaps["grow"].append(longest_gap(commits(folder), begin, end))
                    await asyncio.sleep(CALM_S)
                    begin = time.monotonic()
                    third.signal(signal.SIGTERM) if change == "shrink" else third.kill_group(signal.SIGKILL)
                    end = await settled(folder, 2, begin)
                    gaps[change].append(longest_gap(commits(folder), begin, end))
                    print(f"torchrun: {change} {gaps[change][-1]:.2f} s", file=sys.stderr)
        finally:
            await launcher.close()
            await store.close()
    return gaps


async def measure(repetitions: int, torchrun_repetitions: int) -> dict[str, Any]:
    """Both sides."""
    mine, joins = await in_place(repetitions)
    theirs = await by_torchrun(torchrun_repetitions)
    found: dict[str, Any] = {"bftrainer": __version__, "cores": os.cpu_count(), "repetitions": repetitions}
    for change in CHANGES:
        ours, other = statistics.median(mine[change]), statistics.median(theirs[change])
        found[change] = {
            "in_place_s": round(ours, 4),
            "torchrun_s": round(other, 3),
            "ratio": round(other / ours, 1),
            "in_place_all_s": [round(gap, 4) for gap in mine[change]],
            "torchrun_all_s": [round(gap, 3) for gap in theirs[change]],
        }
    found["warm_join"] = {
        "pause_s": round(statistics.median(join["pause_s"] for join in joins), 4),
        "survivor_rate_share": round(statistics.median(join["rate_share"] for join in joins), 3),
        "start_s": round(statistics.median(join["start_s"] for join in joins), 3),
    }
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--torchrun-repetitions", type=int, default=3)
    args = parser.parse_args()
    found = asyncio.run(measure(args.repetitions, args.torchrun_repetitions))
    if args.json:
        print(json.dumps(found, indent=1))
        return
    for change in CHANGES:
        row = found[change]
        print(
            f"{change:7} in place {row['in_place_s']:.3f} s, torchrun {row['torchrun_s']:.1f} s: {row['ratio']:.0f} ×"
        )
    join = found["warm_join"]
    print(f"a newcomer pauses the others for {join['pause_s']:.3f} s; while it starts they keep", end=" ")
    print(f"{join['survivor_rate_share']:.0%} of their rate")


if __name__ == "__main__":
    main()
