"""The scripts of docs/huggingface.md run as they are: alone, and on nodes of which one is killed."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from bftrainer.elastic.local.coordinator import Coordinator
from support.docs.pages import DOCS, blocks
from support.elastic.jobs import SETTINGS, play, run_alone

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.waits

SCRIPTS = {block.title: block.text for block in blocks(DOCS / "huggingface.md") if block.language == "py"}
FILES = {
    "train_gpt2.py": ("gpt2/checkpoint-128", "gpt2/final/model.safetensors"),
    "train_accelerate.py": tuple(f"checkpoints/epoch_{epoch}/model.safetensors" for epoch in range(4)),
}
LAST = {"train_gpt2.py": "128 steps, loss ", "train_accelerate.py": "epoch 3: error "}


async def lose_a_node(job: Coordinator) -> None:
    """Begin on three nodes, kill one that trains, and have another one join."""
    await job.add(3)
    await job.until(lambda: len(job.members) >= 2, what="training on two nodes")
    victim = job.members[0]
    await job.until(lambda: (report := job.report(victim)) is not None and report.step >= 5, what="a few steps")
    job.signal(victim, signal.SIGKILL)
    await job.until(lambda: victim not in job.members, what="training without the node")
    await job.add(1)


def test_the_page_has_the_scripts_that_are_tested() -> None:
    assert SCRIPTS.keys() == FILES.keys() == LAST.keys()


@pytest.mark.parametrize("name", FILES)
def test_a_script_runs_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(SCRIPTS[name])
    assert LAST[name] in run_alone(tmp_path, name)
    assert [path for path in FILES[name] if not (tmp_path / path).exists()] == []


@pytest.mark.parametrize("name", FILES)
def test_a_script_runs_while_nodes_come_and_go(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_text(SCRIPTS[name])
    monkeypatch.chdir(tmp_path)
    settings = replace(SETTINGS, environment={"BFTRAINER_PACE": "1:0.5,2:0.1"})
    assert play(lose_a_node, tmp_path, [name], settings=settings).status == "done"
    assert [path for path in FILES[name] if not (tmp_path / path).exists()] == []
    assert any(LAST[name] in log.read_text() for log in (tmp_path / "logs").glob("*.log"))
