"""`bftrainer demo`: a short one, cut off before its trainers are done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

pytestmark = pytest.mark.waits


def test_a_short_demo_tells_what_came_of_it_and_leaves_its_state_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    argv = [sys.executable, "-m", "bftrainer", "demo", "--nodes", "2", "--seed", "9", "--seconds", "25"]
    argv += ["--folder", str(folder)]
    done = subprocess.run([*argv, "--json"], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    summary = json.loads(done.stdout)
    unfinished = [row["name"] for row in summary["trainers"] if row["state"] != "done"]
    assert done.returncode == bool(unfinished), done.stderr
    assert {row["name"] for row in summary["trainers"]} == {"digits", "images", "chars"}
    assert summary["joins"] >= 1
    assert summary["decisions"] >= 1
    assert set(summary["judgement"]) >= {"efficiency", "bound", "equal", "simulated"}
    again = subprocess.run([*argv, "--json"], capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 2
    assert "exists already" in again.stderr
    env = {**os.environ, "BFTRAINER_STATE": str(folder)}
    doctor = [sys.executable, "-m", "bftrainer", "doctor", "--json"]
    assert subprocess.run(doctor, env=env, capture_output=True, timeout=60, check=False).returncode == 0
