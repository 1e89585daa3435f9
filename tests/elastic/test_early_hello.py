"""A worker that says hello before its launcher has said that it started."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("torch")

from bftrainer.elastic.local.coordinator import Coordinator, Happening
from bftrainer.processes.launch import Command, Process
from support.elastic.jobs import script, warm

pytestmark = pytest.mark.waits


class SlowToAnswer:
    """Starts processes at once, and says so only when they have connected to the coordinator."""

    def __init__(self) -> None:
        _, self._launcher = warm()
        self.connected = asyncio.Event()

    async def start(self, command: Command) -> Process:
        process = await self._launcher.start(command)
        await asyncio.wait_for(self.connected.wait(), 30)
        await asyncio.sleep(0.1)  # its hello comes right behind
        return process

    async def close(self) -> None:
        """The launcher is that of all tests."""


def test_a_worker_that_is_quicker_than_its_launcher_is_not_sent_away(tmp_path: Path) -> None:
    heard: list[Happening] = []

    async def main() -> str:
        launcher = SlowToAnswer()
        argv = [script("chaos_worker.py"), str(tmp_path), "1", "0"]
        async with Coordinator(argv, launcher, nodes=(1, 1), folder=tmp_path / "logs", watch=heard.append) as job:
            connected = job._connected

            async def notice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                launcher.connected.set()
                await connected(reader, writer)

            assert job._server is not None
            job._server.close()
            job._channel.unlink(missing_ok=True)
            job._server = await asyncio.start_unix_server(notice, job._channel)
            await job.add(1)
            return (await asyncio.wait_for(job.wait(), 60)).status

    loop, _ = warm()
    assert loop.run_until_complete(main()) == "done"
    assert [happening.what for happening in heard if happening.what == "started"] == ["started"]
