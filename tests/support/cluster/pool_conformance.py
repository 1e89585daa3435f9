"""What every pool must do. A new kind is done when it passes all `CHECKS`.

A check gets a `Setting`: a factory of pools that have two nodes, `first` and `second`, and start the agents of
`stub_agent.py` with a folder of their own. Two pools of one setting are the same pool before and after a restart of the
controller.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bftrainer.cluster.pools.base import Pool
from support.cluster.fake_pool_host import FakePoolHost, command_lines, processes_of
from support.waiting import until


@dataclass(frozen=True)
class Setting:
    """How to make a pool, and what it will have."""

    make: Callable[[], Pool]
    folder: Path
    nodes: tuple[str, str]

    @asynccontextmanager
    async def opened(self, host: FakePoolHost, drain: bool = True) -> AsyncIterator[Pool]:
        """A pool, with its agents here unless it only observes."""
        pool = self.make()
        await pool.open(host)
        try:
            if not host.observing:
                await until(lambda: host.here == set(self.nodes), lambda: (host.here, host.said))
            yield pool
        except BaseException:
            drain = True
            raise
        finally:
            await pool.close(drain=drain)


Check = Callable[[Setting], Awaitable[None]]


async def nodes_come_their_secret_is_on_no_command_line_and_drain_leaves_no_process(setting: Setting) -> None:
    async with FakePoolHost() as host:
        async with setting.opened(host) as pool:
            assert sorted(host.joins) == sorted(setting.nodes)
            assert processes_of(host.secret, setting.folder)
            assert host.secret not in command_lines()
            assert pool.describe()["kind"]
        await until(
            lambda: not processes_of(host.secret, setting.folder),
            lambda: processes_of(host.secret, setting.folder),
        )
        await until(lambda: not host.here, lambda: host.here)


async def closing_without_drain_leaves_the_agents_and_the_next_pool_finds_them(setting: Setting) -> None:
    async with FakePoolHost() as before:
        async with setting.opened(before, drain=False):
            pass
        pids = dict(before.pids)
    async with FakePoolHost(follows=before) as after:
        async with setting.opened(after):
            assert after.pids == pids
            await until(lambda: alive_and_settled(after, setting))
            assert sorted(after.joins) == sorted(setting.nodes), "an agent was started twice"
        await until(lambda: not processes_of(after.secret, setting.folder))


def alive_and_settled(host: FakePoolHost, setting: Setting) -> bool:
    return host.here == set(setting.nodes) and all(Path(f"/proc/{pid}").exists() for pid in host.pids.values())


async def a_killed_agent_is_noticed_and_replaced(setting: Setting) -> None:
    async with FakePoolHost() as host, setting.opened(host):
        node = setting.nodes[0]
        pid = host.pids[node]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: node in host.words("gone"))
        await until(lambda: host.here == set(setting.nodes), lambda: host.said)
        assert host.pids[node] != pid


async def a_paused_pool_starts_nothing_and_a_resumed_one_does(setting: Setting) -> None:
    async with FakePoolHost() as host, setting.opened(host) as pool:
        await pool.pause()
        for node in setting.nodes:
            host.dismiss(node, "paused")
        await until(lambda: set(host.words("gone")) == set(setting.nodes), lambda: host.said)
        joins = len(host.joins)
        await ticks(host)
        assert len(host.joins) == joins
        await pool.resume()
        await until(lambda: host.here == set(setting.nodes), lambda: host.said)


async def ticks(host: FakePoolHost) -> None:
    """Let the pool have two occasions to act, at each of which it asks who is here."""
    looked = host.looks
    await until(lambda: host.looks >= looked + 2)


async def a_dry_run_says_what_could_be_had_and_starts_nothing(setting: Setting) -> None:
    async with FakePoolHost(observing=True) as host, setting.opened(host):
        await until(lambda: sorted(host.words("available")) == sorted(setting.nodes), lambda: host.said)
        started = "\n".join(processes_of(host.secret, setting.folder).values())
        assert "stub_agent" not in started
        assert "pools.host" not in started
        assert not host.joins


async def closing_twice_or_unopened_is_harmless(setting: Setting) -> None:
    await setting.make().close(drain=True)
    pool = setting.make()
    async with FakePoolHost() as host:
        await pool.open(host)
        await pool.close(drain=True)  # perhaps before any agent has joined
        await pool.close(drain=True)
        await until(lambda: not processes_of(host.secret, setting.folder))


CHECKS: tuple[Check, ...] = (
    nodes_come_their_secret_is_on_no_command_line_and_drain_leaves_no_process,
    closing_without_drain_leaves_the_agents_and_the_next_pool_finds_them,
    a_killed_agent_is_noticed_and_replaced,
    a_paused_pool_starts_nothing_and_a_resumed_one_does,
    a_dry_run_says_what_could_be_had_and_starts_nothing,
    closing_twice_or_unopened_is_harmless,
)
