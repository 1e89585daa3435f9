"""An agent whose node is taken gives its workers a moment for what only they have, and no longer."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from bftrainer.cluster.wire.messages import Ended, Going, Join, Started
from support.cluster.agents import SLEEPS, TINY, agent_process, descendants, ended, parent_of, script, start
from support.cluster.fake_controller import FakeController
from support.processes import is_alive
from support.waiting import until

pytestmark = pytest.mark.waits

LONG = 1000.0
"""A time to save that no test waits for."""

SAVES = """
import sys, time
from pathlib import Path
from bftrainer.elastic.membership import Membership
job = Membership.connect()
def taken(within_s):
    Path(sys.argv[1]).write_text(f"{within_s:g}")
    import os
    os._exit(0)
job.on_taken = taken
job.ready()
time.sleep(1000)
"""

FAILS = """
import os, time
from bftrainer.elastic.membership import Membership
from bftrainer.elastic.protocol import Failed
job = Membership.connect()
job.on_taken = lambda within_s: (job.send(Failed("RuntimeError: a loader was killed", "")), os._exit(1))
job.ready()
time.sleep(1000)
"""


def test_a_worker_saves_before_the_agent_says_that_it_goes(tmp_path: Path) -> None:
    saved = tmp_path / "saved"

    async def scene() -> None:
        async with FakeController(welcome={"last_save_s": LONG}) as controller:
            with agent_process(controller) as process:
                await controller.hears(Join)
                await controller.say(start("t1-1", script(tmp_path, SAVES), str(saved)))
                await controller.say(start("t2-1", TINY, "ignores"))  # has nothing to save, and ends at once
                await until(lambda: controller.said("t1-1") == controller.said("t2-1") == ["ready"])
                process.send_signal(signal.SIGTERM)
                assert await ended(process) == 0
                assert (await controller.hears(Going)).reason == "SIGTERM"
                assert controller.all(Ended) == [], "or they would be started again on a node that goes"

    asyncio.run(scene())
    assert saved.read_text() == f"{LONG:g}"


def test_one_that_does_not_come_to_save_is_killed_when_the_time_is_up(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeController(welcome={"last_save_s": 0.3}) as controller:
            with agent_process(controller) as process:
                await controller.hears(Join)
                await controller.say(start("t1-1", TINY))
                await controller.say(start("t2-1", script(tmp_path, SLEEPS), speaks=False))  # is told nothing
                await until(lambda: controller.said("t1-1") == ["ready"] and "t2-1" in controller.logs)
                family = descendants(process.pid)
                os.kill(next(each.pid for each in controller.all(Started) if each.worker == "t1-1"), signal.SIGSTOP)
                process.send_signal(signal.SIGTERM)
                assert await ended(process) == 0
                await until(lambda: not any(is_alive(pid) for pid in family))

    asyncio.run(scene())


def test_what_breaks_because_the_node_is_taken_is_no_failure_of_the_script(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeController(welcome={"last_save_s": LONG}) as controller:
            with agent_process(controller) as process:
                await controller.hears(Join)
                await controller.say(start("t1-1", script(tmp_path, FAILS)))
                await until(lambda: controller.said("t1-1") == ["ready"])
                process.send_signal(signal.SIGTERM)
                assert await ended(process) == 0
                await controller.hears(Going)
                assert controller.said("t1-1") == ["ready"]

    asyncio.run(scene())


def test_a_signal_to_all_processes_of_a_job_does_not_end_workers_before_they_have_saved(tmp_path: Path) -> None:
    """Slurm with proctrack/linuxproc signals the agent, its warm parents and its workers."""
    saved = tmp_path / "saved"
    text = "import signal; signal.signal(signal.SIGTERM, lambda *_: None)\n" + SAVES

    async def scene() -> None:
        async with FakeController(welcome={"last_save_s": LONG}) as controller:
            with agent_process(controller) as process:
                await controller.hears(Join)
                await controller.say(start("t1-1", script(tmp_path, text), str(saved)))
                await until(lambda: controller.said("t1-1") == ["ready"])
                worker = controller.all(Started)[0].pid
                warm = parent_of(worker)
                assert warm != process.pid
                os.kill(warm, signal.SIGTERM)
                os.kill(worker, signal.SIGTERM)
                process.send_signal(signal.SIGTERM)
                assert await ended(process) == 0
                await until(lambda: not is_alive(warm))

    asyncio.run(scene())
    assert saved.exists()
