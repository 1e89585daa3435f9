"""docs/results.md is true: its commands and programs run as shown, against a fake controller and a fake tracker."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bftrainer.cli.main import run
from bftrainer.util.folders import list_files
from support.cluster.fake_api import NOW, TOKEN, FakeState, make_app, serving
from support.docs.pages import DOCS, ROOT, blocks

pytest.importorskip("torch")

pytestmark = pytest.mark.docs

PAGE = DOCS / "results.md"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeState]:
    """A controller in whose eyes all trainers are done at once, with a file each."""
    for name in ("BFTRAINER_URL", "BFTRAINER_TOKEN", "BFTRAINER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BFTRAINER_STATE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    output = tmp_path / "trainers" / "output"
    output.mkdir(parents=True)
    (output / "best.pt").write_bytes(b"weights")
    files = [file._asdict() for file in list_files(output)[0]]
    fake = FakeState(output={"host": socket.gethostname(), "folder": str(output), "exists": True, "files": files})

    def on_ask(path: str) -> None:
        for spec, row in zip(fake.specs, fake.trainers.values(), strict=True):
            row.update(group=spec["group"], state="done", started=NOW, ended=NOW + 9, metrics={"accuracy": 0.5})
        place = {"epoch": 2, "step": 126, "samples": 4000}
        judged = {"value": 0.5, "at": place, "best": 0.5, "best_at": place, "params": {}, "folder": str(output)}
        used = {"run_s": 9.0, "node_seconds": 13.5}
        fake.trials = [{**row, **judged, **used} for row in fake.trainers.values()]

    with serving(make_app(fake)) as url:
        (tmp_path / "client.json").write_text(json.dumps({"url": url, "token": TOKEN}))
        fake.on_ask = on_ask
        yield fake


def test_the_commands_and_the_program_run(fake: FakeState, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (commands,) = (block.text.splitlines() for block in blocks(PAGE) if block.language == "sh")
    for command in commands:
        assert run(shlex.split(command)[1:]) == 0, command
    assert (tmp_path / "fast-files" / "best.pt").read_bytes() == b"weights"
    shown = capsys.readouterr().out
    (table,) = (block.text for block in blocks(PAGE) if block.text.startswith("lr: 2 trainers"))
    for line in table.splitlines()[:2]:  # the head and the titles
        assert line.split() in [found.split() for found in shown.splitlines()]
    program, _ = (block.text for block in blocks(PAGE) if block.language == "py")
    exec(program, {})
    assert "done {'accuracy': 0.5} ['best.pt']" in capsys.readouterr().out
    assert (tmp_path / "best-trial" / "best.pt").is_file()


def test_the_keys_of_the_page_are_those_of_the_command(fake: FakeState, capsys: pytest.CaptureFixture[str]) -> None:
    (named,) = re.findall(r"`--json` has these keys: (.*?)\n\n", PAGE.read_text(), re.DOTALL)
    plain = re.sub(r"\(.*?\)", "", named, flags=re.DOTALL)
    assert run(["submit", "--name", "a", "--group", "g", "examples/digits.py"]) == 0
    capsys.readouterr()
    assert run(["results", "a", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == re.findall(r"`(\w+)`", plain)


def test_the_script_with_a_tracker_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    writer = SimpleNamespace(
        add_scalar=lambda name, value, step, walltime: logged.append((name, step)),
        flush=lambda: None,
        close=lambda: logged.append("close"),
    )
    for name, contents in (("tensorboard", {}), ("torch.utils.tensorboard", {"SummaryWriter": lambda **_: writer})):
        module = ModuleType(name)
        module.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment] # what find_spec looks at
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "bftrainer.elastic.torch.tracking.tensorboard_writer", raising=False)
    monkeypatch.setenv("BFTRAINER_OUTPUT", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    _, script = (block.text for block in blocks(PAGE) if block.language == "py")
    try:
        exec(script, {})
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [step for name, step in logged[:-1] if name == "loss"] == list(range(1, 49))
    assert [step for name, step in logged[:-1] if name == "epoch_loss"] == [16, 32, 48]
    assert logged[-1] == "close"
