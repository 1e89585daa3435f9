"""What a warm parent under another account says: nonsense ends it at most, and its manager never waits for ever."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from bftrainer.processes.launch import Command, Process
from bftrainer.processes.parent import NotWarmError, WarmParent
from bftrainer.processes.warm import WarmLauncher
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


FORGED = "x\n2026-11-19 00:00:00,000 FORGED\r\u2028\x1b[2J" + "y" * 1000


def test_the_modules_that_a_parent_says_to_miss_are_one_short_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            seems = ParentProcess()
            theirs.sendall(json.dumps({"problems": [FORGED, *["more"] * 1000]}).encode() + b"\n")
            parent = await WarmParent.connected(seems, *await asyncio.open_unix_connection(sock=ours))
            theirs.sendall(json.dumps({"problems": [FORGED]}).encode() + b"\n" + b"nonsense \xe2\x80\xa8 FORGED\n")
            await until(lambda: parent.gone)

    with caplog.at_level(logging.WARNING):
        asyncio.run(play())
    assert len(caplog.messages) == 2
    assert all(message.isprintable() and len(message) < 400 for message in caplog.messages)


@pytest.mark.waits
def test_a_parent_that_starts_nothing_is_warned_of_once_in_one_short_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "x.py"
    script.write_text("")

    async def play() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            seems = ParentProcess()
            theirs.sendall(b'{"problems": []}\n')
            parent = await WarmParent.connected(seems, *await asyncio.open_unix_connection(sock=ours))
            launcher = WarmLauncher()

            async def spawned(*_: Any) -> WarmParent:
                return parent

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(WarmParent, "spawned", spawned)
                for number in range(1, 4):
                    starting = asyncio.create_task(launcher.start(Command((str(script),), {}, str(tmp_path), None)))
                    await asyncio.to_thread(theirs.recv, 1 << 16)  # the order to start it
                    theirs.sendall(json.dumps({"failed": number, "why": FORGED}).encode() + b"\n")
                    assert await (await starting).wait() == 0
            seems.kill_group()
            await launcher.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(play())
    assert len(caplog.messages) == 1
    assert caplog.messages[0].isprintable()
    assert len(caplog.messages[0]) < 400 + len(str(script))


def test_what_a_branch_says_of_a_module_is_one_short_line(tmp_path: Path) -> None:
    async def play() -> None:
        async with scene(tmp_path) as there:
            there.say({"bad": FORGED, "problem": FORGED})
            await until(lambda: there.parent.bad)
            assert all(text.isprintable() and len(text) <= 300 for pair in there.parent.bad.items() for text in pair)
            starting = asyncio.create_task(
                there.parent.start(Command(("x.py",), dict(os.environ), str(tmp_path), None))
            )
            await asyncio.sleep(0)
            there.say({"failed": 2, "why": FORGED})
            with pytest.raises(NotWarmError) as failure:
                await asyncio.wait_for(starting, DEADLINE_S)
            assert str(failure.value).isprintable()
            there.seems.kill_group()

    asyncio.run(play())
