"""docs/sweeps.md is true: its sweep is one, and its commands and programs run as shown, against a fake controller."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from bftrainer.cli.main import run
from support.cluster.fake_api import TOKEN, FakeState, make_app, serving

optuna = pytest.importorskip("optuna")

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "sweeps.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeState]:
    """A controller in whose eyes time passes when it is asked, for scripts in the working folder."""
    for name in ("BFTRAINER_URL", "BFTRAINER_TOKEN", "BFTRAINER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BFTRAINER_STATE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "train.py").write_text("print('hello')\n")
    fake = FakeState()

    def on_ask(path: str) -> None:
        for row in fake.trainers.values():
            if row["state"] in ("queued", "running"):
                row.update(state="running", epoch=row["epoch"] + 1, metrics={"accuracy": 0.5})
                row["state"] = "done" if row["epoch"] > 3 else "running"

    with serving(make_app(fake)) as url:
        (tmp_path / "client.json").write_text(json.dumps({"url": url, "token": TOKEN}))
        fake.on_ask = on_ask
        yield fake


def test_the_commands_run(fake: FakeState, tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    (tmp_path / "grid.yaml").write_text(text)
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("bftrainer ")]
    assert len(commands) >= 3
    for command in commands:
        if "status" in command:  # the fake one does not know groups
            for spec, row in zip(fake.specs, fake.trainers.values(), strict=True):
                row.update(group=spec["group"], params=spec["params"])
        assert run(shlex.split(command)[1:]) == 0, command
    assert len(fake.specs) == 6
    assert fake.specs[5]["args"] == ["--epochs", "3", "--lr", "5e-3", "--batch-size", "64"]


def test_the_programs_run(fake: FakeState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    study, client = blocks("py")
    exec(study.replace("n_trials=50", "n_trials=5"), {})
    out = capsys.readouterr().out
    assert "{'lr': " in out
    assert "5 trials complete" in out
    exec(client, {})
    assert "4 {'accuracy': 0.5}" in capsys.readouterr().out
    optuna.logging.set_verbosity(optuna.logging.INFO)
