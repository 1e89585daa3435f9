"""The HTTP API of a controller without a server: a client, the cluster behind it, and users with tokens."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from bftrainer.cluster.config.keys import Config, Server
from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.controller.output.logbook import Logbook
from bftrainer.cluster.http import app
from bftrainer.cluster.pools.base import PoolHost
from support.cluster.bench import Bench

SECRET = "a secret for agents"
SPEC = {"script": "/train.py", "nodes": "1-4"}


class NoPool:
    """A pool without nodes."""

    async def open(self, host: PoolHost) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self, *, drain: bool) -> None: ...

    def describe(self) -> Mapping[str, Any]:
        return {"kind": "none"}


Scene = Callable[[httpx.AsyncClient, Bench, dict[str, str]], Awaitable[None]]


def play(folder: Path, scene: Scene) -> None:
    """A scene with a client, the cluster behind it, and tokens of `ann` and `bob`, users, and of an admin."""
    bench = Bench(folder)

    async def run() -> None:
        tokens = {}
        for name, role in (("ann", "user"), ("bob", "user"), ("root", "admin")):
            tokens[name] = bench.store.tokens.create(name=name, owner=name, role=role, time=1.0)
        config = dataclasses.replace(Config(), server=Server(state=folder))
        controller = Controller(bench.cluster, NoPool(), config, lambda trainer: Logbook(folder / trainer, 1 << 20), {})
        transport = httpx.ASGITransport(app.build(controller, SECRET), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await scene(client, bench, tokens)

    try:
        asyncio.run(run())
    finally:
        bench.store.close()


def by(tokens: dict[str, str], name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {tokens[name]}"}
