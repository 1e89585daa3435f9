"""Measures how long training stands still when nodes come and go under torchrun and under torchft.

`rescale.py` compares both with training in place. One process per node trains; a third one joins two, leaves with
notice, joins again and is killed. Nothing that a side needs is installed: what is missing is said.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bftrainer.elastic.local.torchrun import StoreHost, agent_command
from bftrainer.processes.launch import ColdLauncher, Command, Process
from changes import HERE, Measured, commits, longest_gap, median_gap, settled, until

THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
START = 2
Add = Callable[[], Awaitable[Process]]


async def measure_other(
    folder: Path, add: Add, found: Measured, *, name: str, repetitions: int, calm_s: float, steps: int
) -> None:
    """Have nodes of a training in `folder` come and go. `add` starts one more."""
    for _ in range(START):
        await add()
    await settled(folder, START, 0.0, steps)
    for _ in range(repetitions):
        for change in ("shrink", "kill"):
            await asyncio.sleep(calm_s)
            begin = time.monotonic()
            third = await add()
            end = await settled(folder, START + 1, begin, steps)
            _note(found, "grow", commits(folder), begin, end, START + 1, steps)
            await asyncio.sleep(calm_s)
            begin = time.monotonic()
            third.signal(signal.SIGTERM) if change == "shrink" else third.kill_group(signal.SIGKILL)
            end = await settled(folder, START, begin, steps)
            _note(found, change, commits(folder), begin, end, START, steps)
            print(f"{name}: {change} {found.gaps[change][-1]:.2f} s", file=sys.stderr, flush=True)


def _note(
    found: Measured, change: str, made: list[tuple[float, int, int]], begin: float, end: float, world: int, steps: int
) -> None:
    found.gaps[change].append(longest_gap(made, begin, end))
    last = [row for row in made if row[0] <= end and row[2] == world][-steps + 1 :]
    found.steps_s[change].append(median_gap(last, 0.0, end))


@asynccontextmanager
async def torchrun(folder: Path, script: list[str]) -> AsyncIterator[Add]:
    """Give a function that adds a node with a torchrun agent, whose worker runs a script."""
    launcher, store = ColdLauncher(), await StoreHost.start()

    async def add() -> Process:
        command = agent_command(
            script,
            nodes=(1, START + 1),
            node="127.0.0.1",
            endpoint=store.endpoint,
            run_id="rescale",
            env={**os.environ, **THREADS},
            cwd=str(folder),
            output=str(folder / "agents.log"),
            silence_s=3,
        )
        return await launcher.start(command)

    try:
        yield add
    finally:
        await launcher.close()
        await store.close()


@asynccontextmanager
async def torchft(folder: Path, megabytes: float, python: str) -> AsyncIterator[Add]:
    """Give a function that adds a replica of torchft."""
    launcher, script = ColdLauncher(python), str(HERE / "torchft_worker.py")
    environment = {**os.environ, **THREADS}

    def command(*args: str) -> Command:
        return Command((script, *args), environment, str(folder), str(folder / "replicas.log"))

    async def add() -> Process:
        address = (folder / "lighthouse").read_text()
        return await launcher.start(command(str(folder), str(megabytes), address))

    try:
        await launcher.start(command("lighthouse", str(folder)))
        await until((folder / "lighthouse").exists, "torchft's lighthouse")
        yield add
    finally:
        await launcher.close()


def missing(name: str, python: str) -> str:
    """Return why a side cannot be measured; empty if it can."""
    if name == "torchrun":
        return ""
    done = subprocess.run([python, "-c", "import torchft"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["torchft cannot be imported"])[-1]


async def measure_sized(
    name: str, megabytes: float, found: Measured, *, python: str, save_every_s: float, **options: Any
) -> None:
    """Add the changes of one job of torchrun or torchft with a state of this size to `found`."""
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room)
        worker = [str(HERE / "sized_torchrun_worker.py"), room, str(megabytes), str(save_every_s)]
        side = torchrun(folder, worker) if name == "torchrun" else torchft(folder, megabytes, python)
        async with side as add:
            await measure_other(folder, add, found, name=name, **options)
