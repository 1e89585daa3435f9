"""Sweeps: what a file describes, how it is submitted, and how `status` shows it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from bftrainer.cli.main import run
from bftrainer.cluster.spec.sweep import load_sweep
from bftrainer.errors import InputError
from support.cluster.fake_api import TOKEN, FakeState, make_app, serving

Call = Callable[..., SimpleNamespace]
GRID = """
nodes: 1-4
script: train.py
args: [--epochs, 20]
grid:
  lr: [1e-3, 0.01]
  batch-size: [32, 64, 128]
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("BFTRAINER_URL", "BFTRAINER_TOKEN", "BFTRAINER_CONFIG", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BFTRAINER_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "grid.yaml").write_text(GRID)
    return tmp_path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*args: object) -> SimpleNamespace:
        status = run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return SimpleNamespace(status=status, out=out, err=err)

    return call


@pytest.fixture
def fake(home: Path) -> Iterator[FakeState]:
    fake = FakeState()
    with serving(make_app(fake)) as url:
        (home / "state" / "client.json").write_text(json.dumps({"url": url, "token": TOKEN}))
        yield fake


def test_a_grid_is_a_trainer_for_each_choice(home: Path) -> None:
    specs = load_sweep(home / "grid.yaml")
    assert [spec.name for spec in specs] == [f"grid-{number}" for number in range(1, 7)]
    assert {spec.group for spec in specs} == {"grid"}
    assert specs[1].params == {"lr": "1e-3", "batch-size": "64"}
    assert specs[1].args == ("--epochs", "20", "--lr", "1e-3", "--batch-size", "64")
    assert specs[5].params == {"lr": "0.01", "batch-size": "128"}
    assert (specs[0].script, specs[0].cwd, specs[0].max_nodes) == (str(home / "train.py"), str(home), 4)


def test_all_trainers_of_a_sweep_have_its_ranks_per_node_and_the_command_line_overrides_it(
    home: Path, fake: FakeState, call: Call
) -> None:
    (home / "four.yaml").write_text(f"ranks_per_node: 4\n{GRID}")
    assert {spec.ranks_per_node for spec in load_sweep(home / "four.yaml")} == {4}
    assert call("submit", "--array", "four.yaml", "--ranks-per-node", "2").status == 0
    assert [spec["ranks_per_node"] for spec in fake.specs] == [2] * 6


