"""Values of trainers' environments: in files of their own, never in the database, its back-ups or an answer."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.environments import move_values
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.elastic import protocol
from support.cluster.bench import Bench

SECRET = "hunter2-is-not-in-the-database"
ENV = {"TOKEN": SECRET, protocol.OUTPUT: "/results"}


def spec(**more: object) -> dict[str, object]:
    return TrainerSpec.model_validate({"script": "/train.py", **more}).as_json()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_values_are_in_a_private_file_and_not_in_the_database_or_its_copy(tmp_path: Path) -> None:
    with Store.open(tmp_path / FILE) as store:
        row = store.add_trainer(name="a", owner="ann", spec=spec(env=ENV), time=1.0)
        store.backup(tmp_path / "copy.db")
        assert row.spec["env"] == {"TOKEN": "", protocol.OUTPUT: "/results"}
        assert store.environments.read(row.id) == {"TOKEN": SECRET}
    assert not [name for name, content in contents(tmp_path).items() if SECRET.encode() in content]
    (file,) = (tmp_path / "environments").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_trainer_without_values_makes_no_file(tmp_path: Path) -> None:
    with Store.open(tmp_path / FILE) as store:
        store.add_trainer(name="a", owner="ann", spec=spec(env={protocol.OUTPUT: "/results"}), time=1.0)
        store.add_trainer(name="b", owner="ann", spec=spec(), time=1.0)
    assert not (tmp_path / "environments").exists()


def test_a_restarted_controller_starts_workers_with_the_same_environment(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    trainer = bench.submit(env=ENV)
    before = bench.cluster.trainers[trainer].spec
    bench.restart()
    assert bench.cluster.trainers[trainer].spec == before
    assert before.env == ENV


def test_a_trainer_whose_values_are_lost_fails_with_the_reason_and_no_other_does(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    lost, kept = bench.submit(env=ENV), bench.submit(env=ENV)
    bench.store.environments.remove(lost)
    bench.restart()
    row = bench.store.trainer(lost)
    assert row is not None
    assert row.state == "failed"
    assert "the values of its environment variables are not in" in row.error
    assert "submit it again" in row.error
    assert set(bench.cluster.trainers) == {kept}


def test_values_of_finished_trainers_and_of_broken_submissions_are_removed_at_the_next_start(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    done, going = bench.submit(env=ENV), bench.submit(env=ENV)
    bench.store.environments.stage(ENV)
    with bench.store.transaction():
        bench.act(bench.cluster.cancel(done, "", bench.now))
    bench.restart()
    assert [path.name for path in (tmp_path / "environments").iterdir()] == [f"{going}.json"]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A database with values in it, as version 0.1.0 wrote it: one trainer is done, one is not, one has none."""
    with Store.open(tmp_path / FILE) as store:
        for name in ("done", "going", "plain"):
            store.add_trainer(name=name, owner="ann", spec=spec(), time=1.0)
        store.update_trainer("t1", spec=spec(env={"TOKEN": SECRET + "-1"}), state="done", ended=2.0)
        store.update_trainer("t2", spec=spec(env=ENV | {"EMPTY": ""}))
    return tmp_path


def test_values_that_an_earlier_version_stored_are_moved_out_and_erased(old: Path) -> None:
    assert SECRET.encode() in (old / FILE).read_bytes()
    assert move_values(old / FILE) == 2
    assert not [name for name, content in contents(old).items() if SECRET.encode() in content]
    with Store.open(old / FILE) as store:
        rows = {row.name: row for row in store.trainers()}
        assert rows["going"].spec["env"] == {"TOKEN": "", protocol.OUTPUT: "/results", "EMPTY": ""}
        assert store.environments.read("t2") == {"TOKEN": SECRET, "EMPTY": ""}
        assert not store.environments.has("t1")
    assert move_values(old / FILE) == 0


def test_a_kill_while_values_are_moved_loses_none(old: Path) -> None:
    move_values(old / FILE)
    with sqlite3.connect(old / FILE) as database:
        database.execute("DELETE FROM kept")  # killed before it was done
    database.close()
    move_values(old / FILE)
    with Store.open(old / FILE) as store:
        assert store.environments.read("t2") == {"TOKEN": SECRET, "EMPTY": ""}
    assert [path.name for path in (old / "environments").iterdir()] == ["t2.json"]


def test_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    with Store.open(tmp_path / FILE) as store:
        row = store.add_trainer(name="a", owner="ann", spec=spec(env=ENV), time=1.0)
        for content in ("", "{", json.dumps(["TOKEN"])):
            (tmp_path / "environments" / f"{row.id}.json").write_text(content)
            assert store.environments.read(row.id) is None
