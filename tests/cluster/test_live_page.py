"""docs/live.md is true: its commands run, as shown, against a controller."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from bftrainer.cli.main import run
from bftrainer.cluster.spec.files import load_spec
from support.cluster.live import Live

pytest.importorskip("torch")
pytest.importorskip("sklearn")

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "live.md").read_text()


def test_the_commands_of_the_page_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    serve, *commands = [line for line in lines if line.startswith("bftrainer ")]
    assert serve.startswith("bftrainer serve ")
    assert len(commands) >= 10
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("BFTRAINER_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "120")
    with Live(tmp_path / "state", *shlex.split(serve)[2:]) as live:
        for command in commands:
            assert run(shlex.split(command)[1:]) == 0, (command, *capsys.readouterr())
        assert live.trainer("digits")["state"] == "done"


def test_the_description_of_the_page_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "trainers.yaml"
    path.write_text(text)
    small, large = load_spec(path)
    assert (small.name, small.min_nodes, small.max_nodes, small.args) == ("small", 1, 8, ("--epochs", "3"))
    assert (large.weight, large.env) == (2, {"OMP_NUM_THREADS": "4"})