def test_values_go_where_they_are_named(home: Path) -> None:
    path = home / "tune.toml"
    path.write_text(
        'group = "g"\nscript = "-m train"\nargs = ["optim.lr={lr}", "{not_ours}", "{}"]\n'
        'env = {SEED = "{seed}", DIR = "out/{lr}-{seed}"}\n'
        "[[points]]\nlr = 0.5\nseed = 1\nbias = -2\n[[points]]\nseed = 2\nlr = 1.5\nbias = 3\n"
    )
    first, second = load_sweep(path)
    assert first.args == ("optim.lr=0.5", "{not_ours}", "{}", "--bias=-2")
    assert first.env == {"SEED": "1", "DIR": "out/0.5-1"}
    assert second.args == ("optim.lr=1.5", "{not_ours}", "{}", "--bias", "3")
    assert (second.name, second.params) == ("g-2", {"lr": "1.5", "seed": "2", "bias": "3"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("script: train.py", "either a grid"),
        ("script: train.py\ngrid: {a: [1]}\npoints: [{a: 1}]", "either a grid"),
        ("script: train.py\ngrid: [1]", "grid must be a mapping"),
        ("script: train.py\ngrid: {}", "grid must be a mapping"),
        ("script: train.py\ngrid: {lr: 3}", "lr must be a list of values"),
        ("script: train.py\ngrid: {lr: []}", "lr must be a list of values"),
        ("script: train.py\ngrid: {lr: [1, 1]}", "the values of lr must each occur once"),
        ("script: train.py\ngrid: {lr: [[1]]}", "a value of lr must be a number, a text, true or false"),
        ("script: train.py\ngrid: {'a b': [1]}", "named as an option"),
        ("script: train.py\npoints: []", "points must be a list"),
        ("script: train.py\npoints: [{a: 1}, {b: 1}]", "the first has, but point 2 has not"),
        ("script: train.py\npoints: [{a: 1, b: 2}, {b: 2, a: 1}]", "points must each occur once"),
        ("script: train.py\nname: x\ngrid: {a: [1]}", "write group instead of name"),
        ("script: train.py\nnoeds: 3\ngrid: {a: [1]}", "did you mean 'nodes'"),
        ("script: train.py\nnodes: 4-2\ngrid: {a: [1]}", "nodes must be a range"),
        ("script: train.py\ngroup: a b\ngrid: {a: [1]}", "group must be"),
        (f"script: train.py\ngroup: {'a' * 60}\ngrid: {{a: [1]}}", "at most 56 letters"),
        ("script: train.py\nargs: ['{batch}']\ngrid: {batches: [1]}", "did you mean {batches}"),
        ("nodes: 1\ngrid: {a: [1]}", "script is missing"),
        (f"script: train.py\ngrid: {{a: {list(range(200))}, b: {list(range(200))}}}", "these would be 40,000"),
    ],
)
def test_what_is_wrong_with_a_sweep_is_one_line(home: Path, text: str, says: str) -> None:
    (home / "grid.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        load_sweep(home / "grid.yaml")
    assert says in str(caught.value)
    assert "grid.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_array_is_submitted_and_shown_as_a_group(fake: FakeState, call: Call) -> None:
    answer = call("submit", "--array", "grid.yaml")
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.splitlines()[1] == "submitted t2 grid-2 lr=1e-3 batch-size=64"
    assert [spec["group"] for spec in fake.specs] == ["grid"] * 6
    for spec, row in zip(fake.specs, fake.trainers.values(), strict=True):
        row.update(group=spec["group"], params=spec["params"])
    fake.trainers["t1"].update(state="done", progress=1.0, metrics={"accuracy": 0.9})
    fake.trainers["t2"].update(state="running", progress=0.5, rate=100.0, nodes=["n1", "n2"])
    fake.trainers["t3"].update(state="failed", reason="no data")
    fake.add(name="alone")
    shown = call("status").out
    (line,) = [line for line in shown.splitlines() if line.startswith("grid ")]
    assert line.split()[:7] == ["grid", "6", "3", "1", "1", "1", "2"]
    assert "alone" in shown
    assert "grid-2" in shown  # trains
    assert "grid-3 (t3) failed: no data" in shown
    assert "grid-1 " not in shown
    assert "grid-4" not in shown
    members = call("status", "--group", "grid").out
    assert [line.split()[:5] for line in members.splitlines() if line.startswith("t")][:2] == [
        ["t1", "grid-1", "done", "1e-3", "32"],
        ["t2", "grid-2", "running", "1e-3", "64"],
    ]
    assert "accuracy 0.9" in members
    assert "alone" not in members
    found = json.loads(call("status", "--group", "grid", "--json").out)
    assert [row["params"]["lr"] for row in found["trainers"]] == ["1e-3"] * 3 + ["0.01"] * 3


def test_nothing_of_an_array_is_queued_if_all_of_it_may_not_be(fake: FakeState, call: Call) -> None:
    fake.max_trainers = 5
    answer = call("submit", "--array", "grid.yaml")
    assert answer.status == 2
    assert answer.err == (
        "bftrainer: alice may have 5 unfinished trainers and has 0, so 6 more are too many: wait until some are "
        "finished, or cancel some\n"
    )
    assert fake.specs == []
    fake.max_trainers = None
    fake.add(name="grid-3", owner="bob")  # an admin sees it, and it is in nobody's way
    assert call("submit", "--array", "grid.yaml").status == 0


def test_the_script_of_an_array_may_be_on_the_command_line(fake: FakeState, call: Call, home: Path) -> None:
    (home / "values").mkdir()
    (home / "values" / "lr.yaml").write_text("nodes: 1-4\ngrid: {lr: [1, 2]}\n")
    answer = call("submit", "--array", "values/lr.yaml", "--nodes", "2", "--group", "mine", "--json", "train.py", "-x")
    assert answer.status == 0
    assert [row["name"] for row in json.loads(answer.out)["trainers"]] == ["mine-1", "mine-2"]
    spec = fake.specs[1]
    assert (spec["script"], spec["cwd"], spec["args"]) == (str(home / "train.py"), str(home), ["-x", "--lr", "2"])
    assert (spec["min_nodes"], spec["max_nodes"]) == (2, 2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--array", "grid.yaml", "--spec", "grid.yaml"], "give one of them"),
        (["--array", "grid.yaml", "--name", "x"], "name a sweep with --group"),
        (["--array", "grid.yaml", "train.py"], "remove one of them"),
        (["--array", "none.yaml"], "none.yaml"),
        (["--array", "train.py"], "must end in .toml or .yaml"),
        (["--array", "gone.yaml"], "script must be a file"),
        ([], "or --array FILE"),
    ],
)
def test_what_is_wrong_with_the_call_is_one_line(
    fake: FakeState, call: Call, home: Path, words: list[str], says: str
) -> None:
    (home / "gone.yaml").write_text("script: gone.py\ngrid: {a: [1]}\n")
    answer = call("submit", *words)
    assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert says in answer.err
    assert fake.specs == []


