"""What tests of whole jobs share: run a script on fake nodes, do something to it, wait for its end."""

from __future__ import annotations

import asyncio
import atexit
import os
import tempfile
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings, Happening, Outcome
from bftrainer.elastic.manager.processes import worker_environment
from bftrainer.errors import InputError
from bftrainer.processes.launch import Command
from bftrainer.processes.warm import PRELOAD, WarmLauncher

SETTINGS = CoordinatorSettings(silence_s=3.0, grace_s=20.0, background_start=False)
"""At idle priority, newcomers would start when the training is over, if other tests keep the machine busy."""
ALONE_S = 240.0
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # as a coordinator's workers have: they share a warm parent


def script(name: str) -> str:
    """The path of a training script beside the tests."""
    return str(Path(__file__).resolve().parents[2] / "elastic" / name)


@cache
def warm(*also: str) -> tuple[asyncio.AbstractEventLoop, WarmLauncher]:
    """One warm parent for all tests of a process: importing torch, and `also`, takes longer than most of them."""
    loop, launcher = asyncio.new_event_loop(), WarmLauncher(preload=(*PRELOAD, *also))

    def close() -> None:
        loop.run_until_complete(launcher.close())
        loop.close()

    atexit.register(close)
    return loop, launcher


def play(
    scenario: Callable[[Coordinator], Awaitable[None]],
    folder: Path,
    argv: list[str],
    settings: CoordinatorSettings = SETTINGS,
    watch: Callable[[Happening], None] = lambda happening: None,
    nodes: tuple[int, int] = (1, 8),
    timeout_s: float = 120.0,
    preload: tuple[str, ...] = (),
) -> Outcome:
    """Run a job, do something to it, and wait for its end. `preload` is imported before its workers start."""
    loop, launcher = warm(*preload)

    async def main() -> Outcome:
        async with Coordinator(
            argv, launcher, nodes=nodes, folder=folder / "logs", settings=settings, watch=watch
        ) as job:
            try:
                await scenario(job)
            except InputError as problem:  # "the job is over": why, says its outcome
                raise AssertionError(str(await asyncio.wait_for(job.wait(), timeout_s))) from problem
            outcome = await asyncio.wait_for(job.wait(), timeout_s)
            if outcome.status == "failed":
                print(outcome.error, outcome.traceback)
            return outcome

    return loop.run_until_complete(main())


def run_alone(folder: Path, *argv: object, status: int = 0, **environment: str) -> str:
    """Run a script in a folder as a user does by hand, but forked from the warm parent; what it printed.

    It must end with this status.
    """
    loop, launcher = warm()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("BFTRAINER_")}
    env = worker_environment(inherited, THREADS, environment)

    async def main(output: Path) -> int:
        process = await launcher.start(Command(tuple(map(str, argv)), env, str(folder), str(output)))
        try:
            return await asyncio.wait_for(process.wait(), ALONE_S)
        except TimeoutError:
            process.kill_group()
            raise

    with tempfile.TemporaryDirectory() as room:
        output = Path(room, "output")
        ended = loop.run_until_complete(main(output))
        said = output.read_text()
    assert ended == status, said
    return said


def on(count: int) -> Callable[[Coordinator], Awaitable[None]]:
    """The scenario in which nothing happens to `count` nodes."""

    async def scenario(job: Coordinator) -> None:
        await job.add(count)

    return scenario
