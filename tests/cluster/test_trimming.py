"""The database stays within its limits: pieces are small, the file shrinks, and no sum falls."""

from __future__ import annotations

import sqlite3
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bftrainer.cluster.store import trimming
from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.events import OtherEvent
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.cluster.store.trimming import DatabaseLimits, Trimmer

NO_LIMIT = DatabaseLimits(events=10**9, events_s=None, most_bytes=None)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / FILE) as opened:
        yield opened


def fill(store: Store, count: int, size: int = 10, start: float = 0.0) -> None:
    with store.transaction():
        for number in range(count):
            store.log(start + number, OtherEvent("x", data={"text": "x" * size}))


def ended(store: Store, owner: str, time: float, state: str = "done") -> str:
    """A finished trainer with a worker and some points."""
    row = store.add_trainer(name=f"{owner}{time}", owner=owner, spec={"script": "a.py"}, time=time - 1)
    store.put_node("n1", host="h", agent="a", pid=1, joined=0.0)
    store.put_worker(f"{row.id}-1", trainer=row.id, node="n1", agent="a", started=time - 1)
    store.end_worker(f"{row.id}-1", ended=time, status=0, outcome="done")
    for number in range(5):
        store.add_point(row.id, time - 1 + number / 10, number, {"loss": 1.0}, {})
    store.update_trainer(row.id, state=state, ended=time, samples=10, node_seconds=2.5, rescales=1)
    return row.id


def test_events_go_by_number_age_and_bytes_a_few_at_a_time(store: Store) -> None:
    fill(store, 3000)
    trimmer = store.trimmer(replace(NO_LIMIT, events=2500))
    lengths = []
    while trimmer.step(3000.0):
        lengths.append(store.event_span().count)
    assert lengths[-1] == 2500
    assert all(before - after <= 300 for before, after in zip([3000, *lengths], lengths, strict=False))
    store.trimmer(replace(NO_LIMIT, events_s=1000.0)).finish(3000.0)
    assert store.event_span().count == 1000
    fill(store, 4000, size=2000, start=3000.0)
    used = store.size()[0]
    assert used > 6e6
    store.trimmer(replace(NO_LIMIT, most_bytes=4_000_000)).finish(7000.0)
    assert store.size()[0] <= 4_000_000
    assert store.event_span().last == 7000
    store.trimmer(replace(NO_LIMIT, most_bytes=1)).finish(7000.0)
    assert store.event_span().count == trimming.LEAST_EVENTS


def test_pieces_become_smaller_when_they_take_long_and_larger_when_they_are_quick(store: Store) -> None:
    fill(store, 6000)
    took = 0.0

    def clock() -> float:
        nonlocal now
        now += took
        return now

    now = 0.0
    trimmer = Trimmer(store._db, store.event_log, store.totals, replace(NO_LIMIT, events=10), clock)
    sizes = []
    for took in (0.04, 0.04, 0.04, 0.04, 0.001, 0.001, 0.001):  # noqa: B007 - the clock uses it
        before = store.event_span().count
        assert trimmer.step(6000.0)
        sizes.append(before - store.event_span().count)
    assert sizes[:4] == sorted(sizes[:4], reverse=True)
    assert min(sizes) == trimming._FEWEST
    assert sizes[4:] == sorted(sizes[4:])
    assert sizes[-1] > sizes[4]


def test_the_file_shrinks_after_a_trim(store: Store, tmp_path: Path) -> None:
    fill(store, 4000, size=5000)
    store._db.run("PRAGMA wal_checkpoint(TRUNCATE)")
    large = (tmp_path / FILE).stat().st_size
    assert large > 20e6
    store.trimmer(replace(NO_LIMIT, events=100)).finish(5000.0)
    store._db.run("PRAGMA wal_checkpoint(TRUNCATE)")
    assert (tmp_path / FILE).stat().st_size < large / 3
    assert store.problems() == []


def test_nothing_to_trim_is_looked_for_once_a_minute(store: Store) -> None:
    fill(store, 100)
    trimmer = store.trimmer(replace(NO_LIMIT, events=100))
    assert not trimmer.step(1000.0)
    fill(store, 10)
    assert not trimmer.step(1010.0)
    assert trimmer.step(1000.0 + trimming.CHECK_EVERY_S)


def test_rows_from_before_the_log_go_and_sums_stay(store: Store) -> None:
    old = [ended(store, "ann", time) for time in (10.0, 20.0)] + [ended(store, "bob", 30.0, "failed")]
    late = ended(store, "ann", 5000.0)
    running = store.add_trainer(name="runs", owner="ann", spec={}, time=1.0).id
    fill(store, 3000, start=1000.0)
    before = (store.totals.by_state(), store.totals.of_finished(), dict(_ended(store)))
    trimmer = store.trimmer(replace(NO_LIMIT, events=1000))
    trimmer.remove(int(id_[1:]) for id_ in [*old, running])
    trimmer.finish(4000.0)
    assert [row.id for row in store.trainers()] == [late, running]
    assert {worker.trainer for worker in store.workers()} == {late}
    assert store.points(late)
    assert not store._db.rows("SELECT 1 FROM points WHERE trainer <> ?", (int(late[1:]),))
    assert (store.totals.by_state(), store.totals.of_finished(), dict(_ended(store))) == before
    assert store.totals.removed() == 3
    assert store.problems() == []


def test_without_a_cut_in_the_log_no_row_goes(store: Store) -> None:
    ended(store, "ann", 10.0)
    fill(store, 100, start=1000.0)
    trimmer = store.trimmer(NO_LIMIT)
    trimmer.remove([1])
    trimmer.finish(1e9)
    assert len(store.trainers()) == len(store.workers()) == 1


def test_a_file_of_0_1_0_is_made_to_shrink_once(tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).parent / "state-0.1.0.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    with Store.open(tmp_path / FILE) as store:
        events = list(store.all_events())
        assert not store._db.shrinkable
        assert "takes long to rewrite" in store.make_shrinkable(most_bytes=1000)
        assert store.make_shrinkable() == ""
        assert store._db.shrinkable
        assert list(store.all_events()) == events
    with Store.open(tmp_path / FILE) as store:
        assert store._db.shrinkable
        assert store.problems() == []


def test_a_file_in_use_is_not_rewritten_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(Path(__file__).parent / "state-0.1.0.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    monkeypatch.setattr("bftrainer.cluster.store.database.BUSY_S", 0.05)
    with Store.open(tmp_path / FILE) as store:
        other = sqlite3.connect(tmp_path / FILE)
        other.execute("BEGIN IMMEDIATE")
        assert "another program holds the database" in store.make_shrinkable()
        other.close()
        assert store.event_span().count


def test_values_of_jobs_that_are_over_do_not_stay(tmp_path: Path) -> None:
    path = tmp_path / FILE
    with Store.open(path) as store:
        store.keep("job.t7", {"nodes": []})
        store.forget("job.t7")
        assert store.kept("job.t7") is None
        assert not store._db.rows("SELECT 1 FROM kept WHERE key = 'job.t7'")
    db = Database.open(path, read_only=False)
    assert db.shrinkable
    db.close()


def _ended(store: Store) -> list[tuple[str, tuple[int, float, int, float]]]:
    return [(owner, tuple(figures)) for owner, *figures in store.totals.ended(float("-inf"), 1e9)]  # type: ignore[misc]
