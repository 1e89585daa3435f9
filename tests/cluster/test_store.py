"""The store: what it keeps, what it refuses, and that a kill or a full disk never leaves half of anything."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bftrainer.cluster.spec.states import FINISHED, STATES
from bftrainer.cluster.store import database, migrations
from bftrainer.cluster.store.database import DiskFullError
from bftrainer.cluster.store.events import OtherEvent
from bftrainer.cluster.store.store import Store
from bftrainer.errors import BFTrainerError, InputError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bftrainer.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.open(path) as opened:
        yield opened


def add(store: Store, name: str = "digits", **spec: Any) -> str:
    return store.add_trainer(name=name, owner="ada", spec=spec, time=1.0).id


class UndoError(Exception):
    """What a transaction is taken back with."""


def undone(store: Store, *changes: Callable[[], object]) -> None:
    """Make some changes in one transaction that then fails."""
    with store.transaction():
        for change in changes:
            change()
        raise UndoError


def one_line(caught: pytest.ExceptionInfo[BFTrainerError], path: Path) -> str:
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


# Trainers, workers, nodes.


def test_a_new_trainer_is_queued_and_has_an_id(store: Store) -> None:
    row = store.add_trainer(name="digits", owner="ada", spec={"script": "ü.py"}, time=5.0)
    assert (row.id, row.name, row.owner, row.state, row.submitted) == ("t1", "digits", "ada", "queued", 5.0)
    assert row.spec == {"script": "ü.py"}
    assert (row.next_worker, row.total, row.started, row.finished) == (1, None, None, False)
    assert add(store, "other") == "t2"


def test_a_name_is_free_again_once_its_trainer_has_finished(store: Store) -> None:
    first = add(store)
    with pytest.raises(InputError, match="'digits' is taken by trainer t1"):
        add(store)
    store.update_trainer(first, state="done", ended=9.0)
    second = add(store)
    assert second == "t2"
    newest = store.trainer("digits")
    oldest = store.trainer("t1")
    assert newest is not None
    assert newest.id == "t2"
    assert oldest is not None
    assert oldest.finished


def test_an_id_wins_over_a_name_that_looks_like_one(store: Store) -> None:
    add(store, "t2")
    assert [row.id for row in [store.trainer("t2")] if row] == ["t1"]
    add(store, "other")
    assert [row.name for row in [store.trainer("t2")] if row] == ["other"]
    assert store.trainer("nobody") is None
    assert store.trainer("t" + "9" * 40) is None


def test_ids_are_never_given_twice_even_when_a_submission_was_taken_back(store: Store) -> None:
    add(store, "a")
    with pytest.raises(UndoError):
        undone(store, lambda: add(store, "b"))
    assert [row.name for row in store.trainers()] == ["a"]
    assert add(store, "c") == "t2"


def test_trainers_are_listed_by_what_is_asked_for(store: Store) -> None:
    for name in ("old", "new", "live"):
        add(store, name)
    store.update_trainer("t1", state="failed", ended=10.0)
    store.update_trainer("t2", state="cancelled", ended=20.0)
    assert [row.name for row in store.trainers()] == ["old", "new", "live"]
    assert [row.name for row in store.trainers(unfinished=True)] == ["live"]
    assert [row.name for row in store.trainers(ended_after=15.0)] == ["new", "live"]


def test_an_update_says_what_it_cannot_do(store: Store) -> None:
    add(store)
    with pytest.raises(TypeError, match="no column colour"):
        store.update_trainer("t1", colour="red")
    with pytest.raises(BFTrainerError, match="state must be one of .* but got 'lost'"):
        store.update_trainer("t1", state="lost")
    with pytest.raises(BFTrainerError, match="there is no trainer t7"):
        store.update_trainer("t7", samples=1)
    with pytest.raises(BFTrainerError, match="there is no node n1"):
        store.update_node("n1", left=1.0)
    with pytest.raises(BFTrainerError, match="below 2\\*\\*63"):
        store.end_worker("t1-1", ended=1.0, status=1 << 70, outcome="")
    with pytest.raises(TypeError, match="no column colour"):
        store.update_node("n1", colour="red")


def test_what_json_and_unicode_cannot_say_is_stored_all_the_same(store: Store) -> None:
    add(store)
    store.update_trainer("t1", metrics={"loss": math.nan, "lr": [math.inf, 0.5]}, error="caf\udce9 \0 中")
    row = store.trainer("t1")
    assert row is not None
    assert row.metrics == {"loss": None, "lr": [None, 0.5]}
    assert row.error == "caf\\udce9 \0 中"
    store.update_trainer("t1", samples=1 << 70, step=-(1 << 70))
    (row,) = store.trainers()
    assert (row.samples, row.step) == (2**63 - 1, 1 - 2**63)
    store.keep("\ud800", {"a": "\ud800"})
    assert store.kept("\ud800") == {"a": "\\ud800"}
    store.keep("smile", ["\N{GRINNING FACE}", {"\ud800": 1}])
    assert store.kept("smile") == ["\N{GRINNING FACE}", {"\\ud800": 1}]


def test_workers_run_until_they_end_and_end_once(store: Store) -> None:
    add(store, "a")
    add(store, "b")
    store.put_node("n1", host="h", agent="x", pid=7, joined=1.0)
    store.put_worker("t1-1", trainer="t1", node="n1", agent="x", started=2.0)
    store.put_worker("t2-1", trainer="t2", node="n1", agent="x", started=3.0)
    store.end_worker("t1-1", ended=4.0, status=-9, outcome="preempted")
    store.end_worker("t1-1", ended=5.0, status=0, outcome="done")
    assert [row.worker for row in store.workers(running=True)] == ["t2-1"]
    (ended,) = store.workers(trainer="t1")
    assert (ended.ended, ended.status, ended.outcome) == (4.0, -9, "preempted")
    assert store.workers(running=True, trainer="t1") == []
    with pytest.raises(BFTrainerError):
        store.put_worker("t1-1", trainer="t1", node="n1", agent="x", started=6.0)
    with pytest.raises(BFTrainerError):
        store.put_worker("t1-2", trainer="t9", node="n1", agent="x", started=6.0)


def test_a_node_that_comes_back_is_here_again(store: Store) -> None:
    store.put_node("n1", host="h", agent="x", pid=7, joined=1.0)
    store.update_node("n1", leaving=5.0)
    store.update_node("n1", left=5.0)
    assert store.nodes() == []
    assert [row.left for row in store.nodes(here=False)] == [5.0]
    store.put_node("n1", host="h2", agent="y", pid=8, joined=9.0)
    (row,) = store.nodes()
    assert (row.host, row.agent, row.pid, row.joined, row.left, row.leaving) == ("h2", "y", 8, 9.0, None, None)


# Events.


def test_events_are_found_by_number_trainer_and_kind(store: Store) -> None:
    for n in range(10):
        store.log(float(n), OtherEvent("even" if n % 2 == 0 else "odd", trainer=f"t{n % 3}", data={"n": n}))
    assert [event.seq for event in store.events(limit=3)] == [8, 9, 10]
    assert [event.seq for event in store.events(after=2, limit=3)] == [3, 4, 5]
    assert [event.data["n"] for event in store.events(kind="odd", limit=2)] == [7, 9]
    assert [event.data["n"] for event in store.events(after=0, trainer="t0", kind="even")] == [0, 6]
    assert store.events(limit=0) == store.events(after=10) == store.events(after=1 << 80) == []
    assert len(store.events(limit=1 << 80)) == 10
    assert [event.seq for event in store.all_events()] == list(range(1, 11))
    assert [event.data["n"] for event in store.all_events(("odd",))] == [1, 3, 5, 7, 9]


def test_reading_all_events_ends_even_when_each_one_causes_another(store: Store) -> None:
    for n in range(2500):
        store.log(float(n), OtherEvent("x"))
    assert sum(1 for event in store.all_events() if store.log(event.time, OtherEvent("echo"))) == 2500


def test_events_cannot_be_changed_or_removed(store: Store, path: Path) -> None:
    store.log(1.0, OtherEvent("x"))
    other = sqlite3.connect(path)
    for statement in ("UPDATE events SET kind = 'y'", "DELETE FROM events"):
        with pytest.raises(sqlite3.IntegrityError, match="events are never"):
            other.execute(statement)
    other.close()
    assert [event.kind for event in store.events()] == ["x"]


def test_trimming_keeps_the_newest_events_and_the_guard(store: Store, path: Path) -> None:
    for n in range(10):
        store.log(float(n), OtherEvent("x"))
    assert store.trim_events(20) == 0
    assert store.trim_events(4) == 6
    assert store.trim_events(4) == 0
    assert [event.seq for event in store.events()] == [7, 8, 9, 10]
    span = store.event_span()
    assert (span.first, span.last, span.count, span.trimmed) == (7, 10, 4, 6)
    with pytest.raises(BFTrainerError, match="never removed"):
        store._db.run("DELETE FROM events")
    with pytest.raises(BFTrainerError, match="never changed"):
        store._db.run("UPDATE events SET kind = 'y'")
    assert store.trim_events(0) == 4
    assert store.log(11.0, OtherEvent("x")) == 11
    with pytest.raises(InputError, match="must be 0 or more"):
        store.trim_events(-1)


# Transactions.


def test_an_inner_transaction_that_fails_takes_back_its_own_part_only(store: Store) -> None:
    with store.transaction():
        store.keep("outer", 1)
        with pytest.raises(UndoError):
            undone(store, lambda: store.keep("inner", 1))
        with store.transaction():
            store.keep("second", 1)
    assert [store.kept(key) for key in ("outer", "inner", "second")] == [1, None, 1]


def test_an_inner_transaction_is_taken_back_with_the_outer_one(store: Store) -> None:
    def inner() -> None:
        with store.transaction():
            store.keep("second", 2)

    store.keep("second", 1)
    with pytest.raises(UndoError):
        undone(store, inner)
    assert store.kept("second") == 1


def test_after_an_error_that_ends_the_transaction_nothing_more_goes_in(store: Store) -> None:
    end = lambda: store._db.connection.execute("ROLLBACK")  # noqa: E731 - as SQLite does when the disk is full
    with pytest.raises(BFTrainerError, match="begin another one"):
        undone(store, lambda: store.keep("a", 1), end, lambda: store.keep("b", 1))
    assert store.kept("a") is None
    assert store.kept("b") is None
    store.keep("c", 1)
    assert store.kept("c") == 1


def test_a_reader_sees_one_instant_while_another_process_writes(store: Store, path: Path) -> None:
    store.keep("n", 1)
    with Store.open(path, read_only=True) as reader:
        with reader.transaction():
            assert reader.kept("n") == 1
            store.keep("n", 2)
            assert reader.kept("n") == 1
        assert reader.kept("n") == 2


# Tokens.


def test_a_token_is_known_by_its_hash_until_it_is_revoked(store: Store, path: Path) -> None:
    token = store.tokens.create(name="laptop", owner="ada", role="user", time=1.0)
    assert token.startswith("bft_")
    assert len(token) >= 4 + 43
    found = store.tokens.check(token)
    assert found is not None
    assert (found.name, found.owner, found.role) == ("laptop", "ada", "user")
    assert store.tokens.check(token[:-1]) is None
    assert store.tokens.check("") is None
    with pytest.raises(InputError, match="a token named 'laptop' already exists"):
        store.tokens.create(name="laptop", owner="ada", role="user", time=2.0)
    assert store.tokens.revoke("laptop", 3.0)
    assert not store.tokens.revoke("laptop", 4.0)
    assert store.tokens.check(token) is None
    assert [row.revoked for row in store.tokens.all()] == [3.0]
    second = store.tokens.create(name="laptop", owner="ada", role="admin", time=5.0)
    assert store.tokens.revoke(str(store.tokens.all()[-1].id), 6.0)
    assert store.tokens.check(second) is None
    with pytest.raises(InputError, match="role must be one of user, admin"):
        store.tokens.create(name="x", owner="ada", role="root", time=2.0)
    store.close()
    assert all(token.encode() not in file.read_bytes() for file in path.parent.iterdir())


def test_a_token_expires_and_its_name_is_free_then(store: Store) -> None:
    token = store.tokens.create(name="laptop", owner="ada", role="user", time=1.0, expires=100.0)
    lasting = store.tokens.create(name="monitor", owner="ada", role="monitor", time=1.0)
    assert store.tokens.check(token, 99.0)
    assert store.tokens.check(token, 100.0) is None
    assert store.tokens.check(token) is None  # now
    assert store.tokens.check(lasting, 1e12)
    assert store.tokens.why_refused(token) == (
        "the token laptop has expired at 1970-01-01 00:01 UTC: ask the operator for another (`bftrainer token create`)"
    )
    assert [store.tokens.why_refused(other) for other in ("", "x" * 40, lasting)] == ["", "", ""]
    with pytest.raises(InputError, match="already exists"):
        store.tokens.create(name="laptop", owner="ada", role="user", time=99.0)
    again = store.tokens.create(name="laptop", owner="ada", role="user", time=100.0)
    assert store.tokens.check(again)
    assert [(row.name, row.expires, row.revoked) for row in store.tokens.all()] == [
        ("laptop", 100.0, 100.0),
        ("monitor", None, None),
        ("laptop", None, None),
    ]


def test_the_use_of_a_token_is_noted_now_and_then(store: Store) -> None:
    token = store.tokens.create(name="a", owner="ada", role="user", time=1.0)
    used = []
    for time in (10.0, 30.0, 70.0):
        assert store.tokens.check(token, time)
        used.append(store.tokens.all()[0].last_used)
    assert used == [10.0, 10.0, 70.0]


def test_an_adopted_token_replaces_the_one_before_and_stays_revoked(store: Store) -> None:
    old, new = "o" * 40, "n" * 40
    given: dict[str, Any] = {"name": "this machine", "owner": "ada", "role": "admin", "time": 1.0}
    assert store.tokens.adopt(old, **given)
    assert store.tokens.adopt(old, **given)
    assert len(store.tokens.all()) == 1
    assert store.tokens.adopt(new, **given)
    assert store.tokens.check(old) is None
    assert store.tokens.check(new)
    assert not store.tokens.adopt(old, **given)
    with pytest.raises(InputError, match="32 characters or more, but got 3"):
        store.tokens.adopt("abc", **given)


# The file.


def test_a_new_file_is_for_its_owner_alone_and_uses_the_write_ahead_log(store: Store, path: Path) -> None:
    store.keep("a", 1)
    assert {oct(file.stat().st_mode & 0o777) for file in path.parent.iterdir()} == {"0o600"}
    pragmas = [store._db.rows(f"PRAGMA {name}")[0][0] for name in ("journal_mode", "synchronous", "foreign_keys")]
    assert pragmas == ["wal", 1, 1]


@pytest.mark.parametrize("version", range(len(migrations.MIGRATIONS)))
def test_every_older_version_is_brought_up_to_date(path: Path, version: int) -> None:
    old = sqlite3.connect(path, isolation_level=None)  # each statement is committed, the version too
    for statements in migrations.MIGRATIONS[:version]:
        for statement in statements:
            old.execute(statement)
    old.execute(f"PRAGMA user_version = {version}")
    old.close()
    with Store.open(path) as store:
        assert store._db.rows("PRAGMA user_version")[0][0] == len(migrations.MIGRATIONS)
        assert add(store) == "t1"
        assert store.problems() == []
        made = {row[0] for row in store._db.rows("SELECT sql FROM sqlite_master")}
    with Store.open(path.with_name("fresh.db")) as fresh:
        assert made == {row[0] for row in fresh._db.rows("SELECT sql FROM sqlite_master")}


def test_sums_and_nodes_from_before_gpus_were_counted_are_taken_up_with_none(path: Path) -> None:
    old = sqlite3.connect(path, isolation_level=None)
    for statements in migrations.MIGRATIONS[:7]:
        for statement in statements:
            old.execute(statement)
    old.execute("PRAGMA user_version = 7")
    old.execute(
        "INSERT INTO trainers (name, owner, spec, state, submitted, ended, node_seconds) "
        "VALUES ('old', 'ann', '{}', 'done', 1, 2, 50)"
    )
    old.execute("INSERT INTO removed_sums VALUES ('ann', 'done', 3, 9, 100, 0, 0, 0, 0)")
    old.execute("INSERT INTO nodes (node, host, agent, pid, joined) VALUES ('n1', 'h', 'a', 1, 1)")
    old.close()
    with Store.open(path) as store:
        assert store.totals.of_finished() == {"ann": (4, 150.0, 9, 0.0)}
        assert store.nodes()[0].gpus == 0
        store.update_trainer("t1", gpu_seconds=200.0)
        before = (store.totals.by_state(), store.totals.ended(float("-inf"), 1e9))
        assert (before[0][0].node_seconds, before[0][0].gpu_seconds) == (150.0, 200.0)
        store.totals.remove([1])
        assert store.trainers() == []
        assert (store.totals.by_state(), store.totals.ended(float("-inf"), 1e9)) == before


def test_an_empty_file_as_a_kill_leaves_it_is_a_new_database(path: Path) -> None:
    path.touch()
    with Store.open(path) as store:
        assert store.trainers() == []


def test_a_migration_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(path) as store:
        add(store)
    later = ("CREATE TABLE extra (a)",)
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, later, ("CREATE TABLE more (a)", "nonsense")))
        with pytest.raises(BFTrainerError, match="syntax error"):
            Store.open(path)
    reading = sqlite3.connect(path)
    assert reading.execute("PRAGMA user_version").fetchone() == (len(migrations.MIGRATIONS) + 1,)
    tables = {row[0] for row in reading.execute("SELECT name FROM sqlite_master")}
    reading.close()
    assert "extra" in tables
    assert "more" not in tables
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, later, ("CREATE TABLE more (a)",)))
    with Store.open(path) as store:
        assert [row.id for row in store.trainers()] == ["t1"]


def test_a_newer_version_is_refused(path: Path) -> None:
    Store.open(path).close()
    newer = sqlite3.connect(path)
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    for read_only in (False, True):
        with pytest.raises(BFTrainerError, match="written by a newer BFTrainer .*99") as caught:
            Store.open(path, read_only=read_only)
        one_line(caught, path)


def test_the_database_of_another_program_is_left_alone(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE songs (name)")
    other.commit()
    other.close()
    before = path.read_bytes()
    with pytest.raises(BFTrainerError, match="another program") as caught:
        Store.open(path)
    one_line(caught, path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_refused_and_kept(path: Path) -> None:
    path.write_bytes(b"precious notes " * 1000)
    for read_only in (False, True):
        with pytest.raises(BFTrainerError, match="not a database; move the file away") as caught:
            Store.open(path, read_only=read_only)
        one_line(caught, path)
    assert path.read_bytes() == b"precious notes " * 1000


def test_a_missing_folder_or_file_is_said_clearly(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "x.db", tmp_path):
        with pytest.raises(BFTrainerError, match="folder must exist") as caught:
            Store.open(path)
        one_line(caught, path)
    with pytest.raises(InputError, match="there is no database here") as caught:
        Store.open(tmp_path / "x.db", read_only=True)
    one_line(caught, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_store_reads_and_refuses_to_write(store: Store, path: Path) -> None:
    add(store)
    with Store.open(path, read_only=True) as reader:
        assert [row.id for row in reader.trainers()] == ["t1"]
        with pytest.raises(BFTrainerError, match="cannot be written") as caught:
            reader.keep("a", 1)
        one_line(caught, path)


def test_an_older_file_is_not_brought_up_to_date_by_a_reader(path: Path) -> None:
    path.touch()
    with pytest.raises(BFTrainerError, match="`bftrainer serve` brings it up to date"):
        Store.open(path, read_only=True)
    assert path.stat().st_size == 0


def test_another_process_that_holds_the_database_is_waited_for_and_then_named(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    with Store.open(path) as second, store.transaction():
        with pytest.raises(BFTrainerError, match="another program holds the database") as caught:
            second.keep("a", 1)
        one_line(caught, path)


def test_a_full_disk_takes_the_whole_transaction_back(store: Store, path: Path) -> None:
    store.keep("n", 1)
    pages = store._db.rows("PRAGMA page_count")[0][0]
    store._db.run(f"PRAGMA max_page_count = {pages + 2}")
    much = {"text": "x" * 100_000}
    with pytest.raises(DiskFullError, match="the disk is full; free some space") as caught:
        undone(store, lambda: store.keep("n", 2), lambda: store.log(1.0, OtherEvent("x", data=much)))
    one_line(caught, path)
    assert store.kept("n") == 1
    assert store.events() == []
    store._db.run("PRAGMA max_page_count = 1000000")
    store.keep("n", 3)
    assert store.kept("n") == 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True)
    if not done or done.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.waits
def test_a_disk_that_is_really_full_is_named_and_work_goes_on_once_there_is_room(small_disk: Path) -> None:
    path = small_disk / "bftrainer.db"
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 600_000)
    with Store.open(path) as store:
        written = 0

        def write() -> None:
            nonlocal written
            while written < 1000:
                with store.transaction():
                    store.keep("n", written)
                    store.log(1.0, OtherEvent("x", data={"n": written, "text": "x" * 10_000}))
                written += 1

        with pytest.raises(DiskFullError) as caught:
            write()
        one_line(caught, path)
        with pytest.raises(DiskFullError):
            store.backup(small_disk / "copy.db")
        assert sorted(file.name for file in small_disk.iterdir() if "copy" in file.name) == []
        ballast.unlink()
        assert store.kept("n") == store.events(limit=1)[0].data["n"] == written - 1
        store.keep("n", -1)
    with Store.open(path) as store:
        assert store.kept("n") == -1
        assert store.problems() == []


@pytest.mark.waits
def test_a_read_only_file_system_is_said_clearly(small_disk: Path) -> None:
    path = small_disk / "bftrainer.db"
    with Store.open(path) as store:
        store.backup(small_disk / "copy.db")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for name in ("bftrainer.db", "new.db"):
        with pytest.raises(BFTrainerError, match="writ") as caught:
            Store.open(small_disk / name)
        one_line(caught, small_disk / name)
    with Store.open(small_disk / "copy.db", read_only=True) as store:
        assert store.trainers() == []


def test_a_disk_too_full_for_a_new_file_is_said_clearly(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(database.os, "open", full)
    with pytest.raises(DiskFullError) as caught:
        Store.open(path)
    one_line(caught, path)


def test_a_damaged_row_is_said_clearly(store: Store) -> None:
    add(store)
    for text in ("{", "[]", "[" * 100_000):
        store._db.run("UPDATE trainers SET spec = ?", (text,))
        with pytest.raises(BFTrainerError, match="the database is damaged"):
            store.trainers()


def test_a_back_up_is_one_whole_file_that_can_be_put_in_place(store: Store, tmp_path: Path, path: Path) -> None:
    add(store)
    store.log(1.0, OtherEvent("x"))
    copy = tmp_path / "copies" / "copy.db"
    with pytest.raises(BFTrainerError, match="folder must exist"):
        store.backup(copy)
    copy.parent.mkdir()
    copy.write_text("the back-up of yesterday")
    with Store.open(path, read_only=True) as reader:
        reader.backup(copy)
    assert [file.name for file in copy.parent.iterdir()] == ["copy.db"]
    assert copy.stat().st_mode & 0o777 == 0o600
    with Store.open(copy) as restored:
        assert restored.trainers() == store.trainers()
        assert restored.events() == store.events()
        assert restored.problems() == []
    with pytest.raises(InputError, match="another file than the database"):
        store.backup(path)
    with pytest.raises(BFTrainerError, match="within a transaction"), store.transaction():
        store.backup(copy)


# Killed at any instant.

WRITER = """
import sys
from pathlib import Path
from bftrainer.cluster.store.events import OtherEvent
from bftrainer.cluster.store.store import Store

