"""`bftrainer submit --explain` as a person calls it: text, JSON, exit statuses and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from bftrainer.cli.main import run
from support.explained import SCRIPTS

Call = Callable[..., SimpleNamespace]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs `bftrainer submit --explain` in a folder of its own, where no controller can be found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BFTRAINER_URL", raising=False)
    monkeypatch.setenv("BFTRAINER_STATE", str(tmp_path / "none"))

    def call(*words: str) -> SimpleNamespace:
        status = run(["submit", "--explain", *words])
        out, err = capsys.readouterr()
        return SimpleNamespace(status=status, out=out, err=err)

    return call


def test_the_text_has_the_way_the_diff_and_the_command(call: Call) -> None:
    Path("train.py").write_text((SCRIPTS / "mnist.py").read_text())
    answer = call("--nodes", "2-8", "train.py", "--epochs", "3")
    assert answer.status == 0
    assert answer.err == ""
    assert answer.out.startswith("train.py: elastic.prepare\n")
    prepared = "model, optimizer, train_loader, scheduler"
    assert f"\n  +    {prepared} = elastic.prepare({prepared})\n" in answer.out
    assert answer.out.endswith("\n  bftrainer submit --nodes 2-8 train.py --epochs 3\n")


def test_the_json_has_the_documented_keys(call: Call) -> None:
    Path("train.py").write_text((SCRIPTS / "vae.py").read_text())
    answer = call("--json", "train.py")
    found = json.loads(answer.out)
    assert list(found) == ["script", "way", "command", "evidence", "changes", "warnings", "refused"]
    assert found["way"] == "prepare"
    assert list(found["evidence"][0]) == ["file", "line", "text", "what"]
    assert list(found["changes"][0]) == ["file", "line", "before", "after"]
    assert list(found["refused"][0]) == ["file", "line", "what", "remedy"]
    assert [one["line"] for one in found["refused"]] == [28, 29]


def test_no_way_is_exit_status_1(call: Call) -> None:
    Path("train.py").write_text("import tensorflow\n")
    answer = call("train.py")
    assert answer.status == 1
    assert answer.out.startswith("train.py: no way found\n")
    assert "What is possible:" in answer.out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "train.py: there is no such file"),
        (b"x = (\n", "train.py:1: '(' was never closed"),
        (b"if True:\nx\n", "train.py:2: expected an indented block"),
        (b"\xff\xfe\x00", "train.py: is not a Python text file"),
        (b"x = 1\x00\n", "train.py"),
        (b"# coding: nonsense\n", "train.py: is not a Python text file"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_exit_status_2(call: Call, content: bytes | None, said: str) -> None:
    if content is not None:
        Path("train.py").write_bytes(content)
    answer = call("train.py")
    assert answer.status == 2
    assert answer.out == ""
    assert answer.err.startswith(f"bftrainer: {said}")
    assert answer.err.count("\n") == 1


def test_a_folder_is_no_script(call: Call) -> None:
    Path("train.py").mkdir()
    assert call("train.py").status == 2


def test_a_local_module_that_cannot_be_read_is_told_and_does_no_harm(call: Call) -> None:
    Path("train.py").write_text("import helper\n" + (SCRIPTS / "gan.py").read_text())
    Path("helper.py").write_text("def (\n")
    answer = call("train.py")
    assert answer.status == 0
    assert "train.py:1  the module imported here was not read: helper.py:1:" in answer.out


def test_a_module_is_found_without_importing_it(call: Call) -> None:
    package = Path("package")
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "train.py").write_text((SCRIPTS / "split" / "train.py").read_text().replace("from ", "from .", 2))
    for name in ("model", "engine"):
        (package / f"{name}.py").write_text((SCRIPTS / "split" / f"{name}.py").read_text())
    answer = call("--json", "-m", "package.train", "--lr", "1")
    assert answer.status == 0
    found = json.loads(answer.out)
    assert found["script"] == "package/train.py"
    assert {change["file"] for change in found["changes"]} == {"package/engine.py"}
    assert found["command"] == "bftrainer submit --nodes 1-4 -m package.train --lr 1"


def test_a_package_runs_its_main_module(call: Call) -> None:
    Path("package").mkdir()
    assert "without __main__.py" in call("-m", "package").err
    Path("package/__main__.py").write_text((SCRIPTS / "gan.py").read_text())
    assert call("-m", "package").out.startswith("package/__main__.py: elastic.prepare\n")


@pytest.mark.parametrize("name", ["nowhere.at.all", "bad-name", "math"])
def test_a_module_that_is_not_found_is_exit_status_2(call: Call, name: str) -> None:
    answer = call("-m", name)
    assert answer.status == 2
    assert answer.err.startswith(f"bftrainer: -m {name}: ")


@pytest.mark.parametrize("words", [[], ["--spec", "trainers.yaml"], ["--array", "grid.yaml"]])
def test_it_needs_a_script(call: Call, words: list[str]) -> None:
    answer = call(*words)
    assert answer.status == 2
    assert "--explain needs a script" in answer.err


def test_a_name_with_control_characters_does_not_reach_the_terminal(call: Call) -> None:
    Path("train.py").write_text((SCRIPTS / "gan.py").read_text().replace('"""', "") + "x = '\x1b[31m'\n")
    assert "\x1b" not in call("train.py").out


@pytest.mark.waits
def test_neither_torch_nor_the_script_is_imported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('imported')\n" + (SCRIPTS / "mnist.py").read_text())
    code = (
        "import sys\nfrom bftrainer.cli.main import run\nrun(['submit', '--explain', 'train.py'])\nprint(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=120
    )
    loaded = set(done.stdout.split("\n")[-2].split())
    assert "bftrainer.explain.deciding" in loaded
    assert not loaded & {"torch", "train", "httpx", "fastapi"}
