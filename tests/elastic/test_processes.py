"""Starting worker processes: every launcher passes the same suite, and nothing outlives its manager."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bftrainer.errors import InputError
from bftrainer.processes.launch import ColdLauncher, Command, Process, ProcessLauncher, RunAs
from bftrainer.processes.parent import WarmProcess
from bftrainer.processes.warm import WarmLauncher
from support.processes import is_alive
from support.waiting import until

pytestmark = pytest.mark.waits

DEADLINE_S = 60.0

LAUNCHERS: dict[str, Callable[[], ProcessLauncher]] = {"cold": ColdLauncher, "warm": lambda: WarmLauncher(preload=())}


Run = Callable[[Coroutine[None, None, None]], None]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module", params=list(LAUNCHERS))
def launcher(request: pytest.FixtureRequest, run: Run) -> Iterator[ProcessLauncher]:
    launcher = LAUNCHERS[request.param]()
    yield launcher
    run(launcher.close())


def script(folder: Path, text: str, *argv: str, background: bool = False, **env: str) -> Command:
    path = folder / "script.py"
    path.write_text(text)
    return Command((str(path), *argv), {**os.environ, **env}, str(folder), str(folder / "out"), background=background)


def said(folder: Path) -> str:
    out = folder / "out"
    return out.read_text() if out.exists() else ""


async def first_line(folder: Path) -> str:
    await until(lambda: "\n" in said(folder))
    return said(folder).splitlines()[0]


async def status(process: Process) -> int:
    return await asyncio.wait_for(process.wait(), DEADLINE_S)


WITH_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"])
sys.stdout.write(f"{child.pid}\\n")
sys.stdout.flush()
while sys.argv[1:] != ["leave"]:
    time.sleep(0.1)  # Python runs the handler of a signal that comes just before a sleep only after it
"""


def test_the_exit_status_goes_to_every_waiter_at_any_time(run: Run, launcher: ProcessLauncher, tmp_path: Path) -> None:
    async def scene() -> None:
        process = await launcher.start(script(tmp_path, "import sys; sys.exit(7)"))
        assert await asyncio.gather(*(status(process) for _ in range(3))) == [7, 7, 7]
        assert await status(process) == 7
        process.signal(signal.SIGTERM)
        process.kill_group()

    run(scene())


def test_a_waiter_that_gives_up_leaves_the_others_waiting(run: Run, launcher: ProcessLauncher, tmp_path: Path) -> None:
    async def scene() -> None:
        process = await launcher.start(script(tmp_path, "import time; time.sleep(1000)"))
        impatient, patient = asyncio.create_task(process.wait()), asyncio.create_task(process.wait())
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.wait([impatient])
        process.signal(signal.SIGTERM)
        assert await asyncio.wait_for(patient, DEADLINE_S) == -signal.SIGTERM

    run(scene())


def test_a_signal_to_a_process_that_has_just_been_started_is_not_lost(
    run: Run, launcher: ProcessLauncher, tmp_path: Path
) -> None:
    async def scene() -> None:
        command = script(tmp_path, "import time; time.sleep(1000)")
        for _ in range(5):
            process = await launcher.start(command)
            process.signal(signal.SIGTERM)
            assert await status(process) == -signal.SIGTERM
            process = await launcher.start(command)
            process.kill_group()
            assert await status(process) == -signal.SIGKILL

    run(scene())


def test_a_signal_reaches_the_process_and_kill_group_all_it_has_started(
    run: Run, launcher: ProcessLauncher, tmp_path: Path
) -> None:
    handler = "import signal; signal.signal(signal.SIGUSR1, lambda *_: print('heard', flush=True))\n"

    async def scene() -> None:
        process = await launcher.start(script(tmp_path, handler + WITH_A_CHILD))
        child = int(await first_line(tmp_path))
        assert os.getpgid(child) == process.pid
        process.signal(signal.SIGUSR1)
        await until(lambda: "heard" in said(tmp_path))
        assert is_alive(child)
        process.kill_group()
        assert await status(process) == -signal.SIGKILL
        await until(lambda: not is_alive(child))

    run(scene())


def test_what_a_process_leaves_in_its_group_ends_with_it(run: Run, launcher: ProcessLauncher, tmp_path: Path) -> None:
    async def scene() -> None:
        process = await launcher.start(script(tmp_path, WITH_A_CHILD, "leave"))
        assert await status(process) == 0
        await until(lambda: not is_alive(int(said(tmp_path))))

    run(scene())


