"""The `script` pool runs agents on nodes that an executable lists.

A command starts the agent of each node. The pool supports every batch system that can list its idle nodes
(`docs/pools.md` shows LSF and PBS). `discovery.py` runs the executable, `commands.py` the commands; this module
compares the listed nodes with the running commands. Agents and their commands outlive the controller.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bftrainer.cluster.config.keys import DEFAULTS
from bftrainer.cluster.pools.base import PoolHost, PoolHostLink
from bftrainer.cluster.pools.keeper import Keeper, Timeouts
from bftrainer.cluster.pools.script.commands import RunningCommand
from bftrainer.cluster.pools.script.discovery import DiscoveryError, ask
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.processes import variables
from bftrainer.util.backoff import Backoff

START = ("ssh", "-o", "BatchMode=yes", "{node}", "bftrainer", "agent", "--environment-from-stdin")
_TICK_S = 1.0
_AT_ONCE = 32
"""Commands started in one step: each takes a millisecond, and other tasks must get their turn in between."""
_LONGEST_WAIT_S = 300.0
_DISMISSED_S = 5.0
_TERMINATED_S = 2.0
_MEMORY = "script.state"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScriptSettings:
    """Settings of the `script` pool."""

    command: tuple[str, ...] = field(
        default=(),
        metadata={"doc": "the executable that prints the nodes, one NAME or NAME:SLOTS per line, with its arguments"},
    )
    start: tuple[str, ...] = field(
        default=START,
        metadata={
            "doc": "starts the agent of {node} and runs as long as it does; gets BFTRAINER_URL, BFTRAINER_SECRET, "
            "BFTRAINER_NODE and, where there are any, BFTRAINER_SLOTS and BFTRAINER_CA in its environment, and as "
            "lines NAME=value up to an empty one on stdin"
        },
    )
    interval_s: float = field(default=10.0, metadata={"doc": "how often the executable is run"})
    timeout_s: float = field(default=30.0, metadata={"doc": "the longest it may take; then it is killed"})
    grace_s: float = field(default=0.0, metadata={"doc": "how long a node that is no longer listed may stay"})
    max_nodes: int = field(default=0, metadata={"doc": "the most nodes to use; 0: all"})
    exclude: tuple[str, ...] = field(default=(), metadata={"doc": "names of nodes never to use"})
    join_s: float = field(
        default=120.0, metadata={"doc": "an agent that has not joined after this time is started again"}
    )
    reattach_s: float = field(
        default=DEFAULTS.agents.reattach_s,
        metadata={"doc": "after a restart, how long to wait for agents to come back by themselves"},
    )
    give_up_s: float = field(
        default=60.0,
        metadata={"doc": "an agent that finds no controller for this long ends; at most agents.give_up_s"},
    )

    def __post_init__(self) -> None:
        if not self.command or not self.command[0]:
            raise InputError("`command` must name the executable that prints the nodes, but got nothing")
        if not self.start or not self.start[0]:
            raise InputError("`start` must be the command that starts an agent on {node}, but got nothing")
        for name in ("interval_s", "timeout_s", "join_s", "give_up_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"`{name}` must be more than 0, but got {getattr(self, name)}")
        for name in ("grace_s", "max_nodes", "reattach_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"`{name}` must be 0 or more, but got {getattr(self, name)}")
        if any("\0" in word for word in (*self.command, *self.start)):
            raise InputError("`command` and `start` must not contain a NUL character")


class ScriptPool:
    """See `base.Pool`."""

    def __init__(self, settings: ScriptSettings, folder: Path) -> None:
        """Keep the output of the commands in a file in `folder`."""
        self.settings = settings
        self.give_up_s = settings.give_up_s
        self._folder = folder
        self._keeper = Keeper(
            Timeouts(
                grace_s=settings.grace_s,
                overdue_s=10.0,
                silent_s=settings.join_s,
                longest_retry_s=_LONGEST_WAIT_S,
            )
        )
        self._host_link = PoolHostLink()
        self._commands: dict[str, RunningCommand] = {}
        self._terminated: set[str] = set()
        self._listed: dict[str, int] = {}
        """The listed nodes with their slots; 0: none were printed."""
        self._asked = False
        self._failures = 0
        self._problem = ""
        self._held: frozenset[str] = frozenset()
        """Nodes whose agents may still run since before a restart."""
        self._held_until = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._paused = False
        self._changed = False

    @property
    def _to(self) -> PoolHost:
        return self._host_link.host

    async def open(self, host: PoolHost) -> None:
        """See `base.Pool`."""
        if host.own_users:
            raise InputError(
                "the script pool cannot start agents as their owners (users.mode is own): use the local or slurm pool"
            )
        for name, argv in (("command", self.settings.command), ("start", self.settings.start)):
            if shutil.which(argv[0]) is None and not (name == "start" and (host.observing or "{node}" in argv[0])):
                raise InputError(f"`{name}`: there is no program {argv[0]}; give its path, and make it executable")
        self._host_link.open(host)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._recall()
        self._tasks = [asyncio.create_task(self._poll()), asyncio.create_task(self._run())]

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
        if not self._host_link.is_open:
            return
        if drain:
            await self._end_all()
        if drain or self._changed:
            with suppress(BFTrainerError):  # a controller that cannot write its store must still be able to end
                self._remember()
        for command in self._commands.values():
            command.release()
        self._commands.clear()

    def describe(self) -> Mapping[str, Any]:
        """See `base.Pool`."""
        return {
            "kind": "script",
            "command": list(self.settings.command),
            "interval_s": self.settings.interval_s,
            "listed": len(self._listed),
            "running": len(self._commands),
            "problem": self._problem,
        }

    # Listed nodes.

    async def _poll(self) -> None:
        while True:
            began = time.monotonic()
            try:
                listed = await ask(self.settings.command, self.settings.timeout_s)
            except (DiscoveryError, OSError) as problem:
                self._failures += 1
                self._problem = str(problem)
                self._to.note("script_failed", error=self._problem, failures=self._failures, listed=len(self._listed))
            else:
                if self._failures:
                    self._to.note("script_works", failures=self._failures)
                self._failures, self._problem = 0, ""
                self._list(listed)
            self._asked = True
            self._wake.set()
            wait = Backoff(self.settings.interval_s, _LONGEST_WAIT_S).wait_s(self._failures + 1)
            wait = max(self.settings.interval_s, wait)
            await asyncio.sleep(max(0.0, began + wait - time.monotonic()))

    def _list(self, listed: dict[str, int]) -> None:
        vanished = set(self._listed) - set(listed)
        self._changed |= list(listed.items()) != list(self._listed.items())
        self._listed = listed
        if self._to.observing:
            return
        for node in sorted(vanished & self._to.nodes):
            if node not in self._commands:  # its command is gone, but its agent reconnected
                self._to.leaving(node, self.settings.grace_s)

    def _wanted(self) -> tuple[str, ...]:
        """Return the listed nodes that may be used; if there are too many, nodes with a running agent come first."""
        usable = [node for node in self._listed if node not in self.settings.exclude]
        most = self.settings.max_nodes
        if most and len(usable) > most:
            here = self._to.nodes.union(self._keeper.running)
            usable.sort(key=lambda node: node not in here)
            usable = usable[:most]
        return tuple(usable)

    # Running commands.

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            again_at = math.inf
            try:
                if self._asked:
                    again_at = self._step()
                if self._changed:
                    self._remember()
            except Exception as problem:
                _log.exception("the script pool continues after an error")
                self._to.note("failed", error=str(problem))
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(_TICK_S, again_at - time.monotonic()))):
                    await self._wake.wait()

    def _step(self) -> float:
        """Start and end commands to match the listed nodes.

        Returns when to call again, by the monotonic clock.
        """
        wanted = self._wanted()
        if self._to.observing:
            self._host_link.offer(wanted, "it is no longer listed")
            return math.inf
        now = time.monotonic()
        held = self._held if now < self._held_until else frozenset()
        orders = self._keeper.settle(
            now,
            wanted,
            self._to.nodes,
            may_start=not self._paused,
            held=held,
            most=self.settings.max_nodes or None,
            at_once=_AT_ONCE,
        )
        for node in orders.leave:
            self._to.leaving(node, self.settings.grace_s)
        for node, why in orders.kill:
            self._kill(node, why)
        if orders.start:
            self._remember(orders.start)  # before the start: if this process is killed, no node gets a second agent
            for node in orders.start:
                self._start(node)
            self._wake.set()  # more nodes may have to be started
        return orders.again_at

    def _start(self, node: str) -> None:
        given = {**self._to.agent_environment, variables.NODE: node}
        if self._listed.get(node):
            given[variables.SLOTS] = str(self._listed[node])
        block = "".join(f"{name}={value}\n" for name, value in given.items()) + "\n"
        argv = [word.replace("{node}", node) for word in self.settings.start]
        self._changed = True
        try:
            command = RunningCommand.start(
                argv, {**variables.inherited(os.environ), **given}, block, self._folder / "agents.log"
            )
        except BFTrainerError as problem:
            self._keeper.ended(node, time.monotonic())
            self._to.note("agent_ended", node=node, how=str(problem))
            return
        self._adopt(node, command)

    def _adopt(self, node: str, command: RunningCommand) -> None:
        self._commands[node] = command
        command.watch(lambda status: self._ended(node, command, status))

    def _ended(self, node: str, command: RunningCommand, status: int | None) -> None:
        command.release()
        del self._commands[node]
        self._terminated.discard(node)
        self._changed = True
        how = f"its start command ended with status {status}" if status is not None else "its start command ended"
        failed = self._keeper.ended(node, time.monotonic(), expected=self._paused)
        self._wake.set()
        self._to.gone(node, how)
        if failed:
            self._to.note("agent_ended", node=node, how=how)

    def _kill(self, node: str, why: str) -> None:
        command = self._commands.get(node)
        if command is None:
            return
        self._to.note("killed", node=node, why=why)
        self._to.dismiss(node, why)
        command.kill(signal.SIGKILL if node in self._terminated else signal.SIGTERM)
        self._terminated.add(node)

    async def _end_all(self) -> None:
        """Dismiss the agents; then end the commands that are left."""
        mine = set(self._commands) | (set(self._listed) & self._to.nodes)
        for node in mine:
            self._to.dismiss(node, "the pool is closed")
        await self._wait_for_ends(_DISMISSED_S, mine)
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for command in self._commands.values():
                command.kill(signum)
            await self._wait_for_ends(_TERMINATED_S, set(self._commands))

    async def _wait_for_ends(self, patience_s: float, nodes: set[str]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self._commands or nodes & self._to.nodes:
                    self._wake.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await self._wake.wait()

    # State that outlives a restart.

    def _remember(self, starting: tuple[str, ...] = ()) -> None:
        commands: dict[str, list[Any]] = {node: [0, ""] for node in starting}
        commands |= {node: [command.pid, command.birth] for node, command in self._commands.items()}
        known = {"listed": list(self._listed), "commands": commands, "agents": self._host_link.agents_mark}
        slots = {node: number for node, number in self._listed.items() if number}
        self._to.remember(_MEMORY, {**known, "slots": slots})
        self._changed = False

    def _recall(self) -> None:
        match self._to.recall(_MEMORY):
            case {"listed": list(listed), "commands": dict(commands), "agents": str(mark), **rest}:
                slots: Any = rest.get("slots") or {}  # version 0.1.0 did not store them
                self._listed = {str(node): int(slots.get(node, 0)) for node in listed}
                now = time.monotonic()
                # Otherwise the agents connect to another address, or with another secret, and never come back.
                come_back = mark == self._host_link.agents_mark
                self._held = frozenset(commands) if come_back else frozenset()
                self._held_until = now + self.settings.reattach_s
                for node, (pid, birth) in commands.items():
                    command = RunningCommand.find(pid, birth)
                    if command is not None:
                        self._keeper.found(node, now)
                        self._adopt(node, command)
                        if not come_back:
                            self._keeper.killed(node, now)
                            self._kill(node, "the controller has moved")
