"""docs/extend.md is true: its objective, allocator and pool work as written, and the commands after them run."""

from __future__ import annotations

import asyncio
import importlib
import shlex
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bftrainer.allocate.problem import Claim, Problem
from bftrainer.allocate.registry import make_allocator
from bftrainer.cli.main import run
from bftrainer.cluster.pools.registry import make_pool, settings_of
from bftrainer.core import Curve
from bftrainer.errors import InputError
from support.cluster.fake_pool_host import FakePoolHost
from support.cluster.live import Live
from support.cluster.made_pools import STUB, executable
from support.cluster.pool_conformance import CHECKS, Check, Setting
from support.docs.pages import DOCS, blocks, steps, write_files
from support.waiting import until, wait_until

pytestmark = pytest.mark.docs

PAGE = DOCS / "extend.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of the page, which is the current one and on the path of modules."""
    write_files(PAGE, tmp_path)
    (tmp_path / "workstations.txt").write_text("first\nsecond\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("BFTRAINER_STATE", str(tmp_path / "state"))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


def pools_module() -> ModuleType:
    return importlib.import_module("my_pools")


def test_the_commands_of_the_page_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "synth", "--profile", "summit", "--nodes", "8", "--hours", "4", "-o", "t.parquet"]) == 0
    (folder / "trainers.yaml").write_text(
        next(block.text for block in blocks(DOCS / "simulation.md") if block.language == "yaml")
    )
    (folder / "problem.json").write_text(
        next(block.text for block in blocks(DOCS / "allocation.md") if block.language == "json")
    )
    lines = [step.command for step in steps(PAGE)]
    assert len(lines) == 5
    for line in lines:
        words = shlex.split(line)
        assert words[:2] == ["PYTHONPATH=.", "bftrainer"]
        if words[2] == "serve":  # runs until it is told to end
            dry = Live(folder / "state", *words[3:], env={"PYTHONPATH": "."})
            with dry:
                assert dry.api.status()["dry_run"]
                assert dry.api.status()["pool"]["kind"] == "my_pools:NightPool"
        else:
            assert run(words[2:]) == 0, line
    said = capsys.readouterr().out
    assert "heuristic: 100 of 100 nodes used" in said
    assert "night.toml: is right" in said


def test_the_night_pool_brings_nodes_to_a_real_controller(folder: Path) -> None:
    start = [sys.executable, "-m", "bftrainer", "agent", "--environment-from-stdin"]
    text = (folder / "night.toml").read_text().replace("begin = 20\nend = 6", "begin = 0\nend = 24")
    (folder / "night.toml").write_text(f"{text}start = {start!r}\n".replace("'", '"'))
    with Live(folder / "state", "--config", "night.toml", "--drain", env={"PYTHONPATH": "."}) as live:
        wait_until(lambda: {row["node"] for row in live.nodes()} == {"first", "second"}, what="two nodes")


def night_pool(folder: Path, hour: list[int]) -> Any:
    """The page's pool over two nodes whose agents are stubs, at an hour in the hands of the test."""
    folder.mkdir(exist_ok=True)
    shell = executable(folder / "rsh", '#!/bin/sh\nshift\nexec env -i HOME="$HOME" "$@"\n')
    start = (shell, "{node}", sys.executable, STUB, "--environment-from-stdin", str(folder))
    discover = executable(folder / "discover", "#!/bin/sh\nprintf 'first\\nsecond\\n'\n")
    module = pools_module()
    settings = module.NightSettings((discover,), start, interval_s=0.1, grace_s=0.1)
    return module.NightPool(settings, folder, clock=lambda: datetime(2026, 1, 1, hour[0]))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_night_pool_conforms(check: Check, folder: Path) -> None:
    state = folder / "pool"
    asyncio.run(check(Setting(lambda: night_pool(state, [23]), state, ("first", "second"))))


def test_by_day_the_night_pool_has_no_nodes_and_a_resume_does_not_change_that(folder: Path) -> None:
    async def a_day() -> None:
        hour = [12]
        async with FakePoolHost() as host:
            pool = night_pool(folder / "pool", hour)
            await pool.open(host)
            try:
                await pool.pause()
                await pool.resume()
                looked = host.looks
                await until(lambda: host.looks > looked + 2)
                assert not host.joins
                hour[0] = 20
                await until(lambda: host.here == {"first", "second"}, lambda: host.said)
                hour[0] = 6
                await until(lambda: not host.here, lambda: host.said)
                assert sorted(host.words("leaving")) == ["first", "second"]
            finally:
                await pool.close(drain=True)

    asyncio.run(a_day())


# What users bring may be wrong.

