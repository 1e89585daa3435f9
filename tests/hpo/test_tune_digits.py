"""The example that tunes the digits CNN: real training on nodes that churn, with a controller that is killed midway."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bftrainer.hpo.watch import DRIVER
from support.cluster.live import EXAMPLES, Live
from support.waiting import wait_until

optuna = pytest.importorskip("optuna")
pytest.importorskip("torch")
pytest.importorskip("sklearn")

pytestmark = pytest.mark.waits

TRIALS = 3


def test_the_example_tunes_through_churn_and_restarts_of_driver_and_controller(tmp_path: Path) -> None:
    churn = tmp_path / "churn.txt"
    churn.write_text("4 leave node-3\n7 join node-3\n9 kill node-2\n12 join node-2\n")
    storage = f"sqlite:///{tmp_path}/study.db"
    argv = [sys.executable, str(EXAMPLES / "tune_digits.py"), "--storage", storage, "--study", "few"]
    argv += ["--trials", str(TRIALS), "--epochs", "5", "--max-parallel", "3", "--seed", "0"]
    options = ("--nodes", "3", "--set", f"pool.churn={churn}", "--set", "pool.loop=true")
    with Live(tmp_path / "state", *options) as live:
        env = {**os.environ, "BFTRAINER_STATE": str(live.folder), "PYTHONUNBUFFERED": "1"}

        def drive() -> subprocess.Popen[str]:
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            return subprocess.Popen(argv, env=env, cwd=tmp_path, **streams)  # type: ignore[call-overload,no-any-return]

        first = drive()
        try:
            wait_until(
                lambda: [row for row in live.api.trainers() if row["state"] == "running"], what="a trial that runs"
            )
        finally:
            first.kill()
            first.communicate()
        second = drive()

        def at_work() -> bool:
            found = optuna.load_study(study_name="few", storage=storage).user_attrs.get(DRIVER)
            return bool(found) and found["pid"] == second.pid

        try:
            wait_until(at_work, what="the second driver")
            wait_until(
                lambda: [row for row in live.api.trainers() if row["state"] == "done"], what="a trial that is done"
            )
            live.kill()
            live.start()
            out, err = second.communicate(timeout=120)
        finally:
            second.kill()
            second.communicate()
        assert second.returncode == 0, err
        assert "Traceback" not in err
        rows = live.api.trainers(all=True)
        # The doctor examines a controller in operation: nothing may be left inconsistent by the restarts.
        assert live.problems() == []
    study = optuna.load_study(study_name="few", storage=storage)
    assert len(study.trials) == TRIALS == len(rows)
    assert {trial.state.name for trial in study.trials} <= {"COMPLETE", "PRUNED"}
    assert {row["name"] for row in rows} == {trial.user_attrs["bftrainer:name"] for trial in study.trials}
    assert {row["group"] for row in rows} == {"few"}
    assert study.best_value >= 0.9  # how good it gets with more trials, benchmarks and the documentation say
    assert f"best trial: {study.best_trial.number} with accuracy {study.best_value:.2%}" in out
    held = re.search(r"they held [\d.]+ of [\d.]+ idle node-hours \((\d+)%\)", out)
    assert held is not None
    assert 0 < int(held[1]) <= 101
