"""What tests of the agent share: run one, here or as a process, and have it do something."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bftrainer.cluster.agent.agent import Agent
from bftrainer.cluster.agent.options import AgentOptions, ResolvedAgent, resolve
from bftrainer.cluster.wire.messages import Say, Start
from bftrainer.elastic.protocol import Generation, Go
from bftrainer.processes import variables
from support.cluster.fake_controller import FakeController
from support.waiting import until

HERE = Path(__file__).resolve().parents[2] / "cluster"
TINY = str(HERE / "tiny_worker.py")
SLEEPS = "import time; print('up', flush=True); time.sleep(1000)"


def descendants(pid: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found |= {int(child)} | descendants(int(child))
    return found


def resolved(controller: FakeController, secret: str | None = None) -> ResolvedAgent:
    environment = {
        variables.URL: controller.url,
        variables.SECRET: secret or controller.secret,
        variables.NODE: "node-1",
    }
    settings = resolve(AgentOptions(), environment)
    assert variables.SECRET not in environment
    return settings


@asynccontextmanager
async def agent_of(controller: FakeController, preload: tuple[str, ...] = ()) -> AsyncIterator[asyncio.Task[None]]:
    """An agent in this process. At the end it leaves, and must end by that."""
    agent = Agent(resolved(controller), os.environ, preload=preload)
    task = asyncio.create_task(agent.run())
    try:
        yield task
    finally:
        agent.leave("the test is over")
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 20)


@contextmanager
def agent_process(
    controller: FakeController, before: str = "", preload: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """An agent as a process of its own, without torch; the code `before` runs first."""
    program = f"{before}\nfrom bftrainer.cluster.agent.agent import main\nmain(preload={preload!r})"
    env = {
        **os.environ,
        variables.URL: controller.url,
        variables.SECRET: controller.secret,
        variables.NODE: "node-1",
    }
    with tempfile.TemporaryDirectory(prefix="bft-test-") as folder:  # a short path, and nothing left of killed agents
        env["TMPDIR"] = folder
        with subprocess.Popen([sys.executable, "-c", program], env=env, stderr=subprocess.PIPE) as process:
            try:
                yield process
            finally:
                process.kill()


async def ended(process: subprocess.Popen[bytes]) -> int:
    await until(lambda: process.poll() is not None, "the end of the agent")
    assert process.returncode is not None
    return process.returncode


def start(worker: str = "t1-1", *argv: str, **more: Any) -> Start:
    return Start(worker, "t1", argv or (TINY,), **more)


def say(worker: str, message: Generation | Go) -> Say:
    return Say(worker, {"type": type(message).__name__.lower(), **asdict(message)})


async def form(controller: FakeController, worker: str = "t1-1", generation: int = 1) -> None:
    """Have a worker train alone."""
    await controller.say(say(worker, Generation(generation, (worker,))))
    await until(lambda: "arrived" in controller.said(worker))
    await controller.say(say(worker, Go(generation, ("somewhere:0",))))
    await until(lambda: "formed" in controller.said(worker))


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