store = Store.open(Path(sys.argv[1]))
if store.trainer("t1") is None:
    store.add_trainer(name="a", owner="b", spec={}, time=0.0)
begin = store.trainer("t1").samples
for n in range(begin + 1, begin + 1_000_000):
    with store.transaction():
        store.update_trainer("t1", samples=n)
        if n % 7 == 0:
            print("midst", flush=True)
        store.log(float(n), OtherEvent("n", trainer="t1", data={"n": n, "text": "x" * (n * 37 % 5000)}))
        if n % 50 == 0:
            store.trim_events(20)
        store.keep("n", n)
    print(n, flush=True)
"""


@pytest.mark.waits
@pytest.mark.parametrize("kills", [(3, 40, 14, 101, 7, 260)])
def test_killed_at_any_instant_the_state_and_the_log_agree_and_nothing_told_is_lost(
    path: Path, kills: tuple[int, ...]
) -> None:
    for lines in kills:
        writer = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        told = [writer.stdout.readline() for _ in range(lines)]
        writer.send_signal(signal.SIGKILL)
        told += writer.stdout.readlines()
        assert writer.wait() == -signal.SIGKILL
        writer.stdout.close()
        committed = max(int(line) for line in told if line.endswith("\n") and line.strip().isdigit())
        with Store.open(path) as store:
            row = store.trainer("t1")
            assert row is not None
            newest = store.events(limit=1)[0]
            assert row.samples == store.kept("n") == newest.data["n"] == newest.seq
            assert row.samples - committed in (0, 1)
            span = store.event_span()
            assert span.last - span.first + 1 == span.count
            assert span.first == span.trimmed + 1
            assert store.problems() == []


DYING = """
import os, signal, sys
from pathlib import Path
from bftrainer.cluster.store.events import OtherEvent
from bftrainer.cluster.store.store import Store

