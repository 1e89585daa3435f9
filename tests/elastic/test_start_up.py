"""The start of a worker: what its script imported, and how long each part took."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bftrainer.elastic.manager.ranks import MergedVoice
from bftrainer.elastic.protocol import FirstStep, PreloadRefused, decode, encode
from bftrainer.processes import start_up
from bftrainer.processes.start_up import PARTS, StartUp

WATCHED = """
import json, sys
from bftrainer.processes.start_up import ImportWatch
watch = ImportWatch()
watch.begin()
sys.path.insert(0, {user!r})
{script}
watch.end()
print(json.dumps([watch.modules(), watch.seconds]))
"""


def watched(folder: Path, script: str) -> str:
    """What a script prints whose imports are watched, in an interpreter that has the folder `site-packages`."""
    code = WATCHED.format(user=str(folder / "user"), script=textwrap.dedent(script))
    code = f"import sys; sys.path.append({str(folder / 'site-packages')!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    return done.stdout + done.stderr


def module(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


@pytest.mark.waits
def test_installed_modules_are_found_also_where_the_users_own_import_them(tmp_path: Path) -> None:
    module(tmp_path / "site-packages" / "big" / "__init__.py", "import time, big.part; time.sleep(0.1)")
    module(tmp_path / "site-packages" / "big" / "part.py", "import time; time.sleep(0.1)")
    module(tmp_path / "site-packages" / "lazy.py", "import time; time.sleep(0.05)")
    module(tmp_path / "user" / "own.py", "import big")
    modules, seconds = json.loads(watched(tmp_path, "import importlib, own\nimportlib.import_module('lazy')"))
    assert list(modules) == ["big", "lazy"]
    assert modules["big"] >= 0.2
    assert seconds >= 0.25


@pytest.mark.waits
def test_a_module_that_starts_a_thread_is_not_named(tmp_path: Path) -> None:
    module(
        tmp_path / "site-packages" / "threads.py",
        "import threading, time; threading.Thread(target=time.sleep, args=(5,), daemon=True).start(); time.sleep(0.05)",
    )
    assert json.loads(watched(tmp_path, "import threads"))[0] == {}


@pytest.mark.waits
def test_a_failed_import_has_the_traceback_that_it_has_without_the_watch(tmp_path: Path) -> None:
    module(tmp_path / "site-packages" / "broken.py", "1 / 0")
    said = watched(tmp_path, "import broken")
    assert "ZeroDivisionError" in said
    assert "importlib" not in said
    assert "start_up" not in said


def test_the_parts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([13.0, 15.0, 15.5])
    monkeypatch.setattr(start_up, "now", lambda: next(times))
    start = StartUp(ordered=9.0, began=10.0)
    start.imports_took(2.0)
    start.device_took(0.25)
    start.ready()
    start.joined()
    told = start.stepped()
    assert told is not None
    parts, modules = told
    assert tuple(parts) == tuple(PARTS)
    assert parts == {"start": 1.0, "imports": 2.0, "device": 0.25, "build": 0.75, "join": 2.0, "first_step": 0.5}
    assert modules == {}
    assert start.stepped() is None


def test_imports_that_a_worker_waited_for_are_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up, "_imported", [(1.0, 3.0), (6.0, 9.0)])
    told = StartUp(ordered=8.0, began=10.0).stepped()
    assert told is not None
    assert (told[0]["start"], told[0]["imports"]) == (1.0, 1.0)


def test_of_several_ranks_the_first_one_tells_of_the_start_and_any_one_refuses() -> None:
    voice = MergedVoice(2)
    first, refused = FirstStep({"start": 1.0}, {"big": 0.2}), PreloadRefused("HOME", ("big",))
    assert voice.merge(1, first) is None
    assert voice.merge(0, first) == first
    assert voice.merge(1, refused) == refused
    assert voice.merge(0, refused) is None
    assert [decode(encode(message)) for message in (first, refused)] == [first, refused]
