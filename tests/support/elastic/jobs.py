"""What tests of whole jobs share: run a script on fake nodes, do something to it, wait for its end."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings, Happening, Outcome
from bftrainer.errors import InputError
from bftrainer.processes.warm import PRELOAD as PRELOADED
from bftrainer.processes.warm import WarmLauncher

PRELOAD = (*PRELOADED, "torch._dynamo")
"""The first optimizer imports torch._dynamo, which takes most of a worker's start."""
SETTINGS = CoordinatorSettings(silence_s=3.0, grace_s=20.0)


def script(name: str) -> str:
    """The path of a training script beside the tests."""
    return str(Path(__file__).resolve().parents[2] / "elastic" / name)


@cache
def warm() -> tuple[asyncio.AbstractEventLoop, WarmLauncher]:
    """One warm parent for all tests of a process: importing torch takes longer than most of them."""
    loop, launcher = asyncio.new_event_loop(), WarmLauncher(preload=PRELOAD)

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
) -> Outcome:
    """Run a job, do something to it, and wait for its end."""
    loop, launcher = warm()

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


def on(count: int) -> Callable[[Coordinator], Awaitable[None]]:
    """The scenario in which nothing happens to `count` nodes."""

    async def scenario(job: Coordinator) -> None:
        await job.add(count)

    return scenario
