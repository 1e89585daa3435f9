"""What tests of whole jobs share: run a script on fake nodes, do something to it, wait for its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from bftrainer.elastic.local import Coordinator, Happening, Outcome, Settings
from bftrainer.elastic.processes import Launcher
from bftrainer.elastic.warm import WarmLauncher

SETTINGS = Settings(silence_s=3.0, grace_s=20.0)


def script(name: str) -> str:
    """The path of a training script beside the tests."""
    return str(Path(__file__).with_name(name))


def play(
    scenario: Callable[[Coordinator], Awaitable[None]],
    folder: Path,
    argv: list[str],
    settings: Settings = SETTINGS,
    watch: Callable[[Happening], None] = lambda happening: None,
    nodes: tuple[int, int] = (1, 8),
    timeout_s: float = 120.0,
) -> Outcome:
    """Run a job, do something to it, and wait for its end."""

    async def main() -> Outcome:
        launcher: Launcher = WarmLauncher()
        try:
            async with Coordinator(
                argv, launcher, nodes=nodes, folder=folder / "logs", settings=settings, watch=watch
            ) as job:
                await scenario(job)
                outcome = await asyncio.wait_for(job.wait(), timeout_s)
                if outcome.status == "failed":
                    print(outcome.error, outcome.traceback)
                return outcome
        finally:
            await launcher.close()

    return asyncio.run(main())


def on(count: int) -> Callable[[Coordinator], Awaitable[None]]:
    """The scenario in which nothing happens to `count` nodes."""

    async def scenario(job: Coordinator) -> None:
        await job.add(count)

    return scenario
