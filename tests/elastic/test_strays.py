"""What a worker has started ends with it, in whatever session it is."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bftrainer.processes.launch import ColdLauncher, Command, Process, ProcessLauncher
from bftrainer.processes.warm import WarmLauncher

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="strays are found by way of /proc")

SCRIPT = """
import os, signal, subprocess, sys, time
folder, how, end = sys.argv[1:]
if how == "session":  # as servers of experiment trackers do
    stray = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
elif how == "daemon":  # orphaned before the worker ends
    command = "sleep 600 >/dev/null 2>&1 & echo $!"
    stray = int(subprocess.run(["sh", "-c", command], start_new_session=True, stdout=subprocess.PIPE).stdout)
elif how == "fork":  # without another program, so without an environment of its own
    stray = os.fork()
    if stray == 0:
        os.setsid()
        time.sleep(600)
elif how == "bare":  # with an empty environment
    stray = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env={}).pid
with open(f"{folder}/stray.new", "w") as file:
    file.write(str(stray))
os.rename(f"{folder}/stray.new", f"{folder}/stray")
if end == "raises":
    raise SystemExit(1)
if end == "waits":
    time.sleep(600)
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


async def begin(launcher: ProcessLauncher, folder: Path, how: str, end: str) -> tuple[Process, int]:
    """A worker that has started something: both."""
    folder.mkdir(exist_ok=True)
    script = folder / "worker.py"
    script.write_text(SCRIPT)
    argv = (str(script), str(folder), how, end)
    process = await launcher.start(Command(argv, os.environ, str(folder), str(folder / "log")))
    await until((folder / "stray").exists, "what it starts")
    return process, int((folder / "stray").read_text())


@pytest.mark.parametrize("end", ["waits", "raises", "ends"])
@pytest.mark.parametrize(
    ("kind", "how"),
    [(kind, how) for kind in ("warm", "cold") for how in ("session", "daemon", "fork")]
    # One that hides its environment needs a parent that adopts it to be found.
    + [("warm", "bare")],
)
def test_what_a_worker_has_started_is_gone_when_the_worker_is(kind: str, how: str, end: str, tmp_path: Path) -> None:
    async def main() -> None:
        launcher: ProcessLauncher = WarmLauncher(preload=()) if kind == "warm" else ColdLauncher()
        try:
            process, stray = await begin(launcher, tmp_path, how, end)
            if end == "waits":
                assert lives(stray)
                process.kill_group()
            await process.wait()
            assert not lives(stray)
        finally:
            await launcher.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["session", "daemon"])
def test_what_another_worker_of_the_same_parent_has_started_goes_on(how: str, tmp_path: Path) -> None:
    async def main() -> None:
        launcher = WarmLauncher(preload=())
        try:
            first, of_first = await begin(launcher, tmp_path / "first", how, "waits")
            second, of_second = await begin(launcher, tmp_path / "second", how, "waits")
            first.kill_group()
            await first.wait()
            assert not lives(of_first)
            assert lives(of_second)
            second.kill_group()
            await second.wait()
            assert not lives(of_second)
        finally:
            await launcher.close()

    asyncio.run(main())


def test_when_the_launcher_closes_nothing_is_left(tmp_path: Path) -> None:
    async def main() -> int:
        launcher = WarmLauncher(preload=())
        _, stray = await begin(launcher, tmp_path, "session", "waits")
        await launcher.close()
        return stray

    assert not lives(asyncio.run(main()))


def test_when_the_manager_is_killed_its_warm_parent_ends_what_workers_have_started(tmp_path: Path) -> None:
    manager = f"""
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_strays import begin
from bftrainer.processes.warm import WarmLauncher
async def main():
    await begin(WarmLauncher(preload=()), Path({str(tmp_path)!r}), "session", "waits")
    print("begun", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""

    async def main() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", manager, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
        )
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"begun\n"
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await until(lambda: not lives(int((tmp_path / "stray").read_text())), "the stray's end")

    asyncio.run(main())
