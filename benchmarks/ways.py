"""Ways to write an elastic script that the benchmarks compare: `step.py --framework` and `rescale.py --framework`.

A way is a worker, `workers/framework_NAME.py`; `workers/noting.py` says what it has to do. `step_turns` runs a worker
twice at once: elastically, and by the framework's own means as torchrun starts it. Each side has as many ranks. They
take turns of some steps, and one waits while the other trains, so both meet the same machine.

glibc settles by chance how often a process gets the same memory anew. Ranks that BFTrainer starts avoid that, see
`elastic/torch/freed_memory.py`. To compare the rest, give both sides the same settings:
MALLOC_TRIM_THRESHOLD_=268435456 MALLOC_MMAP_THRESHOLD_=33554432.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bftrainer.elastic.defaults import DDP_ENTRY
from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings
from bftrainer.processes.launch import ColdLauncher, Command, Process

WORKERS = Path(__file__).parent / "workers"
FRAMEWORKS = tuple(sorted(path.stem.removeprefix("framework_") for path in WORKERS.glob("framework_*.py")))
OF_TORCH = ("ddp", "prepare")
"""Ways that need no package but PyTorch."""
PRELOAD = {
    "transformers": ("transformers.trainer", "bftrainer.integrations.transformers"),
    "accelerate": ("bftrainer.integrations.accelerate",),
    "lightning": ("lightning",),
}
"""Modules of a framework that warm parents import. Newcomers start at idle priority, so that those who train keep the
cores of this one machine. They would be minutes late if each of them had to import a framework."""
RANKS = 2
STEPS_PER_TURN = 50
"""Both as in `workers/noting.py`."""
DEADLINE_S = 180.0


def refuse_missing(framework: str, program: str) -> None:
    """Say how to get the framework, if it is not installed here."""
    if framework not in OF_TORCH and importlib.util.find_spec(framework) is None:
        raise SystemExit(
            f"{framework} is not installed in this environment. Build one that has it and run this there:\n"
            f"  bash scripts/frameworks.sh --install {framework}\n"
            f"  build/frameworks/{framework}/bin/python benchmarks/{program} --framework {framework}"
        )


def worker_command(framework: str, folder: str, mode: str) -> list[str]:
    """Return the command of a worker, for a Coordinator or a launcher. For MODE see `workers/noting.py`."""
    stands_in = DDP_ENTRY if framework == "ddp" and mode != "plain" else ()
    return [*stands_in, str(WORKERS / f"framework_{framework}.py"), folder, mode]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one side."""

    rate: float
    """Steps per second."""
    processor_s: float
    """Processor time per step, of all ranks. Unlike the rate it depends little on what else the machine does."""


@dataclass(slots=True)
class Turns:
    """The ranks of one side, which train for a turn when told to."""

    folder: Path
    mode: str
    pipes: dict[str, int] = field(default_factory=dict)
    """Pipes of the ranks, by the name of the rank."""
    taken: int = 0

    def are_ready(self) -> bool:
        """Return whether all ranks have made their first step and wait."""
        for path in self.folder.glob(f"pipe-{self.mode}-*"):
            name = path.name.removeprefix("pipe-")
            if name not in self.pipes:
                try:
                    self.pipes[name] = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                except OSError:  # nobody reads it yet
                    return False
        return len(self.pipes) == RANKS

    def begin(self) -> None:
        """Have all ranks train for a turn."""
        for pipe in self.pipes.values():
            os.write(pipe, b".")
        self.taken += 1

    def are_done(self) -> bool:
        """Return whether all ranks are done with the turn."""
        return all(len(times) == self.taken for times in self._times())

    def measured(self) -> Turn:
        """Return what the last turn took, on the slowest rank and on all of them."""
        last = [times[-1] for times in self._times()]
        return Turn(STEPS_PER_TURN / max(wall for wall, _ in last), sum(busy for _, busy in last) / STEPS_PER_TURN)

    def _times(self) -> list[list[tuple[float, float]]]:
        texts = [(self.folder / f"times-{name}").read_text() for name in self.pipes]
        rows = [[line.split() for line in text.split("\n")[:-1]] for text in texts]
        return [[(float(wall), float(busy)) for wall, busy in row] for row in rows]


async def step_turns(framework: str, turns: int) -> tuple[list[Turn], list[Turn]]:
    """Return the turns of both sides: elastic, and by the framework's own means. The first of each is left out."""
    launcher = ColdLauncher()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = CoordinatorSettings(silence_s=60.0, background_start=False)
        argv = worker_command(framework, name, "elastic")
        async with Coordinator(argv, launcher, nodes=(RANKS, RANKS), folder=folder, settings=settings) as job:
            await job.add(RANKS)
            ended: list[asyncio.Future[Any]] = [asyncio.create_task(job.wait())]
            for process in await plain_ranks(framework, folder, launcher):
                ended.append(asyncio.create_task(process.wait()))
            sides = [Turns(folder, mode) for mode in ("elastic", "plain")]
            measured: list[list[Turn]] = [[], []]
            try:
                await until(lambda: all(side.are_ready() for side in sides), ended, folder)
                for number in range(turns + 1):
                    for side, found in zip(sides, measured, strict=True):
                        side.begin()
                        await until(side.are_done, ended, folder)
                        found += [side.measured()] if number else []
            finally:
                await launcher.close()
    return measured[0], measured[1]


async def plain_ranks(framework: str, folder: Path, launcher: ColdLauncher) -> list[Process]:
    """Start the ranks of the other side, with the environment that torchrun gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    common |= {"TORCHELASTIC_RUN_ID": "benchmark", "GROUP_RANK": "0"}
    argv = tuple(worker_command(framework, str(folder), "plain"))
    processes = []
    for rank in map(str, range(RANKS)):
        env = {**common, "RANK": rank, "LOCAL_RANK": rank}
        processes.append(await launcher.start(Command(argv, env, str(folder), str(folder / f"plain-{rank}.log"))))
    return processes


async def until(condition: Callable[[], bool], ended: Sequence[asyncio.Future[Any]], folder: Path) -> None:
    """Wait for a condition. Fail if a side ends: both train without end."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        early = [task for task in ended if task.done()]
        if early or time.monotonic() > deadline:
            for log in sorted(folder.rglob("*.log")):
                print(f"{log.name}: {log.read_text()[-2000:]}", file=sys.stderr)
            raise SystemExit(f"a side has ended: {early[0].result()}" if early else f"no answer for {DEADLINE_S:g} s")
        await asyncio.sleep(0.02)
