"""The warm parent: what it forks behaves as a fresh interpreter would, and it ends when its manager does."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bftrainer.processes.launch import ColdLauncher, Command, Process, ProcessLauncher
from bftrainer.processes.warm import PARENTS, WarmLauncher
from support.processes import is_alive
from support.waiting import until

pytestmark = pytest.mark.waits

DEADLINE_S = 60.0

Run = Callable[[Coroutine[None, None, Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def warm(run: Run) -> Iterator[WarmLauncher]:
    """One parent with torch for all tests that can share it."""
    launcher = WarmLauncher()
    yield launcher
    run(launcher.close())


def script(folder: Path, text: str, *argv: str, **env: str) -> Command:
    path = folder / "script.py"
    if not path.exists() or path.read_text() != text:  # a process that was started with it may be reading it
        path.write_text(text)
    complete = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return Command(("script.py", *argv), complete, str(folder), str(folder / "out"))


async def status(process: Process) -> int:
    return await asyncio.wait_for(process.wait(), DEADLINE_S)


async def output(launcher: ProcessLauncher, command: Command) -> tuple[int, str]:
    assert command.output is not None
    Path(command.output).unlink(missing_ok=True)
    ended = await status(await launcher.start(command))
    return ended, Path(command.output).read_text()


ABOUT_ITSELF = """
import atexit, json, os, signal, sys, threading

class Local: pass

print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "name": __name__, "file": __file__, "path": sys.path,
    "globals": sorted(globals()), "main": sys.modules["__main__"].__dict__ is globals(), "local": Local.__module__,
    "cwd": os.getcwd(), "stdin": os.fstat(0).st_rdev, "session": os.getsid(0) == os.getpid(),
    "env": {k: v for k, v in os.environ.items() if k != "BFTRAINER_PROCESS"},
    "signals": {int(s): str(signal.getsignal(s)) for s in signal.valid_signals() if s not in (32, 33)},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "wakeup": signal.set_wakeup_fd(-1),
    "open": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
    "threads": [thread.name for thread in threading.enumerate()],
}))
atexit.register(print, "at exit")
threading.Thread(target=lambda: (threading.main_thread().join(), print("from a thread"))).start()
"""

ENDINGS = {
    "returns": "import torch; print(torch.get_num_threads(), (torch.ones(300, 300) @ torch.ones(300, 300)).sum())",
    "exits with 3": "sys.exit(3)",
    "exits with words": "sys.exit('that is all')",
    "raises": "def broken():\n    1 / 0\nbroken()",
    "raises with a hook": "sys.excepthook = lambda kind, *_: print('hook', kind.__name__)\nraise KeyError(1)",
    "is interrupted": "raise KeyboardInterrupt",
    "is signalled": "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGTERM)",
}


def test_what_a_warm_parent_forks_shows_nobody_the_secret_of_its_first_command(run: Run, tmp_path: Path) -> None:
    text = "import os; print(os.environ.get('BFTRAINER_SECRET'), b'SECRET=' in open('/proc/self/environ', 'rb').read())"

    async def scene() -> None:
        launcher = WarmLauncher(preload=("json",))
        first = await output(launcher, script(tmp_path, text, BFTRAINER_SECRET="of-one-agent"))
        assert first == (0, "of-one-agent False\n")
        env = {name: value for name, value in os.environ.items() if name != "BFTRAINER_SECRET"}
        assert await output(launcher, replace(script(tmp_path, text), env=env)) == (0, "None False\n")
        await launcher.close()

    run(scene())


def test_a_forked_script_is_as_one_started_cold(run: Run, warm: WarmLauncher, tmp_path: Path) -> None:
    cold = ColdLauncher()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "link.py").symlink_to(tmp_path / "package" / "script.py")
    ways = [("script.py", "--lr", "0.1"), ("package/../link.py",), ("-m", "package.script", "x")]

    async def scene() -> None:
        for number, (ending, text) in enumerate(ENDINGS.items()):
            env = {"COLOUR": f"blue {number}", "HOME": ""}
            command = script(tmp_path, ABOUT_ITSELF + text, **env)
            (tmp_path / "package" / "script.py").write_text(ABOUT_ITSELF + text)
            command = Command(ways[number % 3], command.env, command.cwd, command.output)
            (cold_status, expected), (warm_status, found) = await asyncio.gather(
                output(cold, command),
                output(warm, Command(command.argv, command.env, command.cwd, f"{command.output}w")),
            )
            assert json.loads(found.splitlines()[0]) == json.loads(expected.splitlines()[0])
            assert sorted(found.splitlines()[1:]) == sorted(expected.splitlines()[1:])
            assert found.endswith("at exit\n") or ending == "is signalled"
            assert (ending, warm_status) == (ending, cold_status)

    run(scene())


def test_scripts_are_forked_from_one_parent_and_know_their_own_randomness(
    run: Run, warm: WarmLauncher, tmp_path: Path
) -> None:
    text = """
