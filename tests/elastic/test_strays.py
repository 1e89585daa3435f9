"""What a worker has started ends with it, in whatever session it is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bftrainer.processes.launch import ColdLauncher, Command, ProcessLauncher
from bftrainer.processes.warm import WarmLauncher
from support.elastic.strays import begin
from support.processes import is_alive
from support.waiting import until

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="strays are found by way of /proc"),
]


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
                assert is_alive(stray)
                process.kill_group()
            await process.wait()
            assert not is_alive(stray)
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
            assert not is_alive(of_first)
            assert is_alive(of_second)
            second.kill_group()
            await second.wait()
            assert not is_alive(of_second)
        finally:
            await launcher.close()

    asyncio.run(main())


SPY = """
from pathlib import Path
from bftrainer.processes import strays
look = strays._processes
def noted():
    with Path({looks!r}).open("a") as file:
        file.write("look\\n")
    return look()
strays._processes = noted
"""


@pytest.mark.parametrize("leaves", [False, True])
def test_only_after_a_worker_that_leaves_something_all_processes_are_looked_at(leaves: bool, tmp_path: Path) -> None:
    looks, script = tmp_path / "looks", tmp_path / "worker.py"
    (tmp_path / "spy.py").write_text(SPY.format(looks=str(looks)))
    script.write_text("import subprocess\n" + ("subprocess.Popen(['sleep', '600'])\n" if leaves else ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}

    async def main() -> None:
        launcher = WarmLauncher(preload=("spy",))
        command = Command((str(script),), environment, str(tmp_path), str(tmp_path / "log"))
        try:
            assert await (await launcher.start(command)).wait() == 0  # the parent has looked when it began
            assert looks.exists(), (tmp_path / "log").read_text()
            looks.write_text("")
            assert await (await launcher.start(command)).wait() == 0
            assert bool(looks.read_text()) == leaves
        finally:
            await launcher.close()

    asyncio.run(main())


REAPER = """
import os, subprocess, sys
from bftrainer.processes import strays
assert strays.become_reaper()
found = [strays.any_child()]
orphan = int(subprocess.run(["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE).stdout)
found.append(strays.any_child())
strays.end_trees([orphan])
found.append(strays.any_child())
print(found)
"""


def test_a_reaper_knows_of_orphans_until_they_are_reaped() -> None:
    done = subprocess.run([sys.executable, "-c", REAPER], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[False, True, False]\n", done.stderr


def test_when_the_launcher_closes_nothing_is_left(tmp_path: Path) -> None:
    async def main() -> int:
        launcher = WarmLauncher(preload=())
        _, stray = await begin(launcher, tmp_path, "session", "waits")
        await launcher.close()
        return stray

    assert not is_alive(asyncio.run(main()))


def test_when_the_manager_is_killed_its_warm_parent_ends_what_workers_have_started(tmp_path: Path) -> None:
    manager = f"""
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support.elastic.strays import begin
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
        await until(lambda: not is_alive(int((tmp_path / "stray").read_text())), "the stray's end")

    asyncio.run(main())
