"""The controller's side of a pool, as small as can be: agents join it by a real websocket, and it remembers JSON."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from websockets.asyncio.server import Server, ServerConnection, serve

from bftrainer.cluster.wire import codec, messages
from bftrainer.processes import variables


class Life(Protocol):
    """What is left of a host when the next one begins."""

    secret: str
    port: int
    memory: dict[str, str]


class FakePoolHost:
    """See `bftrainer.cluster.pools.base.PoolHost`. One that `follows` another has its port, secret and memory."""

    def __init__(self, *, observing: bool = False, follows: Life | None = None) -> None:
        self.observing = observing
        self.secret = follows.secret if follows else secrets.token_hex(16)
        self.memory: dict[str, str] = dict(follows.memory) if follows else {}
        self.port = follows.port if follows else 0
        self.agents: dict[str, ServerConnection] = {}
        self.pids: dict[str, int] = {}
        self.said: list[tuple[str, ...]] = []
        """What the pool said: (`available`, node), (`leaving`, node, grace), (`gone`, node, reason), (`note`, what)."""
        self.joins: list[str] = []
        self.slots: dict[str, int] = {}
        """What agents said of the ranks of their nodes."""
        self.demand = 1000
        """How many nodes trainers could use."""
        self.used: frozenset[str] = frozenset()
        self.most: int | None = None
        """How many nodes the pool could have."""
        self.own_users = False
        self.looks = 0
        """How often the pool asked who is here."""
        self._server: Server | None = None
        self._timers: set[asyncio.TimerHandle] = set()

    async def __aenter__(self) -> FakePoolHost:
        self._server = await serve(self._serve, "127.0.0.1", self.port, compression=None)
        self.port = next(iter(self._server.sockets)).getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.cancel()
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, connection: ServerConnection) -> None:
        request = connection.request
        assert request is not None
        if request.headers.get("Authorization") != f"Bearer {self.secret}" or request.path != messages.PATH:
            await connection.close(1008)
            return
        join = codec.decode(await connection.recv())
        assert isinstance(join, messages.Join)
        self.joins.append(join.node)
        self.slots[join.node] = join.slots
        self.agents[join.node], self.pids[join.node] = connection, join.pid
        await connection.send(codec.encode(messages.Welcome()))
        await connection.wait_closed()
        if self.agents.get(join.node) is connection:
            del self.agents[join.node]

    @property
    def agent_environment(self) -> Mapping[str, str]:
        return {variables.URL: f"http://127.0.0.1:{self.port}", variables.SECRET: self.secret}

    @property
    def nodes(self) -> frozenset[str]:
        self.looks += 1
        return frozenset(self.agents)

    @property
    def here(self) -> frozenset[str]:
        """The same, for tests."""
        return frozenset(self.agents)

    def could_have(self, nodes: int) -> None:
        """See `PoolHost`."""
        self.most = nodes

    def available(self, node: str) -> None:
        self.said.append(("available", node))

    def leaving(self, node: str, grace_s: float) -> None:
        self.said.append(("leaving", node, str(grace_s)))
        self._timers.add(asyncio.get_running_loop().call_later(grace_s, self._bye, node))

    def gone(self, node: str, reason: str) -> None:
        self.said.append(("gone", node, reason))
        self.agents.pop(node, None)

    def dismiss(self, node: str, reason: str) -> None:
        self.said.append(("dismiss", node, reason))
        self._bye(node)

    def _bye(self, node: str) -> None:
        if node in self.agents:
            task = asyncio.ensure_future(self.agents[node].send(codec.encode(messages.Bye())))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def remember(self, key: str, value: Any) -> None:
        self.memory[key] = json.dumps(value)

    def recall(self, key: str) -> Any:
        return json.loads(self.memory[key]) if key in self.memory else None

    def note(self, what: str, **facts: Any) -> None:
        json.dumps(facts)
        self.said.append(("note", what, *(str(value) for value in facts.values())))

    def words(self, what: str) -> list[str]:
        """The nodes, or notes, of which the pool said `what`."""
        return [said[1] for said in self.said if said[0] == what]


def processes_of(secret: str, folder: Path) -> dict[int, str]:
    """The command lines, by process id, of what a pool has started: who has the secret, or names the folder."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            line, environ = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        if secret.encode() in environ or os.fsencode(folder) in line:
            found[int(entry.name)] = line.decode(errors="replace").replace("\0", " ")
    return found


def command_lines() -> str:
    """All that everybody sees of the processes of this machine."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(lines)
