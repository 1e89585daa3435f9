"""The host of virtual nodes ends an owner's agents also if the owner has stopped the process that forks them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bftrainer.cluster.pools.local.host import HostLink, address_file
from support.processes import is_alive
from support.waiting import until

pytestmark = pytest.mark.waits

DEADLINE_S = 60.0

HOST = """
import asyncio, os, sys
from pathlib import Path
from bftrainer.cluster.pools.local import host
from bftrainer.processes.warm import WarmLauncher

# The owner's account is that of the tests: only root could take another one.
host.WarmLauncher = lambda preload, run_as: WarmLauncher(preload=())
host.KILL_S = host.END_S = 0.2
folder = Path(sys.argv[1])
host._serve_forever(folder, 60.0, (), host._listen(folder))
"""


class TwoNodes:
    """A host with two nodes of one owner."""

    def __init__(self, folder: Path, link: HostLink) -> None:
        self.folder, self.link = folder, link
        self.pids: dict[str, int] = {}

    async def start(self, node: str) -> None:
        account = {"uid": os.getuid(), "gid": os.getgid(), "groups": [], "home": str(self.folder)}
        argv = [str(self.folder / "agent.py")]
        self.link.send(start=node, argv=argv, env=dict(os.environ), account=account)
        started = await self.receive()
        self.pids[started["started"]] = started["pid"]

    async def receive(self) -> dict[str, Any]:
        message = await asyncio.wait_for(self.link.receive(), DEADLINE_S)
        assert message is not None
        return message

    def forker(self, node: str) -> int:
        return int(Path(f"/proc/{self.pids[node]}/stat").read_text().rpartition(")")[2].split()[1])


@asynccontextmanager
async def two_nodes(folder: Path) -> AsyncIterator[TwoNodes]:
    (folder / "agent.py").write_text("import time; time.sleep(1000)")
    host = await asyncio.create_subprocess_exec(sys.executable, "-c", HOST, str(folder))
    try:
        await until(address_file(folder).exists)
        link = await HostLink.find(folder)
        assert link is not None
        there = TwoNodes(folder, link)
        for node in ("n1", "n2"):
            await there.start(node)
        assert there.forker("n1") == there.forker("n2") != host.pid
        yield there
        link.send(close=True)
        assert await asyncio.wait_for(host.wait(), DEADLINE_S) == 0
        await link.close()
    finally:
        if host.returncode is None:
            host.kill()
            await host.wait()


def test_a_stopped_forker_is_killed_with_its_nodes_which_can_then_be_started_again(tmp_path: Path) -> None:
    async def play() -> None:
        async with two_nodes(tmp_path) as there:
            former = [there.forker("n1"), *there.pids.values()]
            os.kill(former[0], signal.SIGSTOP)
            there.link.send(kill="n1")
            assert {(await there.receive())["ended"] for _ in there.pids} == {"n1", "n2"}
            await until(lambda: not any(is_alive(pid) for pid in former))
            await there.start("n1")
            assert there.forker("n1") not in former

    asyncio.run(play())


def test_a_host_ends_with_all_its_agents_though_their_forker_is_stopped(tmp_path: Path) -> None:
    async def play() -> list[int]:
        async with two_nodes(tmp_path) as there:
            left = [there.forker("n1"), *there.pids.values()]
            os.kill(left[0], signal.SIGSTOP)
        await until(lambda: not any(is_alive(pid) for pid in left))
        return left

    assert asyncio.run(play())
