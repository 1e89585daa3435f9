"""The end of an agent is that of its workers, however it ends and wherever they were forked from."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bftrainer.cluster.agent import folder as folders
from bftrainer.cluster.wire.messages import Beat, Bye, Ended, Going, Join, Started
from support.cluster.agents import (
    SLEEPS,
    TINY,
    agent_of,
    agent_process,
    descendants,
    ended,
    form,
    parent_of,
    script,
    start,
)
from support.cluster.fake_controller import FakeController
from support.processes import is_alive
from support.waiting import until

pytestmark = pytest.mark.waits

# The end of the agent.


def test_a_dismissed_agent_takes_its_workers_along() -> None:
    async def scene() -> None:
        async with FakeController() as controller, agent_of(controller) as running:
            await controller.hears(Join)
            await controller.say(start("t1-1", TINY, "ignores"))
            pid = (await controller.hears(Started)).pid
            await controller.say(Bye("the pool is paused"))
            await asyncio.wait_for(running, 20)
            assert (await controller.hears(Going)).reason == "dismissed: the pool is paused"
            assert not is_alive(pid)

    asyncio.run(scene())


@pytest.mark.parametrize("busy", [False, True])
def test_sigterm_ends_it_soon_with_workers_that_ignore_the_signal(busy: bool) -> None:
    # A busy agent: as soon as it has told us so, its loop waits for ever for something.
    code = """
import time
from bftrainer.cluster.agent import agent
from bftrainer.cluster.wire import messages
told = []
def stuck(self, only=None):
    if told:
        time.sleep(1000)
    if any(worker.ready for worker in self._workers.book.workers):
        told.append(self._link.send(messages.Beat({"stuck": {}})))
agent.Agent._send_logs = stuck
"""

    async def scene() -> None:
        async with FakeController() as controller:
            with agent_process(controller, code if busy else "") as process:
                await controller.hears(Join)
                await controller.say(start("t1-1", TINY, "ignores"))
                await until(lambda: controller.said("t1-1") == ["ready"])
                if busy:
                    await until(lambda: any("stuck" in beat.reports for beat in controller.all(Beat)))
                family = descendants(process.pid)
                assert controller.all(Started)[0].pid in family
                process.send_signal(signal.SIGTERM)
                assert await ended(process) == 0
                await until(lambda: not any(is_alive(pid) for pid in family))
                if not busy:
                    assert (await controller.hears(Going)).reason == "SIGTERM"

    asyncio.run(scene())


def test_a_killed_agent_leaves_no_process(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeController() as controller:
            with agent_process(controller) as process:
                await controller.hears(Join)
                await controller.say(start("t1-1", TINY, "ignores"))
                await controller.say(start("t2-1", script(tmp_path, SLEEPS), speaks=False))
                order = ("sh", "-c", 'trap "" TERM HUP; sleep 1000 & echo up; wait')
                await controller.say(start("t3-1", *order, program=True, speaks=False))
                await until(lambda: controller.said("t1-1") == ["ready"])
                await until(lambda: {"t2-1", "t3-1"} <= controller.logs.keys())
                family = descendants(process.pid)
                assert {message.pid for message in controller.all(Started)} < family
                assert len(family) == 6  # two warm parents, three workers, and what one of them has started
                process.kill()
                await until(lambda: not any(is_alive(pid) for pid in family))

    asyncio.run(scene())


def test_the_folder_of_a_killed_agent_is_removed_by_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(folders, "_MOST_PATH", 1000)
    left, young = tmp_path / f"{folders.PREFIX}left", tmp_path / f"{folders.PREFIX}young"
    for folder in (left, young):
        folder.mkdir()
        (folder / "lock").touch()
    with folders.private_folder() as own:
        for folder in (left, own):
            os.utime(folder, (1e9, 1e9))
        with folders.private_folder() as other:
            assert set(tmp_path.iterdir()) == {own, other, young}
    assert set(tmp_path.iterdir()) == {young}


# A warm parent that the agent has forked off itself.


ABOUT_ITSELF = """
import json, logging, os, sys
before = "colorsys" in sys.modules
print(json.dumps({
    "imported": before, "parent": os.getppid(), "path": sys.path, "argv": sys.argv, "name": __name__,
    "secret": "BFTRAINER_SECRET" in os.environ, "handlers": len(logging.getLogger().handlers),
    "stdin": os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev, "leads": os.getpgid(0) == os.getpid(),
    "open": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
}))
if "raises" in sys.argv:
    raise OSError("on purpose")
if "exits" in sys.argv:
    sys.exit(5)
"""


def test_workers_are_forked_from_what_the_agent_itself_has_imported(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeController() as controller:
            with agent_process(controller, "import colorsys", ("colorsys",)) as process:
                await controller.hears(Join)
                path = script(tmp_path, ABOUT_ITSELF)
                told = {}
                for worker, argv in (("a", "x"), ("b", "raises"), ("c", "exits")):
                    await controller.say(start(worker, path, argv, speaks=False))
                    await until(lambda worker=worker: worker in [message.worker for message in controller.all(Ended)])
                    told[worker] = next(message for message in controller.all(Ended) if message.worker == worker)
                about = {worker: json.loads(message.tail.splitlines()[0]) for worker, message in told.items()}
                parent = about["a"]["parent"]
                assert {facts["parent"] for facts in about.values()} == {parent}
                assert parent_of(parent) == process.pid
                cold = subprocess.run(
                    [sys.executable, path, "x"], stdin=subprocess.DEVNULL, capture_output=True, check=True, text=True
                )
                expected = json.loads(cold.stdout)
                for fact in ("path", "argv", "name", "secret", "handlers", "stdin", "open"):
                    assert about["a"][fact] == expected[fact], fact
                assert about["a"]["imported"]
                assert about["a"]["leads"]
                assert {worker: message.status for worker, message in told.items()} == {"a": 0, "b": 1, "c": 5}
                assert told["b"].tail.endswith("OSError: on purpose\n")
                assert told["b"].tail.count("Traceback") == 1
                assert "agent" not in told["b"].tail

                # Its death is that of its workers, and the next one has a parent that was spawned.
                await controller.say(start("d", script(tmp_path, SLEEPS), speaks=False))
                await until(lambda: "d" in controller.logs)
                os.kill(parent, signal.SIGKILL)
                await until(lambda: any(message.worker == "d" for message in controller.all(Ended)))
                await controller.say(start("e", script(tmp_path, ABOUT_ITSELF), speaks=False))
                await until(lambda: any(message.worker == "e" for message in controller.all(Ended)))
                other = json.loads(controller.all(Ended)[-1].tail)
                assert other["imported"]
                assert other["parent"] != parent
                family = descendants(process.pid)
                process.send_signal(signal.SIGTERM)
                assert await ended(process) == 0
                await until(lambda: not any(is_alive(pid) for pid in family))

    asyncio.run(scene())


def test_a_killed_agent_with_an_inherited_parent_leaves_no_process() -> None:
    async def scene() -> None:
        async with FakeController() as controller:
            with agent_process(controller, "import colorsys", ("colorsys",)) as process:
                await controller.hears(Join)
                await controller.say(start("t1-1", TINY, "prints", "ignores"))
                await form(controller)
                await until(lambda: "step 3" in controller.logs.get("t1-1", ""))
                family = descendants(process.pid)
                assert len(family) == 2
                process.kill()
                await until(lambda: not any(is_alive(pid) for pid in family))

    asyncio.run(scene())
