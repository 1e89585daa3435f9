"""benchmarks/live_prediction.py in its parts: the changes of its pool, its figures, and the worker without PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import live_prediction


@pytest.mark.parametrize("seed", range(10))
def test_some_node_is_always_there_and_a_seed_always_gives_the_same_changes(seed: int) -> None:
    lines = live_prediction.churn_of(seed)
    assert lines == live_prediction.churn_of(seed)
    here = {"node-1", "node-2"}  # those of a schedule whose first change is not before the run
    for at_s, kind, node in (line.split() for line in lines):
        assert float(at_s) >= 0
        here = here | {node} if kind == "join" else here - {node}
        assert here


def test_the_error_is_the_mean_of_the_differences_whatever_their_signs() -> None:
    found = live_prediction.summary([{"ratio": 0.98}, {"ratio": 1.03}], 0.03)
    assert (found["mean_absolute_error"], found["most"], found["met"]) == (0.025, 0.03, True)
    assert not live_prediction.summary([{"ratio": 0.96}], 0.03)["met"]


@pytest.mark.waits
def test_the_worker_without_pytorch_makes_each_sample_once(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "bftrainer.elastic.run", "--nodes", "1-2", "--no-warm", "--quiet", "--json"]
    argv += [str(live_prediction.PLAIN), str(tmp_path), "1000", "48"]
    env = {**os.environ, "BFTRAINER_PACE": "0.01"}
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, check=True, timeout=120)
    found = json.loads(done.stdout)
    assert (found["status"], found["samples"], found["steps"]) == ("done", 1000, 21)
