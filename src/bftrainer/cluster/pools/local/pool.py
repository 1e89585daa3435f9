"""The `local` pool runs virtual nodes on this machine, each an agent process of its own.

The nodes stay, join and leave as a script says, or follow a trace (`churn.py`). The agents are children of a host
process (`host.py`), so that they outlive the controller; this module tells the host which agents to start and to end.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bftrainer.cluster.pools.base import PoolHost, PoolHostLink
from bftrainer.cluster.pools.keeper import Keeper, Timeouts, fingerprint
from bftrainer.cluster.pools.local.churn import Action, make_schedule
from bftrainer.cluster.pools.local.host import PRELOAD, HostLink
from bftrainer.cluster.pools.local.own_nodes import OwnNodes
from bftrainer.elastic import protocol
from bftrainer.errors import InputError
from bftrainer.processes import variables
from bftrainer.processes.gpus import GpuDevice, find_gpus
from bftrainer.processes.rank_places import device_variables, own_gpus

AGENT = ("-m", "bftrainer.cluster.agent")
MOST_NODES = 10_000
_TICK_S = 1.0
_JUMP_S = 60.0
"""Seconds. If the machine slept longer, missed actions are not carried out one by one."""
_ORIGIN = "local.origin"
_AGENTS = "local.agents"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """Settings of the `local` pool."""

    nodes: int = field(default=4, metadata={"doc": "number of virtual nodes: node-1, node-2, …"})
    churn: str | tuple[Any, ...] = field(
        default="fixed",
        metadata={
            "doc": "how nodes come and go: fixed (all stay), a profile (summit, theta, mira), a trace file, a file of "
            "lines such as `12.5 leave node-3` (join, leave or kill), or a list of such lines"
        },
    )
    speed: float = field(default=1.0, metadata={"doc": "how many times as fast the trace or the actions pass"})
    hours: float = field(default=24.0, metadata={"doc": "length of a profile in hours, before `speed`"})
    loop: bool = field(default=False, metadata={"doc": "whether the trace or the actions begin again at their end"})
    seed: int = field(default=0, metadata={"doc": "chooses nodes of the trace and which leaves are abrupt"})
    abrupt: float = field(default=0.0, metadata={"doc": "share of a trace's leaves that come without warning, 0 to 1"})
    grace_s: float = field(default=2.0, metadata={"doc": "how long in advance the leave of a node is announced"})
    pace: str = field(
        default="", metadata={"doc": "duration of a step, such as 0.05 or 1:0.05,8:0.07; empty: not paced"}
    )
    threads: int = field(default=1, metadata={"doc": "threads of each virtual node; 0: the default of the libraries"})
    orphan_s: float = field(default=60.0, metadata={"doc": "virtual nodes end after this time without a controller"})

    def __post_init__(self) -> None:
        checks = (
            ("nodes", 1 <= self.nodes <= MOST_NODES, f"from 1 to {MOST_NODES}"),
            ("speed", 0 < self.speed < math.inf, "more than 0"),
            ("hours", 0 < self.hours <= 10_000, "more than 0 and at most 10000"),
            ("seed", self.seed >= 0, "0 or more"),
            ("abrupt", 0 <= self.abrupt <= 1, "from 0 to 1"),
            ("grace_s", 0 <= self.grace_s < math.inf, "0 or more"),
            ("threads", self.threads >= 0, "0 or more"),
            ("orphan_s", 0 < self.orphan_s < math.inf, "more than 0"),
        )
        for name, fine, rule in checks:
            if not fine:
                raise InputError(f"`{name}` must be {rule}, but got {getattr(self, name)}")


class LocalPool:
    """See `base.Pool`."""

    def __init__(
        self,
        settings: LocalSettings,
        folder: Path,
        *,
        agent: tuple[str, ...] = AGENT,
        preload: tuple[str, ...] = PRELOAD,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep the host's files in `folder`. `agent` is the Python program of a node, `preload` what it imports.

        The schedule follows `clock`.
        """
        self.settings = settings
        self.give_up_s = settings.orphan_s
        self._schedule = make_schedule(
            settings.churn,
            settings.nodes,
            speed=settings.speed,
            hours=settings.hours,
            seed=settings.seed,
            abrupt=settings.abrupt,
            loop=settings.loop,
        )
        self._folder = folder
        self._agent = agent
        self._preload = preload
        self._clock = clock
        self._keeper = Keeper(Timeouts(grace_s=settings.grace_s))
        self._host_link = PoolHostLink()
        self._link: HostLink | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._paused = False
        self._wanted: set[str] = set()
        self._gpus: tuple[GpuDevice, ...] = ()
        self._done_s = 0.0
        """Time of the schedule up to which it was carried out."""
        self._own: OwnNodes | None = None
        """Where agents have owners: for whom they are started."""
        self._zero = 0.0
        """Time at which the schedule began, by `clock`."""

    def why_not(self, owner: str) -> str:
        """See `base.KnowsOwners`."""
        return self._own.why_not(owner) if self._own is not None else ""

    def most_nodes(self, owner: str) -> int | None:
        """See `base.KnowsOwners`."""
        return None

    @property
    def _to(self) -> PoolHost:
        return self._host_link.host

    async def open(self, host: PoolHost) -> None:
        """See `base.Pool`."""
        self._host_link.open(host)
        self._own = OwnNodes(host, self._wake.set) if host.own_users else None
        self._gpus = await asyncio.to_thread(find_gpus, os.environ)
        self._find_origin()
        self._done_s = self._now_s()
        self._wanted = set(self._schedule.present(self._done_s))
        if not host.observing:
            await self._connect()
        self._tasks.append(asyncio.create_task(self._run()))

    async def pause(self) -> None:
        """See `base.Pool`."""
        self._paused = True

    async def resume(self) -> None:
        """See `base.Pool`."""
        self._paused = False
        self._keeper.forgive()
        self._wake.set()

    async def close(self, *, drain: bool) -> None:
        """See `base.Pool`."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._own is not None:
            self._own.close()
        link, self._link = self._link, None
        if link is None and drain:
            link = await HostLink.find(self._folder)
        if link is not None:
            if drain:
                await link.end_host()
            await link.close()

    def describe(self) -> Mapping[str, Any]:
        """See `base.Pool`."""
        churn = self.settings.churn if isinstance(self.settings.churn, str) else "scripted"
        next_s = self._schedule.next_time(self._done_s) if self._host_link.is_open else None
        return {
            "kind": "local",
            "nodes": self.settings.nodes,
            "churn": churn,
            "speed": self.settings.speed,
            "wanted": len(self._wanted),
            "running": len(self._keeper.running),
            "next_change_s": None if next_s is None else round(max(0.0, next_s - self._now_s()), 1),
            "host_pid": self._link.pid if self._link is not None else None,
        }

    # The schedule and the clock.

    def _find_origin(self) -> None:
        """Continue the schedule at the current time if it is the same as before; else begin it."""
        mark = fingerprint(self._schedule)
        now, known = time.time(), self._to.recall(_ORIGIN)
        match known:
            case {"schedule": str(before), "time": int(origin) | float(origin)} if before == mark and origin <= now:
                self._zero = self._clock() - (now - origin)
            case _:
                self._zero = self._clock()
                self._to.remember(_ORIGIN, {"schedule": mark, "time": now})

    def _now_s(self) -> float:
        return self._clock() - self._zero

    async def _run(self) -> None:
        while True:
            try:
                if self._link is None and not self._to.observing:
                    await self._connect()
                self._wake.clear()
                self._follow_schedule()
                again_at = self._step()
            except Exception as problem:
                _log.exception("the local pool continues after an error")
                self._to.note("failed", error=str(problem))
                await asyncio.sleep(_TICK_S)
                continue
            next_s = self._schedule.next_time(self._done_s)
            rests = (_TICK_S, again_at - time.monotonic(), math.inf if next_s is None else next_s - self._now_s())
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(rests))):
                    await self._wake.wait()

    def _follow_schedule(self) -> None:
        now_s = self._now_s()
        if now_s - self._done_s > _JUMP_S:
            self._wanted = set(self._schedule.present(now_s))
        else:
            for action in self._schedule.between(self._done_s, now_s):
                self._act(action)
        self._done_s = now_s

    def _act(self, action: Action) -> None:
        node = action.node
        if action.kind == "join":
            self._wanted.add(node)
            return
        self._wanted.discard(node)
        if action.kind == "kill" and node in self._keeper.running and self._link is not None:
            self._keeper.killed(node, time.monotonic())
            self._link.send(kill=node)
            self._to.note("killed", node=node)
        self._keeper.unwant(node)

    def _step(self) -> float:
        """Send the host the next commands towards the wanted nodes.

        Returns when to call again, by the monotonic clock.
        """
        if self._to.observing:
            self._host_link.offer(self._wanted, "it left")
        if self._link is None:
            return math.inf
        now, wanted = time.monotonic(), [node for node in self._schedule.nodes if node in self._wanted]
        held: frozenset[str] = frozenset()
        if self._own is not None:
            self._own.look([node for node in wanted if node not in self._keeper.running])
            held = frozenset(node for node in wanted if not self._own.may_start(node))
            for node in self._own.overdue(now, self._keeper.running):
                self._link.send(kill=node)
        orders = self._keeper.settle(now, wanted, self._to.nodes, may_start=not self._paused, held=held)
        for node in orders.leave:
            self._to.leaving(node, self.settings.grace_s)
        for node, why in orders.kill:
            self._to.note("killed", node=node, why=why)
            self._link.send(kill=node)
        for node in orders.start:
            if self._own is None:
                self._link.send(start=node, argv=self._agent, env=self._environment(node))
            else:
                account, env = self._own.start(node, self._settings_of(node))
                self._link.send(start=node, argv=self._agent, env=env, account=account)
        return orders.again_at

    def hand_over(self, node: str, owner: str) -> None:
        """See `base.HandsOver`. The new agent is started as soon as the former one has ended."""
        if self._own is not None:
            self._own.hand_over(node, time.monotonic())
        self._wake.set()

    def _environment(self, node: str) -> dict[str, str]:
        env = {**variables.inherited(os.environ), **self._to.agent_environment, variables.NODE: node}
        return env | self._settings_of(node)

    def _settings_of(self, node: str) -> dict[str, str]:
        """Return the variables by which a virtual node is a part of this machine."""
        env = dict[str, str]()
        if self.settings.threads:
            env |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.settings.threads))
        if self.settings.pace:
            env[protocol.PACE] = self.settings.pace
        # The virtual nodes share this machine's GPUs: each counts its part as its own.
        nodes = self._schedule.nodes
        return env | device_variables(own_gpus(nodes.index(node), len(nodes), self._gpus), {**os.environ, **env})

    # The host.

    async def _connect(self) -> None:
        link = await HostLink.make(self._folder, self.settings.orphan_s, self._preload)
        now = time.monotonic()
        for node in set(self._keeper.running) - link.nodes.keys():
            self._keeper.ended(node, now, expected=True)
        mark = self._host_link.agents_mark
        strangers = self._to.recall(_AGENTS) != mark
        self._to.remember(_AGENTS, mark)
        for node in link.nodes:
            self._keeper.found(node, now)
            if strangers:  # they would connect to another address, or with another secret
                self._keeper.killed(node, now)
                link.send(kill=node)
        self._link = link
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.create_task(self._hear(link)))

    async def _hear(self, link: HostLink) -> None:
        while (message := await link.receive()) is not None:
            match message:
                case {"ended": str(node), "status": int(status), "error": str(error)}:
                    self._ended(node, status, error)
        self._link = None
        self._wake.set()
        await link.close()
        for node in self._keeper.running:
            self._keeper.ended(node, time.monotonic(), expected=True)
            self._to.gone(node, "the host of virtual nodes has ended")
        self._to.note("host_lost", pid=link.pid)

    def _ended(self, node: str, status: int, error: str) -> None:
        how = error or (f"its agent ended with status {status}" if status >= 0 else f"signal {-status} ended its agent")
        passed_on = self._own is not None and self._own.ended(node)
        failed = self._keeper.ended(node, time.monotonic(), expected=self._paused or passed_on)
        self._wake.set()
        self._to.gone(node, how)
        if failed:
            self._to.note("agent_ended", node=node, how=how)