PROBLEM = Problem(5, 60.0, (Claim("a", 0, 1, 4, Curve.through([1, 4], [10.0, 40.0]), 1.0, 1.0),))

ALLOCATORS = """
from bftrainer.allocate.problem import Decision
class Answers:
    def allocate(self, problem):
        return self.answer
def answering(answer):
    def make():
        made = Answers()
        made.answer = answer
        return made
    return make
def decision(*counts):
    return answering(Decision(counts, "heuristic", 1e9, 0.0))
good, too_many, none_for_some, halves = decision(4), decision(6), decision(), decision(1.5)
below, no_decision = decision(-1), answering([1])
ready = good()
class Breaks:
    def allocate(self, problem):
        return 1 / 0
class Picky:
    def __init__(self, what): ...
class Empty: ...
number = 3
"""


@pytest.mark.parametrize("name", ["good", "ready"])
def test_an_allocator_of_the_users_own_decides_and_its_objective_is_worked_out_anew(name: str, folder: Path) -> None:
    (folder / "my_own.py").write_text(ALLOCATORS)
    decision = make_allocator(f"my_own:{name}").allocate(PROBLEM)
    assert decision.counts == (4,)
    assert decision.objective == PROBLEM.objective((4,)) != 1e9


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("too_many", "must give each of 1 trainers .* but gave \\(6,\\)"),
        ("none_for_some", "but gave \\(\\)"),
        ("halves", "but gave \\(1.5,\\)"),
        ("below", "but gave \\(-1,\\)"),
        ("no_decision", "must return a Decision, but got \\[1\\]"),
        ("Breaks", "failed: ZeroDivisionError: division by zero"),
        ("Picky", "cannot be made without arguments: TypeError: "),
        ("Empty", "must have a method allocate"),
        ("number", "cannot be made without arguments: TypeError: 'int' object is not callable"),
        ("missing", "module my_own has no missing"),
    ],
)
def test_a_wrong_allocator_of_the_users_own_is_one_clear_line(name: str, words: str, folder: Path) -> None:
    (folder / "my_own.py").write_text(ALLOCATORS)
    with pytest.raises(InputError, match=f"allocator 'my_own:{name}'.*{words}") as error:
        make_allocator(f"my_own:{name}").allocate(PROBLEM)
    assert "\n" not in str(error.value)


POOLS = """
from dataclasses import dataclass
@dataclass
class Settings:
    wanted: int
    count: int = 3
    def __post_init__(self):
        if self.count > 9:
            raise ValueError("too many")
class Bare: ...
class Half:
    Settings = Settings
    def __init__(self, settings, folder): ...
    async def open(self, host): ...
class Breaks(Half):
    def __init__(self, settings, folder):
        raise KeyError("x")
"""


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("my_own:Bare", {}, "pool 'my_own:Bare' must have a dataclass of its settings as its attribute Settings"),
        ("my_own:Half", {"wanted": 1}, "pool 'my_own:Half' must have a method pause"),
        ("my_own:Half", {}, "pool my_own:Half: TypeError: .*'wanted'"),
        ("my_own:Half", {"wanted": "x"}, "pool my_own:Half: `wanted` must be a whole number, but got 'x'"),
        ("my_own:Half", {"wanted": 1, "count": 10}, "pool my_own:Half: ValueError: too many"),
        ("my_own:Half", {"wantd": 1}, "pool my_own:Half: unknown setting 'wantd': did you mean 'wanted'"),
        ("my_own:Breaks", {"wanted": 1}, "pool 'my_own:Breaks' cannot be made: KeyError: 'x'"),
        ("my_own:None_", {}, "pool 'my_own:None_': module my_own has no None_"),
        ("my_nothing:X", {}, "No module named 'my_nothing'. Is its folder on PYTHONPATH"),
        ("script:", {}, "unknown kind of pool 'script:': did you mean 'script'"),
    ],
)
def test_a_wrong_pool_of_the_users_own_is_one_clear_line(
    kind: str, settings: dict[str, Any], words: str, folder: Path
) -> None:
    (folder / "my_own.py").write_text(POOLS)
    with pytest.raises(InputError, match=words) as error:
        make_pool(kind, settings, folder)
    assert "\n" not in str(error.value)


def test_settings_of_the_night_are_checked_by_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert settings_of("my_pools:NightPool") is pools_module().NightSettings
    text = (folder / "night.toml").read_text()
    (folder / "night.toml").write_text(text.replace("end = 6", "end = 25"))
    assert run(["config", "--config", "night.toml", "--check"]) == 2
    assert "pool my_pools:NightPool: `end` must be an hour from 0 to 24, but got 25" in capsys.readouterr().err