import os, random, numpy, torch
print(os.getppid(), random.random(), numpy.random.rand(), torch.rand(1).item())
"""

    async def scene() -> None:
        said = [(await output(warm, script(tmp_path, text)))[1].split() for _ in range(5)]
        parents, randoms, numpys, torches = (set(column) for column in zip(*said, strict=True))
        assert len(parents) == 1
        assert parents != {str(os.getpid())}
        assert len(randoms) == len(numpys) == len(torches) == 5

    run(scene())


def test_a_data_loader_with_workers_runs_in_a_forked_script(run: Run, warm: WarmLauncher, tmp_path: Path) -> None:
    text = """
import multiprocessing, os

class Squares:
    def __len__(self): return 20
    def __getitem__(self, i): return i * i, os.getpid()

def name(_): return __name__

if __name__ == "__main__":
    from torch.utils.data import DataLoader
    batches = list(DataLoader(Squares(), batch_size=5, num_workers=2))
    pids = {int(pid) for _, pids in batches for pid in pids}
    print(sum(int(squares.sum()) for squares, _ in batches), len(pids), os.getpid() in pids)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(name, [0]))
"""

    async def scene() -> None:
        total = sum(i * i for i in range(20))
        assert await output(warm, script(tmp_path, text)) == (0, f"{total} 2 False\n['__mp_main__']\n")

    run(scene())


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


SLEEP = "import time; time.sleep(1000)"


def test_a_command_that_differs_in_what_loading_reads_gets_another_parent(run: Run, tmp_path: Path) -> None:
    async def scene() -> None:
        launcher = WarmLauncher(preload=())
        parents = {}
        for threads in ["1", "2", "1", "3", "4", "2", "5"]:
            process = await launcher.start(script(tmp_path, SLEEP, OMP_NUM_THREADS=threads, RANK=threads))
            assert parents.setdefault(threads, parent_of(process.pid)) == parent_of(process.pid)
        assert len(set(parents.values())) == PARENTS + 1
        assert parents["5"] == os.getpid()  # no further parent: a cold start
        await launcher.close()
        await until(lambda: not any(is_alive(pid) for pid in set(parents.values()) - {os.getpid()}))

    run(scene())


def test_when_the_parent_is_killed_its_processes_end_and_the_next_start_has_a_new_one(run: Run, tmp_path: Path) -> None:
    async def scene() -> None:
        launcher = WarmLauncher(preload=())
        processes = [await launcher.start(script(tmp_path, SLEEP)) for _ in range(3)]
        (parent,) = {parent_of(process.pid) for process in processes}
        os.kill(parent, signal.SIGKILL)
        assert [await status(process) for process in processes] == [-signal.SIGKILL] * 3
        await until(lambda: not any(is_alive(process.pid) for process in processes))
        again = await launcher.start(script(tmp_path, SLEEP))
        assert parent_of(again.pid) not in (parent, os.getpid())
        processes[0].kill_group()
        await launcher.close()
        assert await status(again) == -signal.SIGKILL

    run(scene())


def test_a_module_that_cannot_be_imported_is_reported_and_not_fatal(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        launcher = WarmLauncher(preload=("no_such_module",))
        process = await launcher.start(script(tmp_path, SLEEP))
        assert parent_of(process.pid) != os.getpid()
        await launcher.close()

    with caplog.at_level(logging.WARNING):
        run(scene())
    assert "no_such_module" in caplog.text


def test_without_a_parent_a_script_is_started_cold(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ends_it.py").write_text("import os; os._exit(5)")

    async def scene() -> None:
        launcher = WarmLauncher(preload=("ends_it",))
        command = script(tmp_path, "print('hello')", PYTHONPATH=str(tmp_path))
        assert await output(launcher, command) == (0, "hello\n")
        assert await output(launcher, command) == (0, "hello\n")
        await launcher.close()

    with caplog.at_level(logging.WARNING):
        run(scene())
    assert "without the warm parent" in caplog.text


def test_processes_can_be_started_all_at_once(run: Run, tmp_path: Path) -> None:
    async def scene() -> None:
        launcher = WarmLauncher(preload=())
        command = script(tmp_path, "import sys; sys.exit(int(sys.argv[1]))")
        commands = [Command((*command.argv, str(n)), command.env, command.cwd, None) for n in range(10)]
        processes = await asyncio.gather(*(launcher.start(command) for command in commands))
        assert await asyncio.gather(*(status(process) for process in processes)) == list(range(10))
        await launcher.close()

    run(scene())


def test_a_launcher_closed_while_its_parent_starts_leaves_nothing(run: Run, tmp_path: Path) -> None:
    async def scene() -> None:
        launcher = WarmLauncher(preload=())
        starting = asyncio.create_task(launcher.start(script(tmp_path, SLEEP)))
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        before = children.read_text().split()
        await until(lambda: len(children.read_text().split()) > len(before))
        await launcher.close()
        await asyncio.wait([starting])
        await until(lambda: children.read_text().split() == before)

    run(scene())


def test_torch_prints_no_warning_of_a_peer_that_keeps_others_waiting(
    run: Run, warm: WarmLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    text = """