def step(number):
    if number == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

store = Store.open(Path(sys.argv[1]))
with store.transaction():
    store.update_trainer("t1", samples=2)
    step(1)
    store.log(1.0, OtherEvent("n", data={"text": "x" * 5_000_000}))
    step(2)
    store.trim_events(0)
    step(3)
    store.keep("n", 2)
    step(4)
step(5)
"""


@pytest.mark.waits
@pytest.mark.parametrize("step", range(1, 6))
def test_a_kill_within_a_transaction_takes_all_of_it_back_and_one_after_it_nothing(path: Path, step: int) -> None:
    with Store.open(path) as store:
        add(store)
        store.update_trainer("t1", samples=1)
        store.log(1.0, OtherEvent("n"))
        store.keep("n", 1)
    assert subprocess.run([sys.executable, "-c", DYING, path, str(step)]).returncode == -signal.SIGKILL
    with Store.open(path) as store:
        found = [(row.samples, store.kept("n"), store.event_span().count) for row in store.trainers()]
        assert found == [(2, 2, 0) if step == 5 else (1, 1, 1)]
        assert store.log(2.0, OtherEvent("n")) == (3 if step == 5 else 2)
        assert store.problems() == []


# The state is the fold of the operations.

NAMES = st.sampled_from(["a", "b", "c", "ü"])
NODES = st.sampled_from(["n1", "n2", "n3"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
COLUMNS = st.fixed_dictionaries(
    {},
    optional={
        "state": st.sampled_from([state for state in STATES if state not in FINISHED]),
        "samples": st.integers(0, 2**63 - 1),
        "total": st.none() | st.integers(0, 10),
        "reason": st.text(st.characters(exclude_categories=["Cs"])),
        "metrics": st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False), max_size=2),
        "node_seconds": st.floats(0, 1e12),
    },
)


class StoreMachine(RuleBasedStateMachine):
    """Does the same to a store and to plain dictionaries."""

    folder: str

    def __init__(self) -> None:
        super().__init__()
        self.store = Store.open(Path(self.folder))
        self.trainers: dict[str, dict[str, Any]] = {}
        self.nodes: dict[str, float | None] = {}
        self.workers: dict[str, bool] = {}
        self.kept: dict[str, Any] = {}
        self.events: list[tuple[int, str]] = []
        self.seq = 0
        self.given = 0

    def teardown(self) -> None:
        self.store.close()

    @rule(name=NAMES, spec=st.dictionaries(st.text(), VALUES, max_size=2))
    def submit(self, name: str, spec: dict[str, Any]) -> None:
        taken = any(t["name"] == name and t["state"] not in FINISHED for t in self.trainers.values())
        try:
            row = self.store.add_trainer(name=name, owner="o", spec=spec, time=1.0)
        except InputError:
            assert taken
            return
        assert not taken
        assert row.id == f"t{len(self.trainers) + 1}"
        self.trainers[row.id] = {"name": name, "spec": spec, "state": "queued"}

    @precondition(lambda self: self.trainers)
    @rule(data=st.data(), columns=COLUMNS)
    def update(self, data: st.DataObject, columns: dict[str, Any]) -> None:
        live = [name for name, trainer in self.trainers.items() if trainer["state"] not in FINISHED]
        if live:
            name = data.draw(st.sampled_from(live))
            self.store.update_trainer(name, **columns)
            self.trainers[name].update(columns)

    @precondition(lambda self: self.trainers)
    @rule(data=st.data(), state=st.sampled_from(FINISHED))
    def finish(self, data: st.DataObject, state: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.trainers)))
        with self.store.transaction():
            self.store.update_trainer(name, state=state, ended=5.0)
            self.trainers[name].update(state=state, ended=5.0)

    @rule(node=NODES)
    def join(self, node: str) -> None:
        self.store.put_node(node, host="h", agent="a", pid=1, joined=1.0)
        self.nodes[node] = None

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted(self.nodes)))
        self.store.update_node(node, left=2.0)
        self.nodes[node] = 2.0

    @precondition(lambda self: self.nodes and self.trainers)
    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        self.given += 1
        trainer = data.draw(st.sampled_from(sorted(self.trainers)))
        name = f"{trainer}-{self.given}"
        node = data.draw(st.sampled_from(sorted(self.nodes)))
        self.store.put_worker(name, trainer=trainer, node=node, agent="a", started=1.0)
        self.workers[name] = True

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        self.store.end_worker(name, ended=2.0, status=0, outcome="done")
        self.workers[name] = False

    @rule(key=NAMES, value=VALUES)
    def keep(self, key: str, value: Any) -> None:
        self.store.keep(key, value)
        self.kept[key] = value

    @rule(kind=NAMES)
    def log(self, kind: str) -> None:
        self.seq += 1
        assert self.store.log(1.0, OtherEvent(kind)) == self.seq
        self.events.append((self.seq, kind))

    @rule(most=st.integers(0, 5))
    def trim(self, most: int) -> None:
        gone = max(0, len(self.events) - most)
        assert self.store.trim_events(most) == gone
        self.events = self.events[gone:]

    @rule(key=NAMES, kind=NAMES)
    def take_back(self, key: str, kind: str) -> None:
        store = self.store

        def node() -> None:
            with store.transaction():
                store.put_node("never", host="h", agent="a", pid=1, joined=1.0)

        changes = (
            lambda: store.keep(key, "never"),
            lambda: store.log(1.0, OtherEvent(kind)),
            lambda: store.trim_events(0),
            node,
        )
        with pytest.raises(UndoError):
            undone(store, *changes)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = Store.open(Path(self.folder))

    @invariant()
    def agrees(self) -> None:
        rows = self.store.trainers()
        assert [row.id for row in rows] == list(self.trainers)
        for row in rows:
            assert {key: getattr(row, key) for key in self.trainers[row.id]} == self.trainers[row.id]
        assert {row.node: row.left for row in self.store.nodes(here=False)} == self.nodes
        assert {row.worker: row.ended is None for row in self.store.workers()} == self.workers
        assert {key: self.store.kept(key) for key in self.kept} == self.kept
        assert [(event.seq, event.kind) for event in self.store.events(limit=1000)] == self.events


def test_the_state_is_what_the_operations_add_up_to(tmp_path_factory: pytest.TempPathFactory) -> None:
    class Machine(StoreMachine):
        def __init__(self) -> None:
            self.folder = str(tmp_path_factory.mktemp("machine") / "bftrainer.db")
            super().__init__()

    case = Machine.TestCase
    case.settings = settings(max_examples=40, stateful_step_count=25)
    case().runTest()


def test_all_that_is_stored_can_be_read_by_any_sqlite_tool(store: Store, path: Path) -> None:
    add(store, script="a.py")
    store.log(1.0, OtherEvent("x", data={"n": 1}))
    other = sqlite3.connect(path)
    ((spec,),) = other.execute("SELECT spec FROM trainers").fetchall()
    ((data,),) = other.execute("SELECT data FROM events").fetchall()
    other.close()
    assert json.loads(spec) == {"script": "a.py"}
    assert json.loads(data) == {"n": 1}


@pytest.mark.parametrize("target", [".", "/", "pipe"])
def test_a_back_up_goes_to_a_file_and_to_nothing_else(
    store: Store, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(InputError, match="is not a file: name the file"):
        store.backup(Path(target))
    assert Path("pipe").is_fifo()
