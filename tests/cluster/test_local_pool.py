"""The pool of virtual nodes: what the script says, and what happens when its host or its controller is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bftrainer.cluster.pools.local.host import HostLink
from bftrainer.cluster.pools.local.pool import LocalPool, LocalSettings
from bftrainer.errors import BFTrainerError
from bftrainer.processes import variables
from support.clocks import Clock
from support.cluster.fake_pool_host import FakePoolHost, processes_of
from support.cluster.made_pools import local, settings_of
from support.processes import is_alive
from support.waiting import until

pytestmark = pytest.mark.waits


def environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def test_a_virtual_node_gets_its_threads_and_its_pace(tmp_path: Path) -> None:
    async def play() -> dict[str, str]:
        async with FakePoolHost() as host, settings_of("local", tmp_path).opened(host):
            pass
        async with FakePoolHost() as host:
            pool = local(tmp_path, nodes=1, pace="0.05", threads=3)
            await pool.open(host)
            await until(lambda: host.here)
            found = environment(host.pids["node-1"])
            await pool.close(drain=True)
            return found

    found = asyncio.run(play())
    assert found["OMP_NUM_THREADS"] == found["MKL_NUM_THREADS"] == "3"
    assert found["BFTRAINER_PACE"] == "0.05"
    assert found[variables.NODE] == "node-1"


def test_nodes_come_and_go_as_the_script_says(tmp_path: Path) -> None:
    async def play() -> FakePoolHost:
        clock = Clock(0.0)
        actions = ("10 join node-9", "20 leave node-1", "30 kill node-2", "30 join node-2", "40 join node-1")
        async with FakePoolHost() as host:
            pool = local(tmp_path, clock, nodes=2, churn=actions, grace_s=0.0)
            await pool.open(host)
            await until(lambda: host.here == {"node-1", "node-2"}, lambda: host.said)
            clock.now = 15.0
            await pool.resume()  # it looks at the clock at once
            await until(lambda: host.here == {"node-1", "node-2", "node-9"}, lambda: host.said)
            clock.now = 25.0
            await pool.resume()  # it looks at the clock at once
            await until(lambda: host.words("gone") == ["node-1"], lambda: host.said)
            assert host.here == {"node-2", "node-9"}
            first = host.pids["node-2"]
            clock.now = 35.0
            await pool.resume()  # it looks at the clock at once
            await until(lambda: host.words("gone") == ["node-1", "node-2"], lambda: host.said)
            clock.now = 45.0
            await pool.resume()  # it looks at the clock at once
            await until(lambda: host.here == {"node-1", "node-2", "node-9"}, lambda: host.said)
            assert host.pids["node-2"] != first
            await pool.close(drain=True)
            return host

    host = asyncio.run(play())
    assert host.words("leaving") == ["node-1"]
    assert ("gone", "node-2", "signal 9 ended its agent") in host.said


def test_an_agent_that_does_not_leave_in_time_is_killed(tmp_path: Path) -> None:
    class Deaf(FakePoolHost):
        def _bye(self, node: str) -> None:
            pass

    async def play() -> FakePoolHost:
        clock = Clock(0.0)
        async with Deaf() as host:
            pool = local(tmp_path, clock, nodes=1, churn=("10 leave node-1",), grace_s=0.1)
            await pool.open(host)
            await until(lambda: host.here)
            clock.now = 11.0
            await pool.resume()  # it looks at the clock at once
            await until(lambda: "node-1" in host.words("gone"), lambda: host.said)
            await pool.close(drain=True)
            return host

    host = asyncio.run(play())
    assert ("note", "killed", "node-1", "its time to leave is over") in host.said


def test_a_restarted_controller_goes_on_where_the_schedule_is(tmp_path: Path) -> None:
    def pool() -> LocalPool:
        return local(tmp_path, nodes=2, churn=("0 leave node-2", "3600 join node-2"))

    async def play() -> None:
        async with FakePoolHost(observing=True) as host:
            first = pool()
            await first.open(host)
            await first.close(drain=False)
            origin = host.recall("local.origin")
            host.remember("local.origin", {**origin, "time": origin["time"] - 4000})
            second = pool()
            await second.open(host)
            await until(lambda: host.words("available")[-2:] == ["node-1", "node-2"], lambda: host.said)
            await second.close(drain=False)
            other = local(tmp_path, nodes=2, churn=("0 leave node-2", "3601 join node-2"))
            await other.open(host)  # another schedule begins at its beginning
            assert host.recall("local.origin")["time"] > origin["time"] - 1
            await other.close(drain=False)

    asyncio.run(play())


def test_a_killed_host_takes_its_agents_along_and_is_replaced(tmp_path: Path) -> None:
    async def play() -> None:
        setting = settings_of("local", tmp_path)
        async with FakePoolHost() as host, setting.opened(host) as pool:
            before = dict(host.pids)
            os.kill(pool.describe()["host_pid"], signal.SIGKILL)
            await until(lambda: set(host.words("gone")) == set(setting.nodes))
            await until(lambda: host.here == set(setting.nodes), lambda: host.said)
            assert not set(before.values()) & set(host.pids.values())
            assert all(pid in host.pids.values() or not is_alive(pid) for pid in before.values())

    asyncio.run(play())


def test_agents_outlive_a_killed_controller_but_not_for_ever(tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from support.cluster.made_pools import local
from support.cluster.fake_pool_host import FakePoolHost
from support.waiting import until
async def main():
    async with FakePoolHost() as host:
        await local(Path({str(tmp_path)!r}), nodes=2, orphan_s=1.0).open(host)
        await until(lambda: len(host.here) == 2)
        print(host.secret, *host.pids.values(), flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        secret, *pids = controller.stdout.readline().split()
        controller.kill()
    assert len(pids) == 2

    async def play() -> None:
        link = await HostLink.find(tmp_path)
        assert link is not None
        assert sorted(link.nodes.values()) == sorted(int(pid) for pid in pids)
        assert all(is_alive(int(pid)) for pid in pids)
        await link.close()
        await until(lambda: not processes_of(secret, tmp_path), lambda: processes_of(secret, tmp_path))
        assert await HostLink.find(tmp_path) is None
        assert not (tmp_path / "host.json").exists()

    asyncio.run(play())


def test_agents_that_look_for_the_controller_elsewhere_are_replaced_at_once(tmp_path: Path) -> None:
    async def play() -> None:
        setting = settings_of("local", tmp_path)
        async with FakePoolHost() as before, setting.opened(before, drain=False):
            pass
        async with FakePoolHost() as after, setting.opened(after):  # it has lost its memory, and another secret
            assert not set(before.pids.values()) & set(after.pids.values())
        await until(lambda: not processes_of(before.secret, tmp_path))

    asyncio.run(play())


def test_a_dry_run_follows_the_schedule(tmp_path: Path) -> None:
    async def play() -> FakePoolHost:
        clock = Clock(0.0)
        async with FakePoolHost(observing=True) as host:
            pool = local(tmp_path, clock, nodes=1, churn=("10 leave node-1", "20 join node-2"))
            await pool.open(host)
            await until(lambda: host.said)
            clock.now = 25.0
            await pool.resume()  # it looks at the clock at once
            await until(lambda: len(host.said) >= 3)
            await pool.close(drain=True)
            return host

    assert asyncio.run(play()).said == [("available", "node-1"), ("available", "node-2"), ("gone", "node-1", "it left")]


def test_a_new_controller_replaces_the_old_one_at_the_host(tmp_path: Path) -> None:
    async def play() -> None:
        old = await HostLink.make(tmp_path, 30.0, ())
        new = await HostLink.make(tmp_path, 30.0, ())
        assert new.pid == old.pid
        assert await old.receive() is None
        await old.close()
        await new.end_host()
        await new.close()

    asyncio.run(play())


def test_only_this_user_reaches_the_host_however_deep_its_folder_is(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 150)

    async def play() -> None:
        link = await HostLink.make(folder, 30.0, ())
        path = Path(json.loads((folder / "host.json").read_text())["socket"])
        try:
            assert stat.S_ISSOCK(path.stat().st_mode)
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert stat.S_IMODE((folder / "host.json").stat().st_mode) == 0o600
        finally:
            await link.end_host()
            await link.close()
        assert not path.parent.exists()

    asyncio.run(play())


def test_an_address_that_leads_nowhere_is_replaced(tmp_path: Path) -> None:
    async def play() -> None:
        for rubbish in ("", "{", '{"socket": 3}', '{"socket": "/nowhere/socket"}', "[]"):
            (tmp_path / "host.json").write_text(rubbish)
            assert await HostLink.find(tmp_path) is None
        link = await HostLink.make(tmp_path, 30.0, ())
        await link.end_host()
        await link.close()

    asyncio.run(play())


def test_a_host_that_cannot_be_started_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a folder should be")
    with pytest.raises(BFTrainerError, match="cannot start the host of virtual nodes: .*File exists") as error:
        asyncio.run(HostLink.make(tmp_path / "state", 30.0, ()))
    assert "\n" not in str(error.value)


def test_an_agent_that_cannot_start_is_tried_again_later_and_later(tmp_path: Path) -> None:
    async def play() -> FakePoolHost:
        async with FakePoolHost() as host:
            pool = LocalPool(LocalSettings(nodes=1), tmp_path, agent=("-m", "no_such_module_at_all"), preload=())
            await pool.open(host)
            await until(lambda: len(host.words("gone")) >= 2)
            await pool.close(drain=True)
            return host

    said = asyncio.run(play()).said
    assert ("gone", "node-1", "its agent ended with status 1") in said
