"""A trainer that is stored and restored is the same."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.cluster.controller.active import ActiveTrainer
from bftrainer.cluster.jobs.base import JobRecord
from bftrainer.cluster.launchers import make_launchers
from bftrainer.cluster.serve import next_start
from bftrainer.cluster.spec.states import FINISHED, STATES
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.rows import TrainerRow
from bftrainer.cluster.store.store import Store
from bftrainer.elastic import protocol
from bftrainer.elastic.metrics import Position
from bftrainer.elastic.protocol import Generation
from support.cluster.bench import Bench

UNCHANGED = {"id", "name", "owner", "spec", "submitted"}
APART = {"learned", "ended"}
"""`learned` is large and stored less often; a finished trainer is not restored."""
ONLY_FINISHED = {"error", "traceback"}
COUNT = st.integers(0, 2**40)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20)
POSITION = st.builds(Position, COUNT, COUNT, COUNT)
PLACE = st.tuples(st.floats(allow_nan=False, allow_infinity=False), COUNT, COUNT, COUNT).map(list)
NODES = ("n1", "n2", "n3")
NUMBERS = itertools.count()
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "state": st.sampled_from([state for state in STATES if state not in FINISHED]),
    "reason": TEXT,
    "started": st.none() | st.floats(1, 2e9),
    "generation": COUNT,
    "next_worker": COUNT,
    "samples": COUNT,
    "total": st.none() | COUNT,
    "epoch": COUNT,
    "step": COUNT,
    "metrics": st.dictionaries(TEXT, st.floats(allow_nan=False, allow_infinity=False), max_size=5),
    "extremes": st.dictionaries(TEXT, st.fixed_dictionaries({"min": PLACE, "max": PLACE}), max_size=3),
    "rescales": COUNT,
    "preemptions": COUNT,
    "failures": COUNT,
    "samples_redone": COUNT,
    "node_seconds": st.floats(0, 1e12),
    "gpu_seconds": st.floats(0, 1e12),
}


def restored(bench: Bench, row: TrainerRow, kept: dict[str, Any]) -> ActiveTrainer:
    return ActiveTrainer.from_row(row, bench.cluster.launchers, bench.settings, bench.now, kept=kept, nodes=NODES)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("restore"))


@pytest.mark.parametrize("launcher", ["elastic", "torchrun", "hosts"])
@settings(max_examples=50, deadline=None)
@given(columns=st.fixed_dictionaries(VALUES), positions=st.lists(POSITION, min_size=5, max_size=5), data=st.data())
def test_every_column_comes_back(
    bench: Bench, launcher: str, columns: dict[str, Any], positions: list[Position], data: st.DataObject
) -> None:
    at = {name: list(position) for name, position in zip(columns["metrics"], positions, strict=False)}
    columns = {**columns, "metrics_at": at, "error": "", "traceback": ""}
    members = data.draw(st.lists(st.sampled_from(["t1-1", "t1-2", "t1-3"]), unique=True))
    nodes = data.draw(st.lists(st.sampled_from(NODES), unique=True))
    kept = {"members": members, "trained_by": sorted(members) if launcher == "elastic" else [], "nodes": nodes}
    with bench.store.transaction():
        spec = TrainerSpec.model_validate({"script": "/train.py", "nodes": "1-4", "launcher": launcher})
        row = bench.store.add_trainer(name=f"a{next(NUMBERS)}", owner="a", spec=spec.as_json(), time=5.0)
        bench.store.update_trainer(row.id, **columns)
    found = bench.store.trainer(row.id)
    assert found is not None
    live = restored(bench, found, kept)
    assert live.as_row() == columns
    assert live.job_as_json() == kept
    assert (live.id, live.name, live.owner, live.submitted) == (row.id, row.name, "a", 5.0)
    assert live.spec == spec


def test_no_column_is_forgotten(bench: Bench) -> None:
    """A column that is added to the store must be stored, or listed here with its reason."""
    row = bench.store.add_trainer(name="new", owner="b", spec={"script": "/train.py", "nodes": "1"}, time=5.0)
    live = restored(bench, row, {})
    columns = {column.name for column in fields(TrainerRow)}
    assert live.as_row().keys() | APART | UNCHANGED == columns
    assert live.as_row().keys() == VALUES.keys() | {"metrics_at"} | ONLY_FINISHED, "the test above varies all"


def test_a_job_resumes_from_every_field_of_its_record(bench: Bench) -> None:
    spec = {"script": "/train.py", "nodes": "1-4"}
    row = bench.store.add_trainer(name="record", owner="c", spec=spec, time=5.0)
    first = JobRecord(Generation(3, ("t9-1",)), frozenset({"t9-1"}), ("n1",), 7, 2, "why", ever_ran=True)
    job = restored(bench, row, {}).job
    assert all(before != after for before, after in zip(job.record, first, strict=True))
    job.resume(first)
    assert job.record == first


def test_every_start_has_a_greater_number_also_after_the_restore_of_a_back_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.9)
    with Store.open(tmp_path / "bftrainer.db") as store:
        starts = [next_start(store)]
        store.backup(tmp_path / "copy.db")
        starts += [next_start(store), next_start(store)]
    assert starts == [1000, 1001, 1002], "within one second"
    monkeypatch.setattr("time.time", lambda: 1060.0)
    with Store.open(tmp_path / "copy.db") as restored:
        assert next_start(restored) == 1060
    monkeypatch.setattr("time.time", lambda: 5.0)
    with Store.open(tmp_path / "copy.db") as restored:
        assert next_start(restored) == 1061, "the clock was set back"


def test_workers_know_the_start_that_they_come_from(bench: Bench) -> None:
    bench.cluster.launchers = make_launchers(
        bench.folder, "bench", "127.0.0.1", bench.store.keep, bench.store.kept, start=7
    )
    bench.submit("1-4", name="started")
    bench.join("n1")
    assert {start.env[protocol.CONTROLLER_START] for start in bench.started} == {"7"}


def test_a_worker_that_outlives_the_restore_of_a_back_up_is_told_of_a_later_generation(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    trainer = bench.submit("1-8")
    bench.join("n1")
    bench.store.backup(tmp_path / "copy.db")
    for node in ("n2", "n3"):
        bench.join(node)
        bench.pass_time(5)
        bench.take(node)
        bench.pass_time(5)
    (worker,) = bench.workers.values()
    before = worker.generation
    bench.crash()
    for name in ("bftrainer.db-wal", "bftrainer.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    shutil.copy(tmp_path / "copy.db", tmp_path / "bftrainer.db")
    bench.open()
    assert bench.cluster.trainers[trainer].job.roster.generation.id < before
    bench.rejoin("n1")
    bench.settle()
    assert worker.generation > before
    assert bench.state(trainer) == "running"
    bench.store.close()