import datetime, torch.distributed
store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
try:
    store.wait(["never set"], datetime.timedelta(milliseconds=50))
except torch.distributed.DistStoreError:
    print("gave up")
"""
    assert run(output(warm, script(tmp_path, text))) == (0, "gave up\n")


LEFT_OPEN = """
import atexit, sys, tempfile, threading, time, weakref
from pathlib import Path

class Told:
    def __init__(self, name): self.name = name
    def __del__(self): print("finalizer of", self.name, flush=True)

here = open("at_module_level.txt", "w")
here.write("written\\n")
class Ring: pass
ring = Ring()
ring.me, ring.file, ring.told = ring, open("in_a_ring.txt", "wb"), Told("a ring")
ring.file.write(b"written\\n")
ring = None
told = Told("a global")
room = tempfile.TemporaryDirectory(dir=".")
weakref.finalize(Told, print, "finalize", flush=True)
atexit.register(print, "exit handler", flush=True)
threading.Thread(target=lambda: (time.sleep(0.2), print("thread", flush=True))).start()
# a module of the parent keeps a file of the script
sys.kept = open("kept_elsewhere.txt", "a+b")
sys.kept.write(b"written\\n")
def main():
    local = open("in_a_function.txt", "w")
    local.write("written\\n")
    sys.exit(4)
main()
"""


def test_what_a_forked_script_left_open_is_written_and_freed_at_its_end(
    run: Run, warm: WarmLauncher, tmp_path: Path
) -> None:
    ended, found = run(output(warm, script(tmp_path, LEFT_OPEN)))
    assert ended == 4
    assert found.splitlines()[0] == "thread", "exit handlers run when threads have ended"
    said = ["exit handler", "finalize", "finalizer of a global", "finalizer of a ring", "thread"]
    assert sorted(line for line in found.splitlines() if not line.startswith("<")) == said, found
    files = {path.name: path.read_text() for path in tmp_path.glob("*.txt")}
    names = ("at_module_level", "in_a_ring", "in_a_function", "kept_elsewhere")
    assert files == {f"{name}.txt": "written\n" for name in names}
    assert [path for path in tmp_path.iterdir() if path.is_dir() and path.name.startswith("tmp")] == []


def test_the_parent_of_an_owners_agents_has_torchs_cache_at_home_and_not_in_tmp(run: Run, tmp_path: Path) -> None:
    name = "TORCHINDUCTOR_CACHE_DIR"
    (tmp_path / "at_import.py").write_text(f"import os\nCACHE = os.environ.get({name!r})\n")
    text = f"import os, at_import\nprint(at_import.CACHE, os.environ.get({name!r}))"
    home = tmp_path / "home"
    home.mkdir()

    async def play(**env: str) -> str:
        launcher = WarmLauncher(preload=("at_import",))
        command = script(tmp_path, text, PYTHONPATH=str(tmp_path), HOME=str(home), **env)
        without = {key: value for key, value in command.env.items() if key != name or key in env}
        try:
            return (await output(launcher, replace(command, env=without)))[1].strip()
        finally:
            await launcher.close()

    assert run(play()) == "None None"
    assert run(play(BFTRAINER_OWNER="ann", **{name: "/x"})) == "/x /x"
    assert list(home.iterdir()) == []
    assert run(play(BFTRAINER_OWNER="ann")) == f"{home}/.bftrainer/compiled/parent None"
    assert (home / ".bftrainer").stat().st_mode & 0o777 == 0o700
