"""The commands of the live system against a fake API on a loopback port."""

from __future__ import annotations

import json
import re
import socket
import sqlite3
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bftrainer.cli.common import connection
from bftrainer.cli.live import watch
from bftrainer.cli.main import run
from bftrainer.client import client
from bftrainer.cluster.spec.files import load_curve
from support.cluster.fake_api import NOW, TOKEN, FakeState, make_app, serving
from support.explained import SCRIPTS

Call = Callable[..., SimpleNamespace]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command in a home of its own; its exit status and what it printed."""
    for name in ("BFTRAINER_URL", "BFTRAINER_TOKEN", "BFTRAINER_CONFIG", "COLUMNS", "VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BFTRAINER_STATE", str(tmp_path / "state"))
    resting(monkeypatch, lambda: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "state").mkdir(mode=0o700)

    def call(*args: object) -> SimpleNamespace:
        status = run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return SimpleNamespace(status=status, out=out, err=err)

    return call


def resting(monkeypatch: pytest.MonkeyPatch, rest: Callable[[], None]) -> None:
    """Has the commands call this instead of sleeping."""

    def sleep(seconds: float) -> None:
        time.sleep(0.01)
        rest()

    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=sleep, time=time.time))


@pytest.fixture
def fake(tmp_path: Path, call: Call) -> Iterator[FakeState]:
    """A controller that the commands find through the state folder."""
    fake = FakeState()
    with serving(make_app(fake)) as url:
        (tmp_path / "state" / "client.json").write_text(json.dumps({"url": url, "token": TOKEN}))
        yield fake


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


def assert_refused(answer: SimpleNamespace, said: str, status: int = 2) -> None:
    """One clear line on stderr, nothing on stdout."""
    assert answer.status == status, answer.err
    assert said in answer.err
    assert answer.err.startswith("bftrainer: ")
    assert answer.err.count("\n") == 1
    assert answer.out == ""


# submit


def test_submit_passes_everything_after_the_script_on(fake: FakeState, call: Call, script: Path) -> None:
    answer = call("submit", "--nodes", "1-8", "--name", "d", "train.py", "--nodes", "3", "-m", "x", "--", "--json")
    assert (answer.status, answer.out) == (0, "submitted t1 d\n")
    (spec,) = fake.specs
    assert spec["args"] == ["--nodes", "3", "-m", "x", "--", "--json"]
    assert (spec["script"], spec["cwd"]) == (str(script), str(script.parent))
    assert (spec["min_nodes"], spec["max_nodes"]) == (1, 8)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("mnist.py", "Add the lines for elastic.prepare; `bftrainer submit --explain train.py` says how"),
        ("torchrun_tutorial.py", "Submit it with --launcher ddp"),
    ],
)
def test_submit_hints_at_the_right_way_and_queues_the_script_all_the_same(
    fake: FakeState, call: Call, script: Path, source: str, words: str
) -> None:
    script.write_text((SCRIPTS / source).read_text())
    answer = call("submit", "train.py")
    assert (answer.status, answer.out) == (0, "submitted t1 train\n")
    assert words in answer.err
    assert answer.err.startswith("bftrainer: warning: train.py ")
    unwrapped = "train.py:22: the model is not wrapped in DistributedDataParallel, so it may go on with" in (
        call("submit", "--launcher", "ddp", "--name", "other", "train.py").err
    )
    assert unwrapped == (source == "mnist.py")
    fine = ("from bftrainer import elastic\nelastic.prepare()\n", "print('no training')\n")
    for number, text in enumerate(fine):
        script.write_text(text)
        assert call("submit", "--name", f"fine-{number}", "train.py").err == ""


def test_submit_says_which_of_its_options_are_passed_to_the_script(fake: FakeState, call: Call, script: Path) -> None:
    script.write_text("from bftrainer import elastic\nelastic.prepare()\n")
    said = call("submit", "train.py", "--nodes=1-3", "--wait", "--lr", "1").err
    assert "passed to the script, because it stands after it: --nodes, --wait. Options of submit come before it" in said
    assert fake.specs[0]["args"] == ["--nodes=1-3", "--wait", "--lr", "1"]
    script.write_text("from bftrainer import elastic\nelastic.prepare()\nparser.add_argument('--nodes')\n")
    assert call("submit", "--name", "own", "train.py", "--nodes", "3").err == ""


def test_submit_runs_a_module_as_python_does(fake: FakeState, call: Call) -> None:
    assert call("submit", "--nodes=2", "--weight", "2", "-m", "pkg.train", "--json", "-m").out == "submitted t1 train\n"
    assert (fake.specs[0]["script"], fake.specs[0]["args"]) == ("-m pkg.train", ["--json", "-m"])
    assert_refused(call("submit", "--nodes", "2", "--name", "-m", "x.py"), "name must be 1 to 64 letters")
    assert_refused(call("submit", "-m"), "-m must be followed by the name of a module")


def test_submit_sends_every_option(
    fake: FakeState, call: Call, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.csv").write_text("1,100\n4,350\n")
    monkeypatch.setenv("KEY_OF_MINE", "s3cret")
    options = ["--weight", "2", "--env", "A=b=c", "--env", "KEY_OF_MINE", "--cwd", "state", "--python", sys.executable]
    options += ["--launcher", "torchrun", "--curve", "c.csv", "--up-s", "3", "--down-s", "0", "--work", "1000"]
    options += ["--model", "cnn", "--max-restarts", "0", "--ranks-per-node", "4"]
    answer = call("submit", *options, "--json", "train.py")
    assert json.loads(answer.out)["id"] == "t1"
    (spec,) = fake.specs
    assert spec["env"] == {"A": "b=c", "KEY_OF_MINE": "s3cret"}
    assert spec["curve"] == {"nodes": [0, 1, 4], "rates": [0, 100, 350]}
    assert (spec["up_s"], spec["down_s"], spec["work"], spec["max_restarts"]) == (3, 0, 1000, 0)
    assert (spec["cwd"], spec["launcher"], spec["model"]) == (str(tmp_path / "state"), "torchrun", "cnn")
    assert spec["ranks_per_node"] == 4


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nothing.py"], "nothing.py: script must be a file, but there is nothing of that name"),
        (["trian.py"], "did you mean 'train.py'?"),
        (["--nodes", "8-1", "train.py"], "nodes must be a range from the least to the most"),
        (["--weight", "-1", "train.py"], "weight must be a number above 0, but got -1"),
        (
            ["--ranks-per-node", "many", "train.py"],
            "ranks_per_node must be a whole number from 1 to 256, or gpu for one per GPU of the node, but got 'many'",
        ),
        (["--spec", "job.toml", "--ranks-per-node", "2"], "--ranks-per-node cannot be combined with --spec"),
        (["--env", "NOT_SET_ANYWHERE", "train.py"], "'NOT_SET_ANYWHERE' is not set"),
        (["--launcher", "mpi", "train.py"], "launcher must be one of elastic, ddp, torchrun, hosts, but got 'mpi'"),
        (["--python", "/no/python", "train.py"], "/no/python: python must be an interpreter"),
        (["--curve", "no.csv", "train.py"], "no.csv: No such file"),
        (["broken.py"], "broken.py:1: script must be Python"),
        (["--spec", "job.toml"], "job.toml: unknown key 'nodez': did you mean 'nodes'?"),
        (["--spec", "job.toml", "--nodes", "4"], "--nodes cannot be combined with --spec: set it in job.toml"),
        (["--spec", "job.toml", "train.py"], "either a script or --spec FILE"),
        ([], "either a script or --spec FILE"),
        (["--nodse", "4", "train.py"], "No such option"),
    ],
)
def test_a_wrong_submission_is_refused_before_it_is_sent(
    call: Call, script: Path, tmp_path: Path, args: list[str], said: str
) -> None:
    (tmp_path / "broken.py").write_text("def\n")
    (tmp_path / "job.toml").write_text('script = "train.py"\nnodez = 4\n')
    assert_refused(call("submit", *args), said)  # there is no controller here to ask


def test_submit_takes_a_file_of_trainers(fake: FakeState, call: Call, script: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text(
        "defaults: {script: train.py}\ntrainers: [{name: a, nodes: 4}, {name: b, nodes: 1-2}]"
    )
    answer = call("submit", "--spec", "jobs.yaml")
    assert answer.out == "submitted t1 a\nsubmitted t2 b\n"


def test_of_a_file_the_trainers_before_a_refused_one_are_named(
    fake: FakeState, call: Call, script: Path, tmp_path: Path
) -> None:
    fake.add(name="b")
    (tmp_path / "jobs.yaml").write_text("trainers: [{name: a, script: train.py}, {name: b, script: train.py}]")
    answer = call("submit", "--spec", "jobs.yaml")
    assert answer.status == 1
    assert "b: there is a trainer called 'b' already; submitted before it: t2" in answer.err


def test_submit_says_which_interpreter_it_was_called_with(
    fake: FakeState, call: Call, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # PyTorch is installed here
    call("submit", "--name", "a", "train.py")
    call("submit", "--name", "b", "--python", sys.executable, "train.py")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # an environment for commands only
    call("submit", "--name", "c", "train.py")
    assert [spec.get("submitted_python") for spec in fake.specs] == [sys.executable, None, None]
    assert [spec["python"] for spec in fake.specs] == ["", sys.executable, ""]


def test_a_controller_that_does_not_know_the_callers_interpreter_is_not_told_of_it(
    fake: FakeState, call: Call, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    fake.unknown = ("submitted_python",)
    assert call("submit", "train.py").out == "submitted t1 train\n"
    assert "submitted_python" not in fake.specs[0]


def environment(folder: Path, *packages: str) -> Path:
    """A virtual environment of a few lines: its interpreter says that it has these packages."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho {' '.join(packages)}\n")
    python.chmod(0o755)
    return python


