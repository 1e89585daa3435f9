"""Scripts that know only TorchElastic, on nodes that come and go."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bftrainer.elastic.local.torchrun import StoreHost, agent_command
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.processes.launch import Process
from bftrainer.processes.warm import WarmLauncher
from support.processes import is_alive

pytestmark = pytest.mark.waits

DEADLINE_S = 120.0

TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist

folder = sys.argv[1]
checkpoint = os.path.join(folder, "checkpoint.pt")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
state = torch.load(checkpoint) if os.path.exists(checkpoint) else {"step": 0, "weight": torch.zeros(1)}
with open(os.path.join(folder, "pids"), "a") as pids:
    pids.write(f"{os.getppid()} {os.getpid()}\\n")

stop = torch.zeros(1)
while not stop:
    gradient = torch.ones(1)
    dist.all_reduce(gradient)
    state = {"step": state["step"] + 1, "weight": state["weight"] + gradient / world}
    if rank == 0:
        torch.save(state, checkpoint + ".new")
        os.replace(checkpoint + ".new", checkpoint)
        with open(os.path.join(folder, "steps"), "a") as steps:
            steps.write(f"{state['step']} {world} {state['weight'].item()}\\n")
        stop += os.path.exists(os.path.join(folder, "stop"))
    dist.broadcast(stop, 0)
    time.sleep(0.02)
dist.destroy_process_group()
"""


def steps(folder: Path) -> list[tuple[int, int, float]]:
    path = folder / "steps"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [line.split() for line in lines if line.endswith("\n")]
    return [(int(step), int(world), float(weight)) for step, world, weight in found]


async def until(condition: Callable[[], bool], processes: list[Process]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    ends = [asyncio.ensure_future(process.wait()) for process in processes]
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        assert not any(end.done() for end in ends), "an agent has ended"
        await asyncio.sleep(0.05)
    for end in ends:
        end.cancel()


def test_an_ordinary_script_goes_on_when_a_node_joins_and_when_one_is_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}

    def stepping_with(world: int) -> bool:
        """Ten steps in a row, so that both the start and the going on are seen."""
        last = [of for _, of, _ in steps(tmp_path)[-10:]]
        return last == [world] * 10

    async def scene() -> None:
        launcher = WarmLauncher(preload=("torch.distributed.run",))
        store = await StoreHost.start()

        async def join(name: str) -> Process:
            return await launcher.start(
                agent_command(
                    ["train.py", str(tmp_path)],
                    nodes=(2, 3),
                    node="127.0.0.1",
                    endpoint=store.endpoint,
                    run_id="run",
                    env=env,
                    cwd=str(tmp_path),
                    output=f"{name}.log",
                )
            )

        try:
            agents = [await join("a"), await join("b")]
            await until(lambda: stepping_with(2), agents)
            agents.append(await join("c"))
            await until(lambda: stepping_with(3), agents)
            killed = agents.pop(0)
            killed.kill_group()
            assert await killed.wait() == -signal.SIGKILL
            workers = [line.split() for line in (tmp_path / "pids").read_text().splitlines()]
            (*_, worker) = (int(pid) for agent, pid in workers if int(agent) == killed.pid)
            await until(lambda: not is_alive(worker), agents)
            await until(lambda: stepping_with(2), agents)
            (tmp_path / "stop").touch()
            ended = await asyncio.wait_for(asyncio.gather(*(agent.wait() for agent in agents)), DEADLINE_S)
            assert ended == [0, 0]
        finally:
            await launcher.close()
            await store.close()

    asyncio.run(scene())
    # A step whose checkpoint was written may be missing in the log after the kill, none is done from the wrong state.
    numbers = [step for step, _, _ in steps(tmp_path)]
    assert numbers == sorted(set(numbers))
    assert all(weight == step for step, _, weight in steps(tmp_path))


def test_a_store_ends_when_told_and_a_taken_port_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        store = await StoreHost.start()
        host, _, port = store.endpoint.rpartition(":")
        try:
            with pytest.raises(BFTrainerError, match=f"{host}:{port}: .*(in use|bind|listen)"):
                await StoreHost.start(host, int(port))
        finally:
            await store.close()
        assert not is_alive(store.pid)

    asyncio.run(scene())
    capfd.readouterr()


def test_a_loopback_address_is_said_to_gloo_and_others_are_not() -> None:
    def command(node: str) -> dict[str, str]:
        return dict(
            agent_command(["t.py"], nodes=(1, 2), node=node, endpoint="h:1", run_id="r", env={"A": "b"}, cwd="/").env
        )

    assert command("127.0.0.1") == command("localhost")
    assert command("127.0.0.1").keys() - command("node17").keys() == {"GLOO_SOCKET_IFNAME"}
    assert command("10.0.0.1")["A"] == "b"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nodes": (0, 2)}, "`nodes` must be .* but got 0, 2"),
        ({"nodes": (3, 2)}, "`nodes` must be .* but got 3, 2"),
        ({"silence_s": 2}, "`silence_s` must be at least 3, but got 2"),
        ({"ranks": 0}, "`ranks` must be 1 or more, but got 0"),
        ({"script_argv": []}, "`script_argv` must name a script"),
    ],
)
def test_what_torchrun_could_not_run_is_an_input_error(wrong: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"script_argv": ["t.py"], "nodes": (1, 2), "node": "n", "endpoint": "h:1", "run_id": "r"}
    with pytest.raises(InputError, match=message):
        agent_command(**{**given, "env": {}, "cwd": "/", **wrong})
