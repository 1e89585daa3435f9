"""What a warm parent under another account says: nonsense ends it at most, and its manager never waits for ever."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from bftrainer.processes.launch import Command, Process
from bftrainer.processes.parent import WarmParent
from support.waiting import until

DEADLINE_S = 30.0


class ParentProcess:
    """A process that only seems to be there."""

    pid = 1 << 30

    def __init__(self) -> None:
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self.exited)

    def signal(self, signum: int) -> None:
        raise AssertionError

    def kill_group(self, signum: int = SIGKILL) -> None:
        if not self.exited.done():
            self.exited.set_result(-signum)


class Scene:
    """A warm parent with one process, and the other end of its socket."""

    def __init__(self, parent: WarmParent, seems: ParentProcess, process: Process, theirs: socket.socket) -> None:
        self.parent, self.seems, self.process, self._theirs = parent, seems, process, theirs

    def say(self, message: Any) -> None:
        with suppress(OSError):  # the manager may have closed it before it has read all
            self._theirs.sendall(json.dumps(message).encode() + b"\n")

    async def status(self) -> int:
        return await asyncio.wait_for(self.process.wait(), DEADLINE_S)


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    ours, theirs = socket.socketpair()
    with theirs:
        seems = ParentProcess()
        theirs.sendall(b'{"problems": [], "cores": true}\n')
        parent = await WarmParent.connected(seems, *await asyncio.open_unix_connection(sock=ours))
        starting = asyncio.create_task(parent.start(Command(("x.py",), dict(os.environ), str(folder), None)))
        theirs.sendall(b'{"started": 1, "pid": 5}\n')
        yield Scene(parent, seems, await asyncio.wait_for(starting, DEADLINE_S), theirs)
        await asyncio.wait_for(parent.close(), DEADLINE_S)


@pytest.mark.parametrize(
    "message",
    [
        {"exited": 999999, "status": 0},
        {"started": 999999, "pid": 7},
        {"started": 1, "pid": 7},
        {"failed": 999999, "why": "x"},
        {"unheard": "of"},
        [],
    ],
    ids=str,
)
def test_what_a_parent_says_of_unknown_processes_is_ignored(tmp_path: Path, message: Any) -> None:
    async def play() -> None:
        async with scene(tmp_path) as there:
            there.say(message)
            there.say({"exited": 1, "status": 3})
            assert await there.status() == 3
            assert not there.parent.gone
            there.seems.kill_group()

    asyncio.run(play())


@pytest.mark.parametrize(
    "message",
    [
        {"exited": 1, "status": []},
        {"exited": [], "status": 0},
        {"started": {}, "pid": 1},
        {"failed": 1, "why": 2},
        {"problems": "x"},
        {"problems": [], "reads": 5},
        {"bad": [], "problem": ""},
        "x" * (1 << 20),
    ],
    ids=lambda message: str(message)[:40],
)
def test_a_malformed_message_ends_the_parent_and_all_that_it_has_started(tmp_path: Path, message: Any) -> None:
    async def play() -> None:
        async with scene(tmp_path) as there:
            await asyncio.to_thread(there.say, message)
            assert await there.status() == -SIGKILL
            assert there.parent.gone
            assert there.seems.exited.done()

    asyncio.run(play())


def test_a_parent_has_ended_also_if_another_process_holds_its_socket_open(tmp_path: Path) -> None:
    async def play() -> None:
        async with scene(tmp_path) as there:
            there.say({"exited": 999999, "status": 0})
            there.seems.kill_group()
            assert await there.status() == -SIGKILL
            await until(lambda: there.parent.gone)

    asyncio.run(play())