@pytest.mark.parametrize("kind", list(LAUNCHERS))
def test_closing_ends_what_still_runs(run: Run, kind: str, tmp_path: Path) -> None:
    async def scene() -> None:
        launcher = LAUNCHERS[kind]()
        process = await launcher.start(script(tmp_path, WITH_A_CHILD))
        child = int(await first_line(tmp_path))
        await launcher.close()
        assert await status(process) == -signal.SIGKILL
        await until(lambda: not is_alive(child) and not is_alive(process.pid))

    run(scene())


def test_output_is_appended_and_any_program_can_be_run(run: Run, launcher: ProcessLauncher, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("before\n")
    argv = ("sh", "-c", 'echo "$GREETING from $PWD"; echo and >&2; exit 4')
    command = Command(argv, {"PATH": os.environ["PATH"], "GREETING": "hello"}, str(tmp_path), "out", python=False)

    async def scene() -> None:
        assert await status(await launcher.start(command)) == 4

    run(scene())
    assert said(tmp_path) == f"before\nhello from {tmp_path}\nand\n"


@pytest.mark.parametrize(
    ("argv", "cwd", "output", "python"),
    [
        (("no-such-program",), ".", None, False),
        (("./no-such-program",), ".", None, False),
        (("script.py",), "no/such/folder", None, True),
        (("script.py",), ".", "no/such/folder/out", True),
    ],
)
def test_a_command_that_cannot_be_started_is_an_input_error(
    run: Run,
    launcher: ProcessLauncher,
    tmp_path: Path,
    argv: tuple[str, ...],
    cwd: str,
    output: str | None,
    python: bool,
) -> None:
    script(tmp_path, "")

    async def scene() -> None:
        command = Command(argv, dict(os.environ), str(tmp_path / cwd), output, python)
        with pytest.raises(InputError, match=argv[0]):
            await launcher.start(command)

    run(scene())


PRIORITY = """
import os, sys, threading
from bftrainer.processes.launch import foreground

def policies():
    return sorted({os.sched_getscheduler(int(tid)) for tid in os.listdir("/proc/self/task")})

go = threading.Event()
threads = [threading.Thread(target=go.wait) for _ in range(3)]
for thread in threads:
    thread.start()
print(policies())
foreground()
print(policies(), len(os.listdir("/proc/self/task")) > 3)
go.set()
"""


def may_leave_the_background() -> bool:
    program = (
        "import os; p = os.sched_param(0); [os.sched_setscheduler(0, k, p) for k in (os.SCHED_IDLE, os.SCHED_OTHER)]"
    )
    return (
        hasattr(os, "SCHED_IDLE")
        and not subprocess.run([sys.executable, "-c", program], capture_output=True).returncode
    )


@pytest.mark.parametrize("background", [True, False])
def test_a_background_process_comes_to_the_foreground_with_all_its_threads(
    run: Run, launcher: ProcessLauncher, tmp_path: Path, background: bool
) -> None:
    if background and not may_leave_the_background():
        pytest.skip("this user may not raise a priority again (needs CAP_SYS_NICE or RLIMIT_NICE)")

    async def scene() -> None:
        assert await status(await launcher.start(script(tmp_path, PRIORITY, background=background))) == 0

    run(scene())
    first, second = said(tmp_path).splitlines()
    assert first == str([os.SCHED_IDLE if background else os.SCHED_OTHER])
    assert second == f"{[os.SCHED_OTHER]} True"


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has idle CPU priority")
@pytest.mark.parametrize("kind", list(LAUNCHERS))
@pytest.mark.parametrize("background", [True, False])
def test_a_process_whose_manager_is_at_idle_priority_stays_there(kind: str, background: bool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    command = script(tmp_path, PRIORITY, background=background)
    manager = f"""
import asyncio, os
from bftrainer.processes.launch import ColdLauncher, Command
from bftrainer.processes.warm import WarmLauncher
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

async def main():
    launcher = {"WarmLauncher(preload=())" if kind == "warm" else "ColdLauncher()"}
    command = Command({command.argv!r}, dict(os.environ), {folder!r}, {command.output!r}, background={background})
    assert await (await launcher.start(command)).wait() == 0
    await launcher.close()

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", manager], check=True)
    assert said(tmp_path).splitlines() == [f"[{os.SCHED_IDLE}]", f"[{os.SCHED_IDLE}] True"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up the right to raise priorities")
def test_a_process_that_could_not_come_back_stays_in_the_foreground(tmp_path: Path) -> None:
    probe = """
import os, sys
from bftrainer.processes.launch import go_to_background
os.setresuid(65534, 65534, 65534)
go_to_background()
print(os.sched_getscheduler(0) == os.SCHED_OTHER)
"""
    command = [sys.executable, "-c", "import resource; resource.setrlimit(resource.RLIMIT_NICE, (0, 0))\n" + probe]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n"


MANAGER = """
import asyncio, os, sys
from bftrainer.processes.launch import ColdLauncher, Command
from bftrainer.processes.parent import WarmProcess
from bftrainer.processes.warm import WarmLauncher

async def main(kind, script):
    launcher = WarmLauncher(preload=()) if kind == "warm" else ColdLauncher()
    folder = os.path.dirname(script)
    processes = [await launcher.start(Command((script,), dict(os.environ), folder, folder + "/out")) for _ in range(2)]
    print("up", flush=True)
    await processes[0].wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
@pytest.mark.parametrize("kind", list(LAUNCHERS))
def test_killing_the_manager_ends_all_it_has_started(run: Run, kind: str, tmp_path: Path) -> None:
    # Each line at once: two workers write to the same file.
    text = "import os\nos.write(1, f'worker {os.getpid()} {os.getppid()}\\n'.encode())\n" + WITH_A_CHILD
    command = script(tmp_path, text)
    with subprocess.Popen([sys.executable, "-c", MANAGER, kind, command.argv[0]], stdout=subprocess.PIPE) as manager:

        async def scene() -> None:
            await until(lambda: said(tmp_path).count("\n") == 4)
            lines = [line.split() for line in said(tmp_path).splitlines()]
            workers = {int(line[1]) for line in lines if line[0] == "worker"}
            parents = {int(line[2]) for line in lines if line[0] == "worker"}
            children = {int(line[0]) for line in lines if line[0] != "worker"}
            assert len(workers) == len(children) == 2
            assert len(parents) == 1
            assert (parents == {manager.pid}) == (kind == "cold")
            # What a worker started itself: the warm parent ends it too, after a cold start it may live on.
            try:
                manager.kill()
                assert manager.wait() == -signal.SIGKILL
                gone = workers | (parents | children if kind == "warm" else set())
                await until(lambda: not any(is_alive(pid) for pid in gone))
            finally:
                for pid in children:
                    if is_alive(pid):
                        os.kill(pid, signal.SIGKILL)

        try:
            run(scene())
        finally:
            manager.kill()


CORES = "import os; print(sorted(os.sched_getaffinity(0)))"


def test_a_process_runs_on_its_cores_as_far_as_they_exist(run: Run, launcher: ProcessLauncher, tmp_path: Path) -> None:
    ours = sorted(os.sched_getaffinity(0))

    async def printed(cores: tuple[int, ...]) -> str:
        (tmp_path / "out").unlink(missing_ok=True)
        process = await launcher.start(replace(script(tmp_path, CORES), cores=cores))
        assert isinstance(process, WarmProcess) == isinstance(launcher, WarmLauncher)
        assert await status(process) == 0
        return said(tmp_path).strip()

    async def scene() -> None:
        assert await printed((ours[-1],)) == str(ours[-1:])
        assert await printed((ours[0], 1000)) == str(ours[:1])
        assert await printed((1000,)) == await printed((-1,)) == await printed(()) == str(ours)

    run(scene())
    assert sorted(os.sched_getaffinity(0)) == ours


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another account")
@pytest.mark.parametrize("kind", [ColdLauncher, WarmLauncher])
def test_a_process_of_another_account_cannot_write_where_its_manager_does(
    run: Run, tmp_path: Path, kind: type[ColdLauncher | WarmLauncher]
) -> None:
    code = "import os; open('at', 'w').write(' '.join(os.path.realpath(f'/proc/self/fd/{fd}') for fd in (0, 1, 2)))"

    async def scene() -> None:
        account = RunAs(os.getuid(), os.getgid())
        launcher = WarmLauncher(preload=(), run_as=account) if kind is WarmLauncher else ColdLauncher(run_as=account)
        process = await launcher.start(replace(script(tmp_path, code), output=None))
        assert await status(process) == 0
        await launcher.close()

    run(scene())
    assert (tmp_path / "at").read_text().split() == [os.devnull] * 3
