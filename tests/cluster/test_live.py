"""The live system end to end: a real controller, real agents on virtual nodes, real PyTorch."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

from bftrainer.cli.main import run
from bftrainer.cluster.config.keys import Config
from bftrainer.cluster.config.policy import policy_of
from bftrainer.cluster.report.rerun import KINDS, check
from bftrainer.cluster.store.store import FILE, Store
from live_prediction import EPOCHS, SAMPLES, measure
from support.cluster.live import Live, gone
from support.elastic.ledger import committed
from support.waiting import wait_until

pytest.importorskip("torch")

pytestmark = pytest.mark.waits

WORKER = Path(__file__).resolve().parents[1] / "elastic" / "chaos_worker.py"


def bftrainer(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """The command line, as a user calls it. Only `serve` gets a process of its own: a start takes half a second."""
    env = {"BFTRAINER_STATE": str(folder), "COLUMNS": "120"}
    if args[0] == "serve":
        argv = [sys.executable, "-m", "bftrainer", *args]
        return subprocess.run(argv, env=os.environ | env, capture_output=True, text=True, timeout=120, check=False)
    with mock.patch.dict(os.environ, env), redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = run(list(args))
    return subprocess.CompletedProcess(args, status, out.getvalue(), err.getvalue())


def test_training_goes_on_while_the_controller_is_killed_and_comes_back(tmp_path: Path) -> None:
    home = tmp_path / "job"
    home.mkdir()
    with Live(tmp_path / "state", "--nodes", "3") as live:
        ref = live.submit(WORKER, str(home), "40", "0.1", nodes="1-3", name="steady")
        live.until_state(ref, "running")
        wait_until(lambda: len([w for w in live.trainer(ref)["workers"] if w["state"] == "training"]) == 3)
        before = live.until_steps(ref, 3)
        workers = {worker["worker"]: worker["pid"] for worker in before["workers"]}
        live.kill()
        lines = sum(path.read_text().count("commit") for path in home.glob("steps-*"))
        wait_until(
            lambda: sum(path.read_text().count("commit") for path in home.glob("steps-*")) > lines + 6,
            what="steps without a controller",
        )
        live.start()
        wait_until(lambda: {node["state"] for node in live.nodes()} == {"assigned"}, what="the agents' return")
        after = live.until_steps(ref)
        assert {worker["worker"]: worker["pid"] for worker in after["workers"]} == workers
        assert after["rescales"] == before["rescales"]
        done = live.until_state(ref, "done", "failed")
        assert (done["state"], done["samples"], done["total"]) == ("done", 24000, 24000)
        shown = bftrainer(live.folder, "logs", "steady", "--json")
        assert shown.returncode == 0
        assert live.problems() == []
        assert live.stop() == 0
    gone(live.pids | set(workers.values()))
    for counter in committed(home).values():
        assert counter == Counter(range(600))
    with Store.open(live.folder / FILE, read_only=True) as store:
        again = check(store.all_events(KINDS), policy_of(Config()))
    assert again.decisions > 0
    assert again.mismatches == ()


def test_the_simulator_predicts_what_a_paced_run_makes(tmp_path: Path) -> None:
    """`benchmarks/live_prediction.py` has a goal for how well; here a busy machine must not matter."""
    found = measure(tmp_path, 1, "local", torch=True)
    assert found["samples"] == 2 * EPOCHS["local"] * SAMPLES
    assert found["ratio"] > 0
    assert 0 < found["efficiency"] <= found["bound"] + 0.05


def test_what_a_user_does_wrong_is_one_clear_line(tmp_path: Path) -> None:
    state = tmp_path / "state"
    nobody = bftrainer(state, "status")
    assert nobody.returncode == 1
    assert "bftrainer serve" in nobody.stderr
    assert len(nobody.stderr.splitlines()) == 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        used = bftrainer(state, "serve", "--port", port)
        assert used.returncode == 1  # a service tries again: it may be free then
        assert f"port {port}" in used.stderr
        assert "in use" in used.stderr
    open_ = bftrainer(state, "serve", "--port", "0", "--host", "0.0.0.0", "--set", "api.tls=false")
    assert open_.returncode == 2
    assert "without tokens" in open_.stderr
    script = tmp_path / "at_once.py"
    script.write_text("import sys\nprint('about to go')\nsys.exit('no data in ./data')\n")
    with Live(state, "--nodes", "2", "--set", "trainers.restart_backoff_s=0.1") as live:
        twice = bftrainer(state, "serve", "--port", "0")
        assert twice.returncode == 1
        assert f"pid {live.pid}" in twice.stderr
        gone_ = bftrainer(state, "submit", "--nodes", "1-2", str(tmp_path / "none.py"))
        assert gone_.returncode == 2
        assert "none.py" in gone_.stderr
        upside = bftrainer(state, "submit", "--nodes", "4-2", str(script))
        assert upside.returncode == 2
        failed = bftrainer(state, "submit", "--nodes", "1-2", "--max-restarts", "2", "--wait", str(script))
        assert failed.returncode == 1
        assert "no data in ./data" in failed.stdout + failed.stderr
        row = live.trainer("at_once")
        assert row["state"] == "failed"
        assert row["failures"] in (2, 3)  # twice, if it was on two nodes
        assert f"({row['failures']} times" in row["reason"]
        assert "no data in ./data" in row["reason"]
        (state / "client.json").write_text(json.dumps({"url": live.api.address.url, "token": "bft_" + "x" * 40}))
        wrong = bftrainer(state, "status")
        assert wrong.returncode == 2
        assert "token" in wrong.stderr
        for problem in (twice, gone_, upside, wrong):
            assert len(problem.stderr.splitlines()) == 1
            assert "Traceback" not in problem.stderr


def test_pause_gives_the_nodes_back_and_resume_goes_on_from_there(tmp_path: Path) -> None:
    home = tmp_path / "job"
    home.mkdir()
    with Live(tmp_path / "state", "--nodes", "2") as live:
        ref = live.submit(WORKER, str(home), "20", "0.1", nodes="1-2")
        live.until_steps(ref, 10)
        assert bftrainer(live.folder, "pause").returncode == 0
        wait_until(lambda: not live.api.nodes(), what="an empty pool")
        assert live.trainer(ref)["state"] == "waiting"
        assert bftrainer(live.folder, "resume").returncode == 0
        done = live.until_state(ref, "done", "failed")
        assert (done["state"], done["samples"]) == ("done", 12000)
        agents = {node["agent_pid"] for node in live.nodes()}
        assert live.stop(signal.SIGINT) == 0
    gone(agents)
    for counter in committed(home).values():
        assert counter == Counter(range(600))


def test_a_worker_that_is_started_again_follows_the_others_before_it_joins(tmp_path: Path) -> None:
    home = tmp_path / "job"
    home.mkdir()
    (home / "limit").write_text("0")  # slow steps, until the newcomer has joined
    with Live(tmp_path / "state", "--nodes", "2") as live:
        ref = live.submit(WORKER, str(home), "4", "0.1", "--width=24000", nodes="1-2", name="large")
        before = live.until_steps(ref, 2)
        os.kill(before["workers"][1]["pid"], signal.SIGKILL)
        followed = "has followed the training"
        wait_until(lambda: followed in bftrainer(live.folder, "logs", "large").stdout, what="a newcomer that followed")
        (home / "hurry").touch()
        done = live.until_state(ref, "done", "failed")
        assert done["state"] == "done"
        assert live.problems() == []
        assert live.stop() == 0
    for counter in committed(home).values():
        assert counter == Counter(range(600))