def test_none_of_a_sweep_is_queued_if_a_name_is_taken(fake: FakeState, call: Call) -> None:
    fake.add(name="grid-4", state="running")
    answer = call("submit", "--array", "grid.yaml")
    assert (answer.status, answer.out) == (2, "")
    assert "1 of 6 names are those of unfinished trainers, such as 'grid-4'" in answer.err
    assert "--group" in answer.err
    assert fake.specs == []
    fake.trainers["t1"]["state"] = "done"
    assert call("submit", "--array", "grid.yaml").status == 0


def test_a_group_holds_one_sweep(fake: FakeState, call: Call) -> None:
    fake.add(name="grid-1", group="grid", state="done", old=True)
    answer = call("submit", "--array", "grid.yaml")
    assert (answer.status, fake.specs) == (2, [])
    assert "the group 'grid' exists already, with 1 trainers" in answer.err
    assert call("submit", "--array", "grid.yaml", "--group", "grid-again").status == 0


def test_true_and_false_are_flags(home: Path) -> None:
    (home / "f.yaml").write_text("script: train.py\nargs: ['x={deep}']\ngrid: {amp: [true, false], deep: [true]}\n")
    on, off = load_sweep(home / "f.yaml")
    assert (on.args, off.args) == (("x=true", "--amp"), ("x=true",))
    assert (on.params["amp"], off.params["amp"]) == ("true", "false")
    (home / "f.toml").write_text('script = "train.py"\ngrid = {amp = [false, 1]}\n')
    assert [spec.args for spec in load_sweep(home / "f.toml")] == [(), ("--amp", "1")]


def test_a_group_is_awaited_and_ended_as_one_and_watched_in_a_line(fake: FakeState, call: Call) -> None:
    fake.add(group="grid", state="done", old=True)
    fake.add(group="grid", state="running")
    fake.add(group="grid", state="queued")
    assert call("cancel", "--group", "grid").out == "cancelled t2 job2\ncancelled t3 job3\n"
    assert call("wait", "--group", "grid", "--json").status == 1
    shown = call("watch", "--until-done").out
    assert "; grid: 2 cancelled" in shown
    assert "job2" not in shown
    for words in (["cancel", "--group", "gird"], ["wait", "--group", "gird"]):
        assert "no group 'gird'" in call(*words).err
    for words in (["cancel", "t1", "--group", "grid"], ["wait", "t1", "--group", "grid"]):
        assert "give trainers or" in call(*words).err


def test_the_line_of_a_group_counts_those_that_finished_long_ago(fake: FakeState, call: Call) -> None:
    fake.add(group="grid", state="done", old=True)
    fake.add(group="grid", state="running")
    found = next(line for line in call("status").out.splitlines() if line.startswith("grid"))
    assert found.split()[1:4] == ["2", "1", "1"]


def test_a_group_that_is_not_there_is_said_so(fake: FakeState, call: Call) -> None:
    for words in (["--group", "gird"], ["t1", "--group", "grid"]):
        answer = call("status", *words)
        assert (answer.status, answer.err.count("\n")) == (2, 1)
