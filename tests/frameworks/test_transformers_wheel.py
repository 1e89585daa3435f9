"""The wheel in an environment outside of the clone, as docs/environment.md walks: a Trainer's script loses a node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.docs.pages import DOCS, ROOT, blocks
from support.waiting import wait_until

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("hatchling")

pytestmark = pytest.mark.waits

NAME = "train_gpt2.py"
PACE = "1:1,2:0.2"
"""A first node alone is slow, so that others come before it is done, however busy the machine is."""


class OwnEnvironment:
    """A virtual environment with the wheel, and a project folder beside it. Other packages are those of the tests."""

    def __init__(self, folder: Path) -> None:
        self._bin = folder / "my-env" / "bin"
        self.project = folder / "project"
        self.project.mkdir()
        wheels, quiet = folder / "dist", ["--quiet", "--disable-pip-version-check", "--no-deps"]
        here = [sys.executable, "-m"]
        subprocess.run([*here, "pip", "wheel", *quiet, "--no-build-isolation", "-w", wheels, ROOT], check=True)
        subprocess.run([*here, "venv", "--without-pip", self._bin.parent], check=True)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(self._bin.parent)}))
        # As plain paths: the editable installation of the clone, which is a .pth file in one of them, is left out.
        others = [path for path in sys.path if path.endswith("site-packages")]
        (site / "others.pth").write_text("\n".join(others))
        (wheel,) = wheels.iterdir()
        own = [self._bin / "python", "-m", "pip", "install", *quiet, "--ignore-installed", "--no-index", wheel]
        subprocess.run(own, check=True)
        dropped = ("BFTRAINER_", "PYTEST_", "PYTHONPATH")
        self._env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        self._env |= {"BFTRAINER_STATE": str(folder / "state"), "OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([self._bin / "bftrainer", *arguments], cwd=self.project, env=self._env)

    def call(self, *arguments: str) -> str:
        command = [self._bin / "bftrainer", *arguments]
        done = subprocess.run(
            command, cwd=self.project, env=self._env, stdout=subprocess.PIPE, text=True, timeout=300, check=True
        )
        return done.stdout

    def python(self, code: str) -> str:
        command = [self._bin / "python", "-c", code]
        done = subprocess.run(command, cwd=self.project, env=self._env, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[OwnEnvironment]:
    own = OwnEnvironment(tmp_path)
    controller = own.start("serve", "--nodes", "3", "--port", "0")
    try:
        wait_until(lambda: (tmp_path / "state" / "client.json").exists(), "the controller", 60)
        yield own
    finally:
        controller.send_signal(signal.SIGTERM)
        controller.wait(60)


def test_a_trainer_from_the_wheel_loses_a_node_and_completes(environment: OwnEnvironment, tmp_path: Path) -> None:
    installed = environment.python("import bftrainer; print(bftrainer.__file__)")
    assert installed.startswith(str(tmp_path)), f"{installed} is not from the wheel"
    (script,) = (block.text for block in blocks(DOCS / "huggingface.md") if block.title == NAME)
    (environment.project / NAME).write_text(script)
    assert json.loads(environment.call("submit", "--explain", "--json", NAME))["way"] == "elastic"
    environment.call("submit", "--nodes", "1-3", "--name", "mine", "--env", f"BFTRAINER_PACE={PACE}", NAME)

    def trains_together() -> list[dict[str, Any]]:
        trainer = json.loads(environment.call("status", "mine", "--json"))
        assert trainer["state"] not in ("done", "failed", "cancelled"), trainer
        workers: list[dict[str, Any]] = [worker for worker in trainer["workers"] if worker["state"] == "training"]
        return workers if len(workers) > 1 and trainer["step"] > 5 else []

    worker, *_ = wait_until(trains_together, "a training on several nodes", 120, longest_s=0.5)
    os.kill(worker["pid"], signal.SIGKILL)
    environment.call("wait", "mine")
    results = json.loads(environment.call("results", "mine", "--json"))
    assert (results["state"], results["step"]) == ("done", 128)
    assert (environment.project / "gpt2" / "final" / "model.safetensors").exists()
