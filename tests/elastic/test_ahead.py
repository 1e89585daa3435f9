"""Imports ahead: workers of a branch have their modules at once, and behave as if they had imported them themselves."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bftrainer.cluster.controller.start_up.preloads import Preloads
from bftrainer.cluster.spec.trainer import parse_spec
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.elastic.protocol import FirstStep
from bftrainer.errors import InputError
from bftrainer.processes import variables
from bftrainer.processes.ahead.branches import MOST
from bftrainer.processes.launch import ColdLauncher, Command, ProcessLauncher
from bftrainer.processes.parent import WarmParent
from bftrainer.processes.warm import WarmLauncher
from support.waiting import until

pytestmark = pytest.mark.waits

DEADLINE_S = 60.0

Run = Callable[[Coroutine[None, None, Any]], Any]

SLOW = """
import os
from pathlib import Path
READ = os.environ.get("OF_SLOW")
with open(Path(__file__).with_name("imported"), "a") as log:
    print(os.getpid(), file=log)
"""


@pytest.fixture
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture
def warm(run: Run) -> Iterator[WarmLauncher]:
    launcher = WarmLauncher(preload=())
    yield launcher
    run(launcher.close())


def script(folder: Path, text: str, *preload: str, **env: str) -> Command:
    """A script that can import `slow` from a folder on its path, which is not its own."""
    library = folder / "library"
    library.mkdir(exist_ok=True)
    if not (library / "slow.py").exists():
        (library / "slow.py").write_text(SLOW)
    (folder / "user").mkdir(exist_ok=True)
    (folder / "user" / "script.py").write_text(text)
    complete = {**os.environ, "PYTHONPATH": str(library), "PYTHONDONTWRITEBYTECODE": "1", **env}
    return Command(("script.py",), complete, str(folder / "user"), str(folder / "out"), preload=preload)


async def output(launcher: ProcessLauncher, command: Command) -> tuple[int, str]:
    assert command.output is not None
    Path(command.output).unlink(missing_ok=True)
    process = await launcher.start(command)
    return await asyncio.wait_for(process.wait(), DEADLINE_S), Path(command.output).read_text()


def imports(folder: Path) -> list[str]:
    log = folder / "library" / "imported"
    return log.read_text().split() if log.exists() else []


WHO = "import os, slow; print(slow.READ, os.getpid())"


def test_a_module_is_imported_once_for_all_workers(run: Run, warm: WarmLauncher, tmp_path: Path) -> None:
    command = script(tmp_path, WHO, "slow")
    said = [run(output(warm, command)) for _ in range(2)]
    assert [status for status, _ in said] == [0, 0]
    assert len(imports(tmp_path)) == 1
    assert imports(tmp_path)[0] not in " ".join(words for _, words in said)


def test_a_branch_is_made_before_its_first_worker_comes(run: Run, warm: WarmLauncher, tmp_path: Path) -> None:
    command = script(tmp_path, WHO, "slow")

    async def ahead() -> None:
        warm.import_ahead(command)
        await until(lambda: imports(tmp_path), "the import")
        await output(warm, command)

    run(ahead())
    assert len(imports(tmp_path)) == 1


def test_all_sockets_are_in_the_folder_of_an_agent_which_is_swept_if_the_agent_is_killed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name:  # a short path
        launcher = WarmLauncher(preload=(), folder=Path(name))
        assert run(output(launcher, script(tmp_path, WHO, "slow")))[0] == 0
        assert len(imports(tmp_path)) == 1, "there is a branch"
        run(launcher.close())


def test_a_launcher_that_is_killed_leaves_no_temporary_folder(
    run: Run, warm: WarmLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as name:  # a short path: a Unix socket is in it
        monkeypatch.setattr(tempfile, "tempdir", name)
        assert run(output(warm, script(tmp_path, WHO, "slow")))[0] == 0
        assert len(imports(tmp_path)) == 1, "there is a branch"
        assert list(Path(name).iterdir()) == [], "whatever is there now stays if this process is killed"


def test_a_script_of_a_branch_is_as_one_started_cold(run: Run, warm: WarmLauncher, tmp_path: Path) -> None:
    text = "import json, os, slow, sys\nprint(json.dumps([sys.argv, sys.path, __file__, sorted(os.environ)]))\n1 / 0"
    command = script(tmp_path, text, "slow")
    (status, words), (cold_status, cold) = run(output(warm, command)), run(output(ColdLauncher(), command))
    assert (status, words) == (cold_status, cold)
    assert status == 1
    assert "ZeroDivisionError" in words


def test_a_worker_with_another_value_of_a_variable_that_was_read_imports_itself(
    run: Run, warm: WarmLauncher, tmp_path: Path
) -> None:
    run(output(warm, script(tmp_path, WHO, "slow", OF_SLOW="a")))
    _, words = run(output(warm, script(tmp_path, WHO, "slow", OF_SLOW="b")))
    assert words.split()[0] == "b"
    assert len(imports(tmp_path)) == 2


def test_modules_that_cannot_be_forked_or_imported_are_left_out(run: Run, warm: WarmLauncher, tmp_path: Path) -> None:
    bad = {
        "threads": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "handles": "import signal; signal.signal(signal.SIGUSR1, lambda *_: None)",
        "fails": "raise OSError('no device')",
        "exits": "raise SystemExit(3)",
    }
    command = script(tmp_path, "import slow, sys; print([n for n in sys.modules if n in ('threads', 'fails')])")
    for name, text in bad.items():
        (tmp_path / "library" / f"{name}.py").write_text(text)
    status, words = run(output(warm, replace(command, preload=("missing", *bad, "slow"))))
    assert (status, words) == (0, "[]\n")
    assert len(imports(tmp_path)) == 1


CHANGES = {
    "random's seed": "import random; random.seed(0)",
    "a random number": "import random; random.random()",
    "numpy's seed": "import numpy; numpy.random.seed(0)",
    "torch's seed": "import torch; torch.manual_seed(0)",
    "torch's default dtype": "import torch; torch.set_default_dtype(torch.float64)",
    "a method of a layer": "import torch; torch.nn.Linear.forward = lambda self, x: x",
    "a method of all layers": "import torch; torch.nn.Module.__call__ = lambda self, x: x",
    "a method of tensors": "import torch; torch.Tensor.backward = lambda self: None",
    "a step of an optimizer": "import torch; torch.optim.SGD.step = lambda self: None",
    "a loss": "import torch; torch.nn.functional.mse_loss = torch.nn.functional.l1_loss",
    "a class": "import torch; torch.utils.data.DataLoader = list",
    "a function of torch": "import torch; torch.manual_seed = lambda seed: None",
    "a function that is gone": "import torch; del torch.relu",
    "a function of random": "import random; random.shuffle = lambda values: None",
    "a builtin": "import builtins; builtins.print = print; builtins.sum = lambda values: 0",
    "the folder": "import os; os.chdir('/')",
    "the path": "import sys; sys.path.insert(0, '/elsewhere')",
    "the path of the script": "import sys; del sys.path[0]",
    "the arguments": "import sys; sys.argv.append('--more')",
    "new arguments": "import sys; sys.argv = ['', '--more']",
    "what it reads of the arguments": "import sys; ARGUMENTS = sys.argv[1:]",
    "what it copies of the arguments": "import sys; ARGUMENTS = list(sys.argv)",
}


@dataclass(frozen=True)
class Shared:
    """A launcher that has imported torch, which takes long, and the folder of its scripts."""

    run: Run
    launcher: WarmLauncher
    folder: Path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with asyncio.Runner() as runner:
        launcher = WarmLauncher(preload=("torch",))
        yield Shared(runner.run, launcher, tmp_path_factory.mktemp("shared"))
        runner.run(launcher.close())


def left_out(launcher: WarmLauncher) -> dict[str, str]:
    """The modules that are not imported ahead, and why."""
    return launcher._branches._bad


@pytest.mark.parametrize("what", CHANGES)
def test_a_module_that_changes_what_scripts_compute_with_is_left_out(what: str, shared: Shared) -> None:
    name = f"changes_{list(CHANGES).index(what)}"
    command = script(shared.folder, WHO)
    (shared.folder / "library" / f"{name}.py").write_text(CHANGES[what])
    status, words = shared.run(output(shared.launcher, replace(command, preload=("slow", name))))
    assert status == 0
    assert left_out(shared.launcher)[name].startswith(("its import changes", "its import replaces"))
    assert words.split()[1] not in imports(shared.folder), "the other module is still imported ahead"


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_module_that_loads_a_library_and_seeds_it_is_left_out(
    library: str, run: Run, warm: WarmLauncher, tmp_path: Path
) -> None:
    seed = {"numpy": "numpy.random.seed(0)", "torch": "torch.manual_seed(0)"}[library]
    command = script(tmp_path, WHO, "seeds", "slow")
    (tmp_path / "library" / "seeds.py").write_text(f"import {library}; {seed}")
    assert run(output(warm, command))[0] == 0
    assert list(left_out(warm)) == ["seeds"]


def test_the_arguments_and_seeds_of_a_module_are_those_of_a_cold_start(
    run: Run, warm: WarmLauncher, tmp_path: Path
) -> None:
    text = "import reads, seeds, slow, random, sys; print(reads.SEEN, sys.argv, sys.orig_argv, random.random())"
    command = script(tmp_path, text, "slow", "reads", "seeds")
    command = replace(command, argv=("script.py", "--epochs", "3"))
    (tmp_path / "library" / "reads.py").write_text("import sys; SEEN = list(sys.argv)")
    (tmp_path / "library" / "seeds.py").write_text("import random; random.seed(0)")
    assert run(output(warm, command)) == run(output(ColdLauncher(), command))


def test_libraries_and_modules_that_only_add_names_are_imported_ahead(shared: Shared) -> None:
    names = ("numpy", "numpy.random", "torch._dynamo", "torch.distributed", "adds")
    command = script(shared.folder, "import sys; print('adds' in sys.modules)", *names)
    text = "import sys, torch; torch.nn.Linear.more = torch.more = 1; sys.path.append('/elsewhere')"
    (shared.folder / "library" / "adds.py").write_text(text)
    assert shared.run(output(shared.launcher, command)) == (0, "True\n")
    assert not left_out(shared.launcher).keys() & set(names)


def test_nothing_is_imported_ahead_for_a_trainer_that_says_none(tmp_path: Path) -> None:
    spec = parse_spec({"script": "/home/ann/train.py", "preload": "models"})
    none = parse_spec({"script": "/home/ann/train.py", "preload": "none"})
    with Store.open(tmp_path / FILE) as store:
        preloads = Preloads(store)
        preloads.learn(spec, FirstStep({}, {"transformers": 8.0}), 1.0)
        assert preloads.of(spec) == ("models", "transformers")
        assert preloads.of(none) == ()
    with pytest.raises(InputError, match="none alone, but got 'none,models'"):
        parse_spec({"script": "/home/ann/train.py", "preload": "none,models"})


def test_a_changed_module_of_the_users_own_is_imported_again(run: Run, warm: WarmLauncher, tmp_path: Path) -> None:
    command = script(tmp_path, "import own; print(own.VALUE)", "own")
    own = tmp_path / "user" / "own.py"
    for value in ("1", "22"):
        own.write_text(f"VALUE = {value}")
        assert run(output(warm, command)) == (0, f"{value}\n")


def test_a_module_that_appears_beside_the_script_takes_precedence(run: Run, warm: WarmLauncher, tmp_path: Path) -> None:
    command = script(tmp_path, "import wave; print(wave.__file__)", "wave")
    assert str(tmp_path) not in run(output(warm, command))[1]
    (tmp_path / "user" / "wave.py").write_text("")
    assert run(output(warm, command)) == (0, f"{tmp_path / 'user' / 'wave.py'}\n")


def test_there_are_few_branches(run: Run, warm: WarmLauncher, tmp_path: Path) -> None:
    names = ("wave", "calendar", "colorsys", "cmd", "nntplib")[: MOST + 1]
    pids = set()
    for name in names:
        run(output(warm, script(tmp_path, "print(1)", name)))
        pids |= set(warm._branches._pids.values())
    assert len(pids) == len(names)
    assert len(warm._branches._tasks) == MOST
    run(until(lambda: not warm._branches._dropped, "the end of the dropped one"))


def test_a_worker_survives_its_branch_being_dropped(run: Run, warm: WarmLauncher, tmp_path: Path) -> None:
    waits = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('went')"

    async def drop() -> tuple[int, str]:
        process = await warm.start(script(tmp_path, waits, "wave"))
        for key in list(warm._branches._tasks):
            warm._branches._drop(key)
        (tmp_path / "user" / "go").touch()
        return await asyncio.wait_for(process.wait(), DEADLINE_S), (tmp_path / "out").read_text()

    assert run(drop()) == (0, "went\n")


SETS = "import os\n{before}\nos.environ['OF_SLOW'] = 'mine'\nimport slow\nprint(slow.READ)"
CLEARS = "import os\nkept = os.environ.copy()\nos.environ.clear()\n{then}\nimport slow\nprint(slow.READ)"


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        (SETS.format(before=""), True),
        (CLEARS.format(then="os.environ.update(kept, OF_SLOW='mine')"), True),
        (CLEARS.format(then="os.environ['OF_SLOW'] = 'mine'"), True),
        (CLEARS.format(then="os.environ.clear()\nos.environ.update(kept)"), False),
    ],
    ids=["set", "set in a whole", "cleared, then set", "cleared for a moment, as Accelerate does"],
)
def test_a_script_that_sets_what_a_module_has_read_asks_to_be_started_without_it(
    text: str, asks: bool, run: Run, warm: WarmLauncher, tmp_path: Path
) -> None:
    channel = tmp_path / "channel"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(channel))
    listener.listen()
    listener.settimeout(DEADLINE_S)

    def heard() -> list[dict[str, Any]]:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            return [json.loads(line) for line in lines]

    async def start(command: Command) -> tuple[list[dict[str, Any]], int]:
        listening = asyncio.create_task(asyncio.to_thread(heard))
        process = await warm.start(command)
        return await listening, await asyncio.wait_for(process.wait(), DEADLINE_S)

    worker = {variables.CHANNEL: str(channel), variables.WORKER: "t1-1"}
    command = script(tmp_path, text, "slow", **worker)
    if not asks:
        listener.close()  # nothing is told before the training
        assert run(output(warm, command)) == (0, "None\n")
        return
    (hello, refused), status = run(start(command))
    listener.close()
    assert (hello["type"], hello["worker"], status) == ("hello", "t1-1", 75)
    assert refused == {"type": "preloadrefused", "variable": "OF_SLOW", "modules": ["slow"]}
    assert run(output(warm, replace(command, preload=()))) == (0, "mine\n")


def test_workers_end_with_their_launcher(run: Run, tmp_path: Path) -> None:
    async def begin() -> tuple[int, WarmParent]:
        launcher = WarmLauncher(preload=())
        process = await launcher.start(script(tmp_path, "import time; time.sleep(1000)", "wave"))
        (branch,) = [task.result() for task in launcher._branches._tasks.values()]
        await launcher.close()
        return await asyncio.wait_for(process.wait(), DEADLINE_S), branch

    status, branch = run(begin())
    assert status == -9
    assert branch.gone
