"""An agent whose node has several ranks, against a controller that the test plays itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bftrainer.cluster.agent.agent import Agent
from bftrainer.cluster.wire.messages import Ended, Gpu, Heard, Join, Start, Started
from bftrainer.elastic.protocol import Generation, Go
from support.cluster.agents import SLEEPS, TINY, resolved, say, script
from support.cluster.fake_controller import FakeController
from support.processes import is_alive
from support.waiting import until

pytestmark = pytest.mark.waits

SHOWS = f"import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ['OMP_NUM_THREADS'])\n{SLEEPS}"


@asynccontextmanager
async def node_with_gpus(controller: FakeController, devices: str) -> AsyncIterator[Join]:
    """An agent that was granted these devices."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": devices}
    environment.pop("OMP_NUM_THREADS", None)
    agent = Agent(resolved(controller), environment, preload=())
    task = asyncio.create_task(agent.run())
    try:
        yield await controller.hears(Join)
    finally:
        agent.leave("the test is over")
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 20)


def test_a_worker_with_several_ranks_speaks_with_one_voice() -> None:
    async def scene() -> None:
        async with FakeController() as controller, node_with_gpus(controller, "3,5") as join:
            assert [gpu.id for gpu in join.gpus] == ["3", "5"]
            await controller.say(Start("t1-1", "t1", (TINY,), ranks=len(join.gpus)))
            started = await controller.hears(Started)
            assert [rank.device for rank in started.ranks] == ["3", "5"]
            assert started.pid == started.ranks[0].pid
            await until(lambda: "ready" in controller.said("t1-1"))
            await controller.say(say("t1-1", Generation(1, ("t1-1",))))
            await until(lambda: "arrived" in controller.said("t1-1"))
            arrived = next(heard.message for heard in controller.all(Heard) if heard.message["type"] == "arrived")
            assert arrived["addresses"] == ["127.0.0.1:0", "127.0.0.1:1"]
            await controller.say(say("t1-1", Go(1, tuple(arrived["addresses"]), ranks=(2,))))
            await until(lambda: "formed" in controller.said("t1-1"))
            assert controller.said("t1-1") == ["ready", "arrived", "formed"]
            await controller.cut()
            (status,) = (await controller.hears(Join, 2)).workers
            assert (status.ranks, status.formed) == (started.ranks, 1)
            await controller.say(say("t1-1", Generation(2, ("other",))))
            assert (await controller.hears(Ended)).status == 0
            assert controller.said("t1-1")[-1] == "left"

    asyncio.run(scene())


def test_a_rank_that_is_killed_takes_the_worker_with_it() -> None:
    async def scene() -> None:
        async with FakeController() as controller, node_with_gpus(controller, "0,1,2") as join:
            await controller.say(Start("t1-1", "t1", (TINY,), ranks=len(join.gpus)))
            started = await controller.hears(Started)
            await until(lambda: "ready" in controller.said("t1-1"))
            os.kill(started.ranks[1].pid, signal.SIGKILL)
            assert (await controller.hears(Ended)).status == -signal.SIGKILL
            assert not any(is_alive(rank.pid) for rank in started.ranks)

    asyncio.run(scene())


def test_each_rank_sees_its_own_device_and_its_share_of_the_threads(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeController() as controller, node_with_gpus(controller, "GPU-aa,GPU-bb"):
            await controller.say(Start("t1-1", "t1", (script(tmp_path, SHOWS),), ranks=2, log_all_ranks=True))
            await until(lambda: len(controller.logs) == 2)
            seen = {name: text.split()[:2] for name, text in controller.logs.items()}
            assert {name: devices for name, (devices, _) in seen.items()} == {"t1-1": "GPU-aa", "t1-1.1": "GPU-bb"}
            assert {int(threads) for _, threads in seen.values()} == {max(1, len(os.sched_getaffinity(0)) // 2)}

    asyncio.run(scene())


def test_the_order_to_start_may_say_how_many_ranks() -> None:
    async def scene() -> None:
        async with FakeController() as controller, node_with_gpus(controller, "0,1,2,3"):
            await controller.say(Start("t1-1", "t1", (TINY,), ranks=2))
            started = await controller.hears(Started)
            assert [rank.device for rank in started.ranks] == ["0,1", "2,3"]

    asyncio.run(scene())


def test_a_program_that_does_not_speak_is_one_process_with_all_devices(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeController() as controller, node_with_gpus(controller, "0,1") as join:
            assert join.gpus == (Gpu("0"), Gpu("1"))
            await controller.say(Start("t1-1", "t1", (script(tmp_path, SLEEPS),), speaks=False))
            started = await controller.hears(Started)
            assert [rank.device for rank in started.ranks] == ["0,1"]

    asyncio.run(scene())


def test_the_output_of_the_rank_that_failed_is_shown(tmp_path: Path) -> None:
    fails = f"import os\nif os.environ['BFTRAINER_LOCAL_RANK'] == '1': raise ValueError('no data here')\n{SLEEPS}"

    async def scene() -> None:
        async with FakeController() as controller, node_with_gpus(controller, "0,1"):
            await controller.say(Start("t1-1", "t1", (script(tmp_path, fails),), ranks=2))
            ended = await controller.hears(Ended)
            assert ended.status == 1
            assert ended.tail.endswith("ValueError: no data here\n")

    asyncio.run(scene())


def test_a_controller_that_does_not_know_of_ranks_gets_one() -> None:
    async def scene() -> None:
        async with FakeController() as controller, node_with_gpus(controller, "0,1"):
            await controller.say(Start("t1-1", "t1", (TINY,)))
            assert [rank.device for rank in (await controller.hears(Started)).ranks] == ["0,1"]

    asyncio.run(scene())


def test_devices_that_the_user_names_for_all_ranks_do_not_replace_those_of_a_rank(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeController() as controller, node_with_gpus(controller, "0,1"):
            env = {"CUDA_VISIBLE_DEVICES": "0"}
            shows = (script(tmp_path, SHOWS),)
            await controller.say(Start("t1-1", "t1", shows, env, ranks=2, log_all_ranks=True))
            warning = (await controller.hears(Started)).warning
            assert warning.startswith("its variable CUDA_VISIBLE_DEVICES=0 is not used: each of its 2 ranks")
            await until(lambda: len(controller.logs) == 2)
            assert [controller.logs[name].split()[0] for name in ("t1-1", "t1-1.1")] == ["0", "1"]
            hidden = Start("t1-2", "t1", shows, {"CUDA_VISIBLE_DEVICES": "-1"}, ranks=2)
            await controller.say(hidden)
            await until(lambda: "t1-2" in controller.logs)
            assert controller.logs["t1-2"].split()[0] == "-1"

    asyncio.run(scene())
