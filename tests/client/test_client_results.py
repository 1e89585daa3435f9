"""Results from a client: where the files are, whether they can be read from here, and copies of them."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bftrainer.cli.main import run
from bftrainer.client import AsyncClient, Client
from bftrainer.client.results import TrainerResults, read_results
from bftrainer.cluster.wire.api import ResultsView
from bftrainer.elastic.metrics import Position
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.util.folders import list_files
from support.cluster.fake_api import NOW, TOKEN, FakeState, make_app, serving

Call = Callable[..., SimpleNamespace]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """An output folder with two files."""
    folder = tmp_path / "state" / "trainers" / "t1" / "output"
    (folder / "plots").mkdir(parents=True)
    (folder / "best.pt").write_bytes(b"weights")
    (folder / "plots" / "loss.png").write_bytes(b"a picture")
    return folder


def seen(folder: Path, **more: Any) -> dict[str, Any]:
    """What the controller says of a folder that it sees."""
    files = [file._asdict() for file in list_files(folder)[0]]
    host = {"host": socket.gethostname(), "folder": str(folder), "exists": True}
    return {**host, "files": files, "complete": True, "problem": "", **more}


def view(output: Path, /, **more: Any) -> ResultsView:
    facts = {"id": "t1", "name": "a", "state": "done", "reason": "", "started": NOW, "ended": NOW + 60, "epoch": 3}
    metrics = {"accuracy": 0.5, "loss": None}
    places = {"accuracy": {"epoch": 3, "step": 30, "samples": 300}}
    more = {"step": 30, "samples": 300, "metrics": metrics, "metrics_at": places, **seen(output), **more}
    return cast(ResultsView, {**facts, **more})


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeState]:
    """A controller that the commands find through the state folder."""
    for name in ("BFTRAINER_URL", "BFTRAINER_TOKEN", "BFTRAINER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BFTRAINER_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "state").mkdir(mode=0o700, exist_ok=True)
    fake = FakeState()
    with serving(make_app(fake)) as url:
        (tmp_path / "state" / "client.json").write_text(json.dumps({"url": url, "token": TOKEN}))
        yield fake


@pytest.fixture
def call(fake: FakeState, capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*args: object) -> SimpleNamespace:
        status = run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return SimpleNamespace(status=status, out=out, err=err)

    return call


# Whether the files can be read from here.


def test_results_of_a_folder_that_is_here_can_be_opened_and_copied(output: Path, tmp_path: Path) -> None:
    found = read_results(view(output))
    assert (found.problem, found.finished, found.epoch) == ("", True, 3)
    assert found.metrics["accuracy"] == 0.5
    assert math.isnan(found.metrics["loss"])
    assert found.at == {"accuracy": Position(3, 30, 300)}
    assert found.path("best.pt").read_bytes() == b"weights"
    with pytest.raises(InputError, match=r"a \(t1\) has no file 'bets.pt' in .*; there are: best.pt, plots/loss.png"):
        found.path("bets.pt")
    copies = found.copy(tmp_path / "mine" / "here")
    assert copies == [tmp_path / "mine" / "here" / name for name in ("best.pt", "plots/loss.png")]
    assert [path.read_bytes() for path in copies] == [b"weights", b"a picture"]
    assert copies[0].stat().st_mtime == (output / "best.pt").stat().st_mtime


def test_nothing_is_copied_if_a_file_would_be_replaced_unless_that_is_wanted(output: Path, tmp_path: Path) -> None:
    found, mine = read_results(view(output)), tmp_path / "mine"
    (mine / "plots").mkdir(parents=True)
    (mine / "plots" / "loss.png").write_text("my own")
    with pytest.raises(
        InputError, match=r"plots/loss.png exists: choose another folder, or replace files with --force"
    ):
        found.copy(mine)
    assert (mine / "plots" / "loss.png").read_text() == "my own"
    assert not (mine / "best.pt").exists()
    found.copy(mine, force=True)
    assert (mine / "plots" / "loss.png").read_bytes() == b"a picture"


def test_files_that_another_machine_has_are_not_taken_for_those_here(output: Path, tmp_path: Path) -> None:
    shared = view(output, host="login1")
    assert read_results(shared, "laptop").problem == ""  # a file system that both see: the files are the same
    (output / "best.pt").write_bytes(b"other weights")
    (output / "plots" / "loss.png").unlink()
    away = read_results(shared, "laptop")
    expected = f"laptop does not see the files: they are in {output} on login1. Run this command there, or copy them"
    assert expected in away.problem
    assert f"scp -r login1:{output} ." in away.problem
    missing = read_results(view(output, host="login1", folder="/nowhere/output"), "laptop")
    assert "they are in /nowhere/output on login1" in missing.problem
    for found in (away, missing):
        with pytest.raises(BFTrainerError, match="does not see the files"):
            found.copy(tmp_path / "mine")
        with pytest.raises(BFTrainerError, match="does not see the files"):
            found.path("best.pt")
    assert read_results(view(output, host="login1", files=[]), "laptop").problem == ""  # nothing to read


def test_a_folder_that_may_not_be_read_is_told_from_one_that_is_elsewhere(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("bftrainer.client.results.list_files", refuse)
    assert f"you may not read {output}" in read_results(view(output)).problem
    unread = read_results(view(output, host="login1", exists=False, files=[], problem="Permission denied"))
    assert unread.problem == f"the controller on login1 cannot read {output}: Permission denied"


# Clients.


def test_both_clients_return_the_same_results(fake: FakeState, output: Path) -> None:
    row = fake.add(name="a", state="done", metrics={"accuracy": 0.5})
    fake.output = seen(output)
    fake.trials = [{"id": "t2", "best": 0.9}, {"id": "t1", "best": 0.5}]

    async def awaited() -> tuple[TrainerResults, list[Any]]:
        async with AsyncClient() as client:
            return await client.results(row), list(await client.best("lr", by="accuracy", limit=1))

    with Client() as client:
        found = client.results("a")
        assert [file.name for file in found.files] == ["best.pt", "plots/loss.png"]
        best = client.best("lr", by="accuracy", direction="min")
        assert [row["id"] for row in best] == ["t2", "t1"]
        with pytest.raises(InputError, match="direction must be min, max or None, but got 'up'"):
            client.best("lr", by="accuracy", direction="up")
        with pytest.raises(InputError, match="a group must be named as in `bftrainer status`, but got 'a/b'"):
            client.best("a/b", by="accuracy")
        assert asyncio.run(awaited()) == (found, best[:1])
    assert fake.compared == [("lr", "accuracy", "min"), ("lr", "accuracy", None)]


# Commands.


def test_results_are_shown_copied_and_printed_as_json(fake: FakeState, call: Call, output: Path) -> None:
    places = {"accuracy": {"epoch": 2, "step": 20, "samples": 200}}
    metrics = {"accuracy": 0.875, "loss": None}
    fake.add(name="a", state="done", started=NOW, ended=NOW + 90, step=30, metrics=metrics, metrics_at=places)
    fake.output = seen(output)
    answer = call("results", "a")
    assert (answer.status, answer.err) == (0, "")
    for text in ("a (t1)  done after 1m30s", "accuracy 0.875 (at step 20)", "loss not finite", "7 B"):
        assert text in answer.out
    assert f"{socket.gethostname()}:{output}" in answer.out
    copied = call("results", "a", "--copy", "mine")
    assert "copied 2 files to mine" in copied.out
    assert Path("mine/plots/loss.png").read_bytes() == b"a picture"
    again = call("results", "a", "--copy", "mine")
    assert (again.status, again.out) == (2, "")
    assert again.err.startswith("bftrainer: mine/best.pt exists, and 1 more")
    assert call("results", "a", "--copy", "mine", "--force").status == 0
    assert "--force is for --copy" in call("results", "a", "--force").err
    found = json.loads(call("results", "a", "--copy", "mine", "--force", "--json").out)
    assert list(found) == [
        *("id", "name", "state", "reason", "started", "ended", "epoch", "step", "samples", "metrics", "metrics_at"),
        *("host", "folder", "exists", "reachable", "files", "complete", "problem", "copied"),
    ]
    assert (found["metrics"], found["reachable"]) == (metrics, True)
    assert found["metrics_at"] == places
    assert [file["name"] for file in found["files"]] == ["best.pt", "plots/loss.png"]
    assert found["copied"] == ["mine/best.pt", "mine/plots/loss.png"]


@pytest.mark.parametrize(
    ("columns", "output", "says"),
    [
        ({"state": "queued"}, {}, "no files: it has not begun to train"),
        ({"state": "running", "started": NOW}, {"exists": True}, "no files yet: the script has written nothing"),
        ({"state": "done", "started": NOW, "ended": NOW}, {"exists": True}, "no files: the script has written nothing"),
        ({"state": "failed", "started": NOW, "ended": NOW, "reason": "bad"}, {}, "a (t1)  failed after 0s: bad"),
        ({"state": "failed", "started": NOW, "ended": NOW}, {}, "there is no folder /nowhere/output on elsewhere"),
    ],
)  # fmt: skip
def test_where_there_is_nothing_the_reason_is_said(
    columns: dict[str, Any], output: dict[str, Any], says: str, fake: FakeState, call: Call
) -> None:
    fake.add(name="a", **columns)
    fake.output = output
    answer = call("results", "a")
    assert (answer.status, answer.err) == (0, "")
    assert says in answer.out
    assert "none reported" in answer.out
    assert "there is nothing to copy" in call("results", "a", "--copy", "mine").out


def test_a_folder_on_another_machine_is_listed_and_named_and_not_copied(fake: FakeState, call: Call) -> None:
    fake.add(name="a", state="running", started=NOW)
    file = {"name": "best.pt", "bytes": 12_500, "time": NOW}
    fake.output = {"host": "login1", "folder": "/shared/output", "exists": True, "files": [file]}
    answer = call("results", "a")
    assert answer.status == 0
    assert "best.pt" in answer.out
    assert "12.5 kB" in answer.out
    assert "they are in /shared/output on login1" in answer.err
    refused = call("results", "a", "--copy", "mine")
    assert (refused.status, refused.out) == (1, "")
    assert "scp -r login1:/shared/output ." in refused.err
    assert not Path("mine").exists()
    found = json.loads(call("results", "a", "--json").out)
    assert (found["exists"], found["reachable"], found["copied"]) == (True, False, None)


def trial(number: int, **more: Any) -> dict[str, Any]:
    facts = {"id": f"t{number}", "name": f"lr-{number}", "owner": "alice", "state": "done", "reason": ""}
    judged = {"value": 0.5, "at": {"epoch": 3, "step": 1300, "samples": 9}, "best": 0.75}
    used = {"epoch": 3, "step": 1300, "run_s": 90.0, "node_seconds": 225.0}
    place = {"best_at": {"epoch": 2, "step": 1200, "samples": 8}, "folder": f"/state/trainers/t{number}/output"}
    return {**facts, "params": {"lr": f"0.{number}"}, **judged, **used, **place, **more}


def test_the_trainers_of_a_group_are_compared_in_one_table(fake: FakeState, call: Call) -> None:
    nothing = {"value": None, "at": None, "best": None, "best_at": None, "run_s": 0.0, "node_seconds": 0.0}
    fake.trials = [trial(2), trial(1, state="running", best=0.625), trial(3, state="queued", **nothing)]
    answer = call("best", "--group", "lr", "--by", "accuracy")
    assert (answer.status, answer.err) == (0, "")
    head, titles, first, second, third, below = answer.out.splitlines()
    assert head == "lr: 3 trainers, greatest accuracy first"
    words = "id name state lr best epoch step last time node time folder"
    assert titles.split() == words.split()
    assert first.split() == ["t2", "lr-2", "done", "0.2", "0.75", "2", "1,200", "0.5", "1m30s", "3m45s", "t2/output"]
    assert second.split()[:5] == ["t1", "lr-1", "running", "0.1", "0.625"]
    assert third.split() == ["t3", "lr-3", "queued", "0.3", "t3/output"]
    assert below == "folders are below /state/trainers"
    found = json.loads(call("best", "--group", "lr", "--by", "val_loss", "--limit", "1", "--json").out)
    assert found == {"group": "lr", "by": "val_loss", "direction": "min", "trainers": [trial(2)]}
    call("best", "--group", "lr", "--by", "val_loss", "--max")
    call("best", "--group", "lr", "--by", "accuracy", "--min")
    assert [direction for _, _, direction in fake.compared] == ["max", "min", "max", "min"]
    assert "--min and --max exclude each other" in call("best", "--group", "g", "--by", "a", "--min", "--max").err
    fake.trials = [trial(3, **nothing)]
    assert "no trainer of lr has reported accuracy yet" in call("best", "--group", "lr", "--by", "accuracy").out