@pytest.mark.waits
@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_submit_uses_the_interpreter_of_the_active_environment(
    variable: str, fake: FakeState, call: Call, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = environment(tmp_path / "mine", "torch", "bftrainer")
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "base"))  # a virtual environment comes first
    monkeypatch.setenv(variable, str(tmp_path / "mine"))
    assert call("submit", "--name", "a", "train.py").err == ""
    assert call("submit", "--name", "b", "--python", sys.executable, "train.py").err == ""
    assert call("submit", "--name", "c", "--python", "agent", "train.py").err == ""
    (tmp_path / "grid.yaml").write_text("script: train.py\ngrid: {lr: [1, 2]}")
    assert call("submit", "--array", "grid.yaml").err == ""
    chosen = [(spec["python"], spec.get("submitted_python")) for spec in fake.specs]
    assert chosen == [("", str(python)), (sys.executable, None), ("", None), *[("", str(python))] * 2]


@pytest.mark.waits
def test_an_active_environment_that_cannot_run_the_script_is_named(
    fake: FakeState, call: Call, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # PyTorch is installed here
    environment(tmp_path / "empty")
    for number, name in enumerate(("empty", "missing")):
        monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / name))
        said = call("submit", "--name", f"a{number}", "train.py").err
        assert f"{tmp_path / name} is active, but has no PyTorch: the script runs under {sys.executable}" in said
        assert fake.specs[-1]["submitted_python"] == sys.executable
    python = environment(tmp_path / "mine", "torch")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "mine"))
    answer = call("submit", "--name", "b", "train.py")
    assert_refused(answer, f"has no BFTrainer, which an elastic script imports: install it there with `{python} -m pip")
    assert call("submit", "--name", "c", "--launcher", "torchrun", "train.py").err == ""
    assert fake.specs[-1]["submitted_python"] == str(python)
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    assert call("submit", "--name", "d", "train.py").err == ""
    assert fake.specs[-1]["submitted_python"] == sys.executable


