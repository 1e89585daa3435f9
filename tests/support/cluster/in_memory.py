"""A controller in this process, and agents' ends of connections in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from bftrainer.cluster.config.keys import Config, Server, TrainerSettings
from bftrainer.cluster.config.users import UsersSettings
from bftrainer.cluster.controller.active import ControllerSettings
from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.controller.output.logbook import Logbook
from bftrainer.cluster.owners.join_secrets import JoinRight
from support.cluster.api import NoPool
from support.cluster.bench import Bench

_SERVED: set[asyncio.Task[None]] = set()
"""The connections that are served, as a web server holds them: the event loop itself refers to a task only weakly."""


class Wire:
    """An agent's end of a connection, in memory."""

    def __init__(self) -> None:
        self.to_controller: asyncio.Queue[str | None] = asyncio.Queue()
        self.messages: list[dict[str, Any]] = []
        self.serving: asyncio.Task[None] | None = None

    @property
    def received(self) -> list[str]:
        """The kinds of messages that came."""
        return [message["type"] for message in self.messages]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The messages of one kind that came."""
        return [message for message in self.messages if message["type"] == kind]

    def serve(self, controller: Controller, right: JoinRight | None = None) -> asyncio.Task[None]:
        """Have the controller serve this connection. `right`: what its secret is good for, where agents have owners."""
        self.serving = asyncio.create_task(controller.agents.serve(self.frames(), self.send, right))
        _SERVED.add(self.serving)
        self.serving.add_done_callback(_SERVED.discard)
        return self.serving

    async def frames(self) -> AsyncIterator[str]:
        while (frame := await self.to_controller.get()) is not None:
            yield frame

    async def send(self, frame: str) -> None:
        self.messages.append(json.loads(frame))


def play(
    folder: Path,
    scene: Callable[[Controller], Awaitable[None]],
    trainers: TrainerSettings | None = None,
    *,
    own_users: bool = False,
) -> None:
    """Run a scene with a controller whose agents are in memory. `own_users`: they have owners."""
    bench = Bench(folder, ControllerSettings(own_users=own_users))
    users = UsersSettings("own" if own_users else "shared")

    async def run() -> None:
        config = dataclasses.replace(Config(), server=Server(state=folder), users=users)
        config = dataclasses.replace(config, trainers=trainers or TrainerSettings())
        controller = Controller(bench.cluster, NoPool(), config, lambda trainer: Logbook(folder / trainer, 1 << 20), {})
        await controller.start()
        try:
            await scene(controller)
        finally:
            await controller.stop(drain=False)

    try:
        asyncio.run(run())
    finally:
        bench.store.close()