@pytest.mark.waits
def test_a_newer_interpreter_may_know_a_newer_syntax(
    fake: FakeState, call: Call, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text("match = 1 match 2\n")
    assert_refused(call("submit", "train.py"), "train.py:1: script must be Python")
    environment(tmp_path / "newer", "torch", "bftrainer")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "newer"))
    assert call("submit", "train.py").status == 0


def test_submit_says_what_the_controller_refuses(fake: FakeState, call: Call, script: Path) -> None:
    fake.add(name="train")
    assert_refused(call("submit", "train.py"), "there is a trainer called 'train' already")
    fake.refuse = (507, "the disk is full: free some space in /state")
    assert_refused(call("submit", "train.py"), "the disk is full", status=1)


def ending(fake: FakeState, *states: str) -> None:
    """Has the first trainer go through states, one a question."""
    left = list(states)

    def step(path: str) -> None:
        if path == "/v1/trainers/t1" and left:
            fake.trainers["t1"]["state"] = left.pop(0)

    fake.on_ask = step


def test_submit_can_wait_for_the_end(fake: FakeState, call: Call, script: Path) -> None:
    ending(fake, "starting", "running", "rescaling", "running", "done")
    answer = call("submit", "--wait", "train.py")
    assert answer.status == 0
    states = [line.split()[2] for line in answer.out.splitlines()[1:]]
    assert states == ["starting", "running", "rescaling", "running", "done"]


def test_submit_and_wait_tell_of_a_failure_with_its_last_lines(fake: FakeState, call: Call, script: Path) -> None:
    ending(fake, "queued", "running", "failed")
    fake.add(name="x", reason="exited with status 3", log_tail=["Boom: \x1b[31mno data\x1b[0m"])
    answer = call("wait", "x")
    assert answer.status == 1
    assert "t1 x failed: exited with status 3" in answer.out
    assert answer.err == "  Boom: no data\n"


# finding the controller


def test_without_a_controller_one_line_says_so(call: Call, tmp_path: Path) -> None:
    for command in (["status"], ["nodes"], ["events", "-f"], ["logs", "t1"], ["cancel", "t1"], ["pause"], ["watch"]):
        assert_refused(call(*command), "no controller is known in", status=1)


def test_a_controller_that_is_gone_is_named_with_the_file_that_named_it(call: Call, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = tmp_path / "state" / "client.json"
    client.write_text(json.dumps({"url": f"http://127.0.0.1:{port}", "token": TOKEN}))
    said = f"no controller answers at http://127.0.0.1:{port} (from {client}): "
    assert_refused(call("status"), said + "ask its operator whether it runs", 1)
    client.with_name("bftrainer.db").touch()
    assert_refused(call("status"), said + "start one with", 1)
    assert_refused(call("watch", "--json"), "start one with `bftrainer serve`", 1)
    client.write_text('{"url": 3')
    assert_refused(call("status"), f"{client} is damaged", 1)


def test_a_wrong_token_is_one_line(fake: FakeState, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BFTRAINER_TOKEN", "bft_wrong")
    assert_refused(call("status"), "does not know this token: set BFTRAINER_TOKEN")
    monkeypatch.setenv("BFTRAINER_TOKEN", "bft_\u2603")
    assert_refused(call("status"), "must be a token as `bftrainer token create` prints it")


def test_the_token_of_the_state_folder_goes_to_no_other_controller(
    fake: FakeState, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = json.loads((tmp_path / "state" / "client.json").read_text())["url"]
    assert call("status", "--url", url + "/").status == 0
    assert_refused(call("status", "--url", url.replace("127.0.0.1", "localhost")), "requires a token")
    monkeypatch.setenv("BFTRAINER_URL", url)
    monkeypatch.setenv("BFTRAINER_TOKEN", TOKEN)
    assert call("status", "--state", "nowhere").status == 0
    assert_refused(call("status", "--url", "ftp://x"), "--url: must be a URL such as")


def test_something_else_on_that_port_is_told_apart(call: Call, tmp_path: Path) -> None:
    async def other(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"<html>"})

    with serving(other) as url:
        assert_refused(call("status", "--url", url), "is not a BFTrainer controller", 1)


def test_a_missing_package_is_named_with_what_installs_it(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("bftrainer.client")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "httpx", None)
    assert_refused(call("status"), "the live system needs the package httpx: pip install 'bftrainer[live]'", 1)


def test_waiting_survives_a_restart_of_the_controller(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = FakeState(), FakeState()
    first.add(state="running")
    second.add(state="done")
    path = tmp_path / "state" / "client.json"
    with serving(make_app(second)) as there, connection.connect(None, None) as client:
        with serving(make_app(first)) as url:
            path.write_text(json.dumps({"url": url, "token": TOKEN}))
            assert client.trainer("t1")["state"] == "running"
        resting(monkeypatch, lambda: path.write_text(json.dumps({"url": there, "token": TOKEN})))
        assert client.trainer("t1")["state"] == "done"
    assert "bftrainer: warning: no controller answers" in capsys.readouterr().err


# status, nodes, events


@pytest.fixture
def busy(fake: FakeState) -> FakeState:
    fake.add(
        name="digits", state="running", nodes=["node-1", "node-2"], samples=400, total=1000, progress=0.4, rate=1234.5,
        eta_s=145, metrics={"loss": 0.125}, rescales=3, preemptions=1, up_s=0.25,
        spec={"script": "/x/train.py", "args": ["--lr", "1"], "env": {"KEY": "s3cret"}},
        curve={"nodes": [0, 1, 2, 4], "rates": [0, 600, 1200, 2200], "measured": {"1": 600, "2": 1200}, "prior": None},
        pauses={"count": 3, "median_s": 0.18, "pause_s": 0.18, "form_s": 0.05, "sync_s": 0.03},
        workers=[{"worker": "t1-1", "node": "node-1", "state": "training", "pid": 4242}], log_tail=["epoch 3"],
    )  # fmt: skip
    fake.add(name="a" * 64, state="waiting", reason="no nodes", samples=9_999_999, min_nodes=100, max_nodes=1000)
    for n in (1, 2, 3):
        trainer = "digits" if n < 3 else None
        row = {"node": f"node-{n}", "host": "127.0.0.1", "state": "assigned" if trainer else "free"}
        row |= {"trainer": trainer, "worker": f"t1-{n}", "since": NOW, "agent_pid": 1, "heard_s": 0.5}
        fake.nodes.append(row)
    fake.event("node.joined", node="node-1", host="127.0.0.1", agent="x")
    fake.event("decision", reasons=["digits grows 1 -> 2", "rest waits"])
    fake.event("rescale", trainer="t1", world_before=1, world=2, pause_s=0.125, why="grow", generation=2)
    fake.event("trainer.state", trainer="t2", **{"from": "running", "to": "waiting", "reason": "no nodes"})
    return fake


@pytest.mark.parametrize("width", [80, 120])
def test_status_fits_the_terminal(busy: FakeState, call: Call, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    answer = call("status")
    assert answer.status == 0
    assert max(map(len, answer.out.splitlines())) <= width
    row = next(line for line in answer.out.splitlines() if line.startswith("t1"))
    assert row.split()[:4] == ["t1", "digits", "running", "2/1-8"]
    assert all(text in row for text in ("40%", "1,234", "2m25s"))
    assert ("loss 0.125" in row) == (width == 120)
    assert "waiting: no nodes" in " ".join(answer.out.split())
    assert "2 of 3 nodes used" in answer.out
    assert "digits grows 1 -> 2; rest waits" in " ".join(answer.out.split())


@pytest.mark.parametrize("width", [40, 60, 80, 108, 120, 200])
def test_many_metrics_cut_neither_the_name_nor_the_state(
    busy: FakeState, call: Call, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    busy.trainers["t1"]["metrics"] = {f"validation_accuracy_of_class_{number}": 0.5 for number in range(20)}
    monkeypatch.setenv("COLUMNS", str(width))
    lines = call("status").out.splitlines()
    row = next(line for line in lines if line.startswith("t1"))
    assert row.split()[:4] == ["t1", "digits", "running", "2/1-8"]
    assert len(row) <= width
    assert ("validation_acc" in row) == (width >= 108)
    assert any(line.split()[:3] == ["id", "name", "state"] for line in lines)


def test_a_pool_that_fails_and_a_loss_that_is_no_number_are_told(busy: FakeState, call: Call) -> None:
    assert "problem" not in call("status").out
    busy.problem = "/bin/false ended with status 1"
    busy.trainers["t1"]["metrics"] = {"loss": None}
    assert "the pool has a problem: /bin/false ended with status 1" in call("status").out
    assert "loss not finite" in call("status", "digits").out


def test_snapshots_that_are_taken_less_often_than_asked_for_are_shown(busy: FakeState, call: Call) -> None:
    assert "each stops training" not in call("status", "digits").out
    busy.trainers["t1"]["snapshots"] = {"step": 1200, "every_s": 240.0, "stall_s": 2.4}
    said = " ".join(call("status", "digits").out.split())
    assert "snapshots every 240 s, each stops training for 2.4 s; the last is of step 1,200" in said
    busy.trainers["t1"]["snapshots"]["step"] = None
    assert "the last is of step" not in call("status", "digits").out


def test_what_a_pause_is_spent_on_is_shown(busy: FakeState, call: Call) -> None:
    assert "median pause 0.18 s (form 0.05 s, sync 0.03 s)" in " ".join(call("status", "digits").out.split())
    busy.trainers["t1"]["pause_parts"] = {"wait": 0.1, "form": 0.05, "catch_up": 0.02, "copy": 0.0, "send": 0.01}
    said = " ".join(call("status", "digits").out.split())
    assert "median pause 0.18 s (wait 0.1 s, form 0.05 s, catch up 0.02 s, copy 0 s, send 0.01 s)" in said


def test_what_a_new_worker_spends_its_time_on_is_shown(busy: FakeState, call: Call) -> None:
    assert "to the first step" not in call("status", "digits").out
    busy.trainers["t1"]["start_parts"] = {"start": 0.02, "imports": 9.0, "first_step": 0.5}
    said = " ".join(call("status", "digits").out.split())
    assert "start 9.52 s to the first step: start 0.02 s, imports 9 s, first step 0.5 s" in said


def test_modules_to_preload_are_submitted(fake: FakeState, call: Call, script: Path) -> None:
    call("submit", "--preload", "models,data.loaders", str(script))
    assert fake.specs[-1]["preload"] == ["models", "data.loaders"]


def test_a_deadline_that_has_passed_is_taken_with_a_warning(fake: FakeState, call: Call, script: Path) -> None:
    late = call("submit", "--deadline", "2020-01-01T00:00", str(script))
    assert "warning: the deadline 2020-01-01 00:00:00 UTC has passed already" in late.err
    assert fake.specs[-1]["deadline"] == 1577836800
    assert "deadline" not in call("submit", "--deadline", "12h", str(script)).err


def test_the_same_reason_is_told_once(fake: FakeState, call: Call) -> None:
    for _ in range(5):
        fake.add(reason="waits for its turn")
    assert "job1 (t1) and 4 more queued: waits for its turn" in call("status").out
    assert call("status").out.count("its turn") == 1


def test_status_of_one_trainer_shows_the_learned_curve(busy: FakeState, call: Call) -> None:
    out = call("status", "digits").out
    assert "2     1,200 █████████████            ● measured, now" in out
    assert "4     2,200 ████████████████████████ ○ expected" in out
    assert "median pause 0.18 s (form 0.05 s, sync 0.03 s)" in out
    assert "KEY" in out
    assert "s3cret" not in out
    assert "epoch 3" in out


def test_status_shows_the_band_of_the_curve_and_the_stays_of_the_script(busy: FakeState, call: Call) -> None:
    band = {"low": [0, 590, 1100, 1900], "high": [0, 610, 1300, 2500], "stays": {"1": 1.9, "2": 0.5}}
    busy.trainers["t1"]["curve"] |= band
    out = call("status", "digits").out
    assert "● measured, now, 0.5 stays, 80 %: 1,100 to 1,300" in out
    assert "○ expected, 80 %: 1,900 to 2,500" in out


def test_a_rate_that_was_measured_outside_of_its_band_is_not_shown_as_the_expected_one(
    busy: FakeState, call: Call
) -> None:
    busy.trainers["t1"]["curve"] |= {"low": [0, 590, 1250, 1900], "high": [0, 610, 1350, 2500], "stays": {"2": 0.5}}
    busy.trainers["t1"]["curve"]["rates"] = [0, 600, 1300, 2200]
    out = " ".join(call("status", "digits").out.split())
    assert "2 1,300" in out
    assert "● measured 1,200, now, 0.5 stays, 80 %: 1,250 to 1,350" in out


LEARNED = {
    **{"id": "c3", "owner": "alice", "script": "/home/alice/train.py", "python": "/usr/bin/python3", "model": "large"},
    **{"changed": 1.0, "sizes": [1, 4], "stays": 2.75, "is_given": False, "rescales": 9, "up_s": 0.25, "down_s": None},
    **{"start_s": 7.5, "noise": 0.031},
    "curve": {
        **{"nodes": [0, 1, 2, 4], "rates": [0.0, 100.0, 190.0, 360.123456], "measured": {"1": 101.0}, "prior": None},
        **{"low": [0, 90, 170, 300], "high": [0, 110, 210, 420], "stays": {"1": 1.9}},
    },
}


def test_curves_lists_shows_exports_and_forgets_what_was_learned(fake: FakeState, call: Call, tmp_path: Path) -> None:
    assert "nothing is learned yet" in call("curves").out
    fake.curves.append(LEARNED)
    assert "c3  train.py (large)          1-4   2.75      0.25 s        7.5 s" in call("curves").out
    assert json.loads(call("curves", "--json").out)[0]["sizes"] == [1, 4]
    out = call("curves", "c3").out
    assert "noise of a second 3.1%" in out
    assert "1       100 ███████                  ● measured 101, 1.9 stays, 80 %: 90 to 110" in out
    assert "up 0.25 s, down not measured, start of a node 7.5 s" in out
    file = tmp_path / "train.json"
    assert f"bftrainer submit --curve {file}" in call("curves", "c3", "--export", file).out
    assert load_curve(file).rates == (0.0, 100.0, 190.0, 360.123)
    assert call("curves", "c3", "--forget").out == "forgot train.py (large)\n"
    assert fake.curves == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--forget",), "name a curve"),
        (("c3", "--export", "train.csv"), "exported as .json"),
        (("train.py",), "named by its id"),
    ],
)
def test_curves_refuses_what_it_cannot_do(fake: FakeState, call: Call, words: tuple[str, ...], said: str) -> None:
    found = call("curves", *words)
    assert (found.status, said in found.err) == (2, True)


def test_json_is_what_the_api_says(busy: FakeState, call: Call) -> None:
    assert [row["id"] for row in json.loads(call("status", "--json").out)["trainers"]] == ["t1", "t2"]
    assert json.loads(call("status", "t1", "--json").out)["curve"]["measured"] == {"1": 600, "2": 1200}
    assert len(json.loads(call("nodes", "--json").out)["nodes"]) == 3
    assert json.loads(call("events", "--json", "-n", 2).out)["last"] == 4


def test_an_unknown_trainer_is_one_line(fake: FakeState, call: Call) -> None:
    for command in ("status", "logs", "cancel", "wait"):
        assert_refused(call(command, "nobody"), "no trainer is called 'nobody'")
    assert_refused(call("status", "../x"), "a trainer must be named by its id or its name, but got '../x'")


def test_nodes_shows_who_trains_where(busy: FakeState, call: Call) -> None:
    lines = call("nodes").out.splitlines()
    assert lines[1].split()[:5] == ["node-1", "127.0.0.1", "assigned", "digits", "t1-1"]


def test_without_gpus_nothing_is_said_of_them(busy: FakeState, call: Call) -> None:
    for words in (["nodes"], ["status"], ["status", "digits"]):
        out = call(*words).out
        assert "GPU" not in out
        assert "ranks" not in out


def test_gpus_ranks_and_devices_are_shown_where_there_are_some(
    busy: FakeState, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    kind = {"kind": "cuda", "name": "NVIDIA A100", "memory_mb": 81920, "percent": 50, "used_mb": 20480}
    ranks = [{"pid": 10 + i, "device": str(i)} for i in range(4)]
    busy.nodes[0] |= {"gpus": [{"id": str(i), **kind} for i in range(4)], "slots": 4, "ranks": ranks}
    named = {"kind": "cuda", "name": "NVIDIA H100 NVL 94GB", "memory_mb": 96256, "percent": None, "used_mb": None}
    long = {"pid": 20, "device": "GPU-1f2a" + "0" * 32}
    busy.nodes[1] |= {"gpus": [{"id": "0", **named}], "slots": 1, "ranks": [long]}
    busy.nodes[2] |= {"gpus": [], "slots": 1, "ranks": []}
    busy.trainers["t1"] |= {"ranks": 5, "gpu_seconds": 18_000.0}
    busy.trainers["t1"]["workers"][0]["ranks"] = ranks
    busy.totals = {"gpu_seconds": 36_000.0}
    busy.pool = {"gpus": 5, "used_gpus": 4}
    lines = [re.split(r"\s{2,}", line.strip()) for line in call("nodes").out.splitlines()]
    assert lines[0][5:8] == ["GPUs", "ranks", "GPU use"]
    assert lines[1][5:8] == ["4 × A100 80 GB", "4 on 0 1 2 3", "50%, 80 of 320 GB"]
    assert lines[2][5:7] == ["1 × H100 NVL 94GB", "1 on GPU-1f2a000…"]
    status = call("status").out
    assert "2 of 3 nodes used (4 of 5 GPUs)" in status
    assert "2.00 node-hours (10.00 GPU-hours)" in status
    assert re.search(r"digits +running +2/1-8 +5 ", status)
    detail = call("status", "digits").out
    assert re.search(r"ranks +5 on 2 nodes", detail)
    assert "0.00 node-hours, 5.00 GPU-hours" in detail
    assert re.search(r"t1-1 +node-1 +training +4242 +4 on 0 1 2 3", detail)


def test_an_event_is_a_readable_line(busy: FakeState, call: Call) -> None:
    lines = [line.split(maxsplit=3)[3] for line in call("events").out.splitlines()]
    assert lines == [
        "node-1 host=127.0.0.1 agent=x",
        "digits grows 1 -> 2; rest waits",
        "t1: 1 -> 2 nodes (grow), pause 0.125 s",
        "t2: running -> waiting (no nodes)",
    ]
    assert call("events", "--kind", "decision").out.count("\n") == 1
    assert call("events", "--trainer", "t1", "--after", "0").out.count("\n") == 1


def test_events_can_be_followed(busy: FakeState, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def rest() -> None:
        if len(busy.events) > 5:
            raise KeyboardInterrupt
        busy.event("node.left", node=f"node-{len(busy.events)}", reason="taken")

    resting(monkeypatch, rest)
    answer = call("events", "-f", "-n", "1", "--json")
    assert [json.loads(line)["seq"] for line in answer.out.splitlines()] == [4, 5, 6]
    assert answer.status == 130


# logs


def test_what_a_script_prints_brings_a_terminal_colours_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "\x1b[1;31mred\x1b[0m\tü \x1b]0;title\x07 \x1b[2J\x1b[8m \x9b1A\r\x1bc end"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert connection.shown(said) == said
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert connection.shown("plain ü") == "plain ü"
    left = connection.shown(said)
    assert left.startswith("\x1b[1;31mred\x1b[0m\tü \\x1b]0;title\\x07 \\x1b[2J")
    assert left.endswith("\x1b[0m")
    assert {c for c in re.sub("\x1b\\[[0-9;]*m", "", left) if not c.isprintable()} == {"\t"}


def test_logs_print_all_pages_in_order(fake: FakeState, call: Call) -> None:
    fake.add(state="running")
    for n in range(10):
        fake.log("t1", f"t1-{n % 2}", f"line {n} ü")
    assert call("logs", "t1").out.splitlines()[3] == "t1-1@node-1: line 3 ü"
    assert call("logs", "job1", "--no-prefix").out.splitlines() == [f"line {n} ü" for n in range(10)]
    assert call("logs", "t1", "--tail", "2", "--no-prefix").out == "line 8 ü\nline 9 ü\n"
    assert call("logs", "t1", "--tail", "2", "--worker", "t1-0", "--no-prefix").out == "line 6 ü\nline 8 ü\n"
    assert call("logs", "t1", "--tail", "0").out == ""
    assert len(json.loads(call("logs", "t1", "--json").out)["lines"]) == 10
    assert_refused(call("logs", "t1", "--worker", "t2-1"), "--worker must be a worker of t1")


@pytest.mark.parametrize("options", [[], ["--tail", "1"], ["--tail", "0"]])
def test_logs_are_followed_until_the_trainer_is_finished(
    fake: FakeState, call: Call, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    fake.add(state="running")
    for n in range(5):
        fake.log("t1", "t1-1", f"old {n}")

    def rest() -> None:
        for n in range(4):
            fake.log("t1", "t1-1", f"new {n}")
        fake.trainers["t1"]["state"] = "done"

    resting(monkeypatch, rest)
    shown = {"": 5, "1": 1, "0": 0}[options[1] if options else ""]
    old = [f"old {n}" for n in range(5 - shown, 5)]
    assert call("logs", "-f", "--no-prefix", *options, "t1").out.splitlines() == [*old, *(f"new {n}" for n in range(4))]


# cancel, pause, resume, watch


def test_cancel_ends_those_that_are_named_or_all(fake: FakeState, call: Call) -> None:
    for state in ("running", "done", "queued", "waiting"):
        fake.add(state=state)
    assert call("cancel", "t1", "job2").out == "cancelled t1 job1\nalready done t2 job2\n"
    assert call("cancel", "--all").out == "cancelled t3 job3\ncancelled t4 job4\n"
    assert call("cancel", "--all").out == "nothing to cancel\n"
    assert_refused(call("cancel"), "cancel needs the trainers to cancel, or --all")
    assert_refused(call("cancel", "t1", "--all"), "give trainers or --all")


def test_a_wrong_name_among_several_cancels_none(fake: FakeState, call: Call) -> None:
    fake.add(state="running")
    assert_refused(call("cancel", "t1", "t9"), "no trainer is called 't9'")
    assert fake.trainers["t1"]["state"] == "running"


def test_harvesting_is_paused_and_resumed(fake: FakeState, call: Call) -> None:
    assert "paused" in call("pause").out
    assert fake.paused
    assert "PAUSED" in call("status").out
    assert json.loads(call("resume", "--json").out) == {"paused": False}


def test_wait_asks_by_id_so_that_a_newcomer_of_that_name_does_not_matter(fake: FakeState, call: Call) -> None:
    fake.add(name="x", state="running")

    def step(path: str) -> None:
        if path == "/v1/trainers/t1" and len(fake.trainers) == 1:
            fake.trainers["t1"]["state"] = "done"
            fake.add(name="x", state="failed")

    fake.on_ask = step
    assert call("wait", "x", "--json").status == 0


def test_watch_without_a_terminal_prints_a_line_a_change(
    busy: FakeState, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rest() -> None:
        if busy.trainers["t1"]["state"] == "running":
            busy.trainers["t1"]["state"] = "done"
        else:
            busy.trainers["t2"]["state"] = "cancelled"

    resting(monkeypatch, rest)
    answer = call("watch", "--until-done")
    assert answer.status == 1
    lines = answer.out.splitlines()
    assert len(lines) == 3
    assert "2 of 3 nodes used; digits running on 2 40%" in lines[0]
    assert "digits done" in lines[1]
    assert lines[2].endswith("cancelled")


@pytest.mark.parametrize("width", [80, 120])
def test_watch_draws_the_pool_by_trainer(busy: FakeState, call: Call, width: int) -> None:
    from rich.console import Console

    from bftrainer.cli.live.watch import look, picture

    with connection.connect(None, None) as client:
        scene = look(client, set())
    console = Console(width=width, height=30, force_terminal=True, color_system="standard", legacy_windows=False)
    with console.capture() as captured:
        console.print(picture(scene, console))
    drawn = captured.get()
    assert "\x1b[32m■\x1b[0m\x1b[32m■\x1b[0m\x1b[2m□\x1b[0m" in drawn
    assert "Last decisions" in drawn


def test_a_user_who_may_not_see_decisions_watches_without_them(busy: FakeState, call: Call) -> None:
    def refuse_events(path: str) -> None:
        busy.refuse = (403, "only an admin may see all events") if path == "/v1/events" else None

    busy.on_ask = refuse_events
    for row in busy.trainers.values():
        row["state"] = "done"
    answer = call("watch", "--until-done")
    assert (answer.status, len(answer.out.splitlines())) == (0, 1)
    assert "/v1/events" in busy.asked


# token, config


def test_a_token_is_made_listed_and_revoked(call: Call, tmp_path: Path) -> None:
    assert_refused(call("token", "list"), "there is no database")
    token = call("token", "create", "laptop", "--owner", "alice", "--role", "admin").out.strip()
    assert len(token) > 32
    (row,) = json.loads(call("token", "list", "--json").out)["tokens"]
    assert (row["name"], row["owner"], row["role"], row["revoked"]) == ("laptop", "alice", "admin", None)
    assert token not in call("token", "list").out
    assert_refused(call("token", "create", "local"), "NAME must not be local, which is reserved for `bftrainer serve`")
    assert_refused(call("token", "create", "laptop"), "a token named 'laptop' already exists")
    assert call("token", "revoke", "laptop").status == 0
    assert_refused(call("token", "revoke", "laptop"), "there is no token 'laptop'")
    assert_refused(
        call("token", "create", "x", "--role", "king"), "--role must be one of user, admin, monitor, but got 'king'"
    )
    with sqlite3.connect(tmp_path / "state" / "bftrainer.db") as database:
        assert token not in "\n".join(database.iterdump())
    database.close()


def test_a_token_lasts_as_long_as_is_said_or_as_the_configuration_says(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def days(name: str) -> float | None:
        rows = {row["name"]: row for row in json.loads(call("token", "list", "--json").out)["tokens"]}
        expires = rows[name]["expires"]
        return None if expires is None else round((expires - rows[name]["created"]) / 86400, 3)

    call("token", "create", "plain")
    call("token", "create", "month", "--expires", "30d")
    monkeypatch.setenv("BFTRAINER_API__TOKEN_LIFETIME", "12h")
    call("token", "create", "short")
    call("token", "create", "lasting", "--expires", "never")
    assert [days(name) for name in ("plain", "month", "short", "lasting")] == [None, 30, 0.5, None]
    listed = call("token", "list").out
    assert "expires" in listed
    assert "never" in listed
    for wrong in ("30", "0d", "-1d", "30 days", "999999d", ""):
        assert_refused(
            call("token", "create", "odd", "--expires", wrong), "--expires must be a time such as 12h, 30d or 52w"
        )
    monkeypatch.setenv("BFTRAINER_API__TOKEN_LIFETIME", "soon")
    assert_refused(call("token", "list"), "api.token_lifetime must be a time such as 12h, 30d or 52w, or never")


def test_a_users_file_needs_a_controller_and_a_new_place(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "ann.json"
    assert_refused(call("token", "create", "ann", "--client-file", str(file)), "no controller is known", status=1)
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "state" / "client.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "token": TOKEN}))
    assert call("token", "create", "ann", "--client-file", str(file)).out.strip() == f"wrote {file}"
    content = json.loads(file.read_text())
    assert (content["url"], set(content)) == ("http://127.0.0.1:1", {"url", "token"})
    assert_refused(call("token", "create", "bob", "--client-file", str(file)), "exists already")
    there = tmp_path / "none" / "bob.json"
    assert_refused(call("token", "create", "bob", "--client-file", str(there)), f"cannot write {there}")
    assert call("token", "create", "bob").status == 0  # the name was not used up


def test_the_configuration_is_printed_as_a_file_that_says_the_same(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state" / "config.toml").write_text('[policy]\nhorizon_s = "auto"\n[pool]\nnodes = 3\n')
    monkeypatch.setenv("BFTRAINER_SERVER__PORT", "0")
    out = call("config").out
    found = tomllib.loads(out)
    assert (found["policy"]["horizon_s"], found["pool"]["nodes"], found["server"]["port"]) == ("auto", 3, 0)
    assert "port = 0  # from $BFTRAINER_SERVER__PORT, default 8765" in out
    (tmp_path / "copy.toml").write_text(out)
    again = json.loads(call("config", "--config", "copy.toml", "--json").out)["keys"]
    assert {row["key"]: row["value"] for row in again} == {
        row["key"]: row["value"] for row in json.loads(call("config", "--json").out)["keys"]
    }
    assert call("config", "--check").status == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[pool]\nnods = 3\n", "did you mean 'nodes'?"),
        ('[pool]\nkind = "locl"\n', "did you mean 'local'?"),
        ('[policy]\nobjective = "speed"\n', "objective must be one of"),
    ],
)
def test_a_wrong_configuration_does_not_pass_the_check(call: Call, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "state" / "config.toml").write_text(text)
    assert_refused(call("config", "--check"), said)
