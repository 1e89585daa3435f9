"""The doctor: a sound state has nothing above ok, and each thing that can be wrong is found."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bftrainer.cli import main
from bftrainer.cluster.doctor import doctor, invariants
from bftrainer.cluster.doctor.doctor import examine
from bftrainer.cluster.doctor.invariants import DoctorFinding
from bftrainer.cluster.serve import take_identity
from bftrainer.cluster.store.events import (
    NodeJoined,
    OtherEvent,
    ServeStarted,
    ServeStopped,
    StateChanged,
    WorkerStarted,
)
from bftrainer.cluster.store.state_folder import FOLDER_KEY, FolderIdentity
from bftrainer.cluster.store.store import Store
from bftrainer.errors import InputError
from bftrainer.processes.variables import STATE_ID

THIS = f"state-{os.getpid()}"
"""The id of the state. Tests in other processes must not take ours for their own."""


def live(store: Store) -> None:
    """What a controller writes in a short life: one trainer done, one running on two nodes, one in the queue."""
    store.keep("state_id", THIS)
    store.keep(FOLDER_KEY, FolderIdentity.of(store.path.parent).as_json())
    store.log(0.0, ServeStarted("local"))
    for n in (1, 2, 3):
        store.put_node(f"n{n}", host="127.0.0.1", agent=f"a{n}", pid=os.getpid(), joined=1.0)
        store.log(1.0, NodeJoined(f"n{n}", f"n{n}", "a"))
    for name in ("first", "second", "third"):
        row = store.add_trainer(name=name, owner="ada", spec={"script": "train.py"}, time=1.0)
        store.log(1.0, OtherEvent("trainer.submitted", trainer=row.id))
        if name != "first":  # it may be told or not
            store.log(1.0, OtherEvent("trainer.state", trainer=row.id, data={"from": "", "to": "queued"}))
    store.log(2.0, OtherEvent("decision", data={"nodes": {"first": ["n1"], "second": ["n2", "n3"]}}))
    for trainer, nodes in (("t1", ("n1",)), ("t2", ("n2", "n3"))):
        for number, node in enumerate(nodes, 1):
            worker = f"{trainer}-{number}"
            store.put_worker(worker, trainer=trainer, node=node, agent=f"a{node[1:]}", started=2.0)
            store.log(2.0, WorkerStarted(trainer, node, worker))
        store.update_trainer(trainer, next_worker=len(nodes) + 1)
        move(store, trainer, "queued", "starting")
        move(store, trainer, "starting", "running")
        store.log(3.0, OtherEvent("rescale", trainer=trainer, data={"generation": 1}))
        store.update_trainer(trainer, generation=1)
    store.log(4.0, OtherEvent("rescale", trainer="t2", data={"generation": 3}))
    store.update_trainer("t2", generation=3)
    store.end_worker("t1-1", ended=5.0, status=0, outcome="done")
    store.update_trainer("t1", samples=100, total=100, ended=5.0)
    move(store, "t1", "running", "done")
    store.log(6.0, OtherEvent("decision", data={"nodes": {"second": ["n2", "n3"]}}))


def move(store: Store, trainer: str, before: str, after: str) -> None:
    with store.transaction():
        store.update_trainer(trainer, state=after)
        store.log(5.0, StateChanged(trainer, before, after, ""))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    with Store.open(folder / "bftrainer.db") as store:
        live(store)
    for name in ("client.json", "agent-secret", "serve.lock"):
        (folder / name).touch(0o600)
    return folder


@contextmanager
def controller(folder: Path) -> Iterator[None]:
    """Hold the lock as a controller does."""
    with (folder / "serve.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def worse(findings: list[DoctorFinding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.what) for finding in findings if finding.level != "ok"]


def test_a_sound_state_beside_its_controller_has_nothing_above_ok(folder: Path) -> None:
    with controller(folder), Store.open(folder / "bftrainer.db"):
        findings = examine(folder)
    assert worse(findings) == []
    assert "a controller runs on this state" in {finding.what for finding in findings}


def test_a_sound_state_of_a_controller_that_ended_in_order_has_nothing_above_ok(folder: Path) -> None:
    with Store.open(folder / "bftrainer.db") as store:
        for worker in store.workers(running=True):
            store.end_worker(worker.worker, ended=7.0, status=-9, outcome="preempted")
        move(store, "t2", "running", "waiting")
        store.log(8.0, ServeStopped(drained=False))
    findings = examine(folder)
    assert worse(findings) == []
    assert "no controller runs on this state" in {finding.what for finding in findings}


def test_a_state_as_serve_makes_it_first_has_nothing_above_ok(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    Store.open(tmp_path / "bftrainer.db").close()
    assert worse(examine(tmp_path)) == []


def test_the_state_of_a_killed_controller_is_sound_and_the_kill_is_told(folder: Path) -> None:
    assert [level for level, _ in worse(examine(folder))] == ["warning", "warning"]
    assert "the last controller was killed: its serve.lock is stale" in {what for _, what in worse(examine(folder))}
    assert "2 workers ran when the controller ended" in {what for _, what in worse(examine(folder))}


def test_a_trimmed_log_is_sound_wherever_it_was_cut(folder: Path) -> None:
    with Store.open(folder / "bftrainer.db") as store, controller(folder):
        count = store.event_span().count
        for keep in range(count, -1, -1):
            store.trim_events(keep)
            assert worse(examine(folder)) == []


class Planted(NamedTuple):
    """Something wrong, and how it is found."""

    sql: str
    found: str


def event(kind: str, data: dict[str, Any], trainer: str = "t2") -> str:
    return f"INSERT INTO events (time, kind, trainer, data) VALUES (9, '{kind}', '{trainer}', '{json.dumps(data)}')"


ALL_EVENTS = "DROP TRIGGER events_refuse_delete; DELETE FROM events WHERE"


@pytest.mark.parametrize(
    "planted",
    [
        Planted("UPDATE trainers SET state = 'lost' WHERE number = 3", "in a state that does not exist, 'lost'"),
        Planted("UPDATE trainers SET ended = 5 WHERE number = 2", "t2 (second) has ended, but is running"),
        Planted("UPDATE trainers SET ended = NULL WHERE number = 1", "t1 (first) is done, but has no time of its end"),
        Planted("UPDATE trainers SET samples = 99 WHERE number = 1", "is done with 99 samples of 100"),
        Planted("UPDATE trainers SET samples = 101 WHERE number = 1", "is done with 101 samples of 100"),
        Planted(
            "DROP INDEX trainers_unfinished_name; UPDATE trainers SET name = 'second' WHERE number = 3",
            "2 unfinished trainers are named 'second'",
        ),
        Planted(
            "UPDATE trainers SET state = 'waiting' WHERE number = 2", "is waiting, but by its events it is running"
        ),
        Planted("UPDATE trainers SET state = 'waiting' WHERE number = 3", "is waiting, but by its events it is queued"),
        Planted(event("trainer.state", {"from": "waiting", "to": "running"}), "goes from 'waiting', but was running"),
        Planted(event("trainer.state", {"from": "done", "to": "running"}, "t1"), "continues after it was done"),
        Planted(event("trainer.state", {"from": "", "to": "queued"}), "goes from '', but was running"),
        Planted(event("trainer.state", {"from": [1], "to": "queued"}), "goes from [1], but was running"),
        Planted(event("trainer.state", {"to": "queued"}), "goes from None, but was running"),
        Planted(event("trainer.state", {"from": "running", "to": "lost"}), "changes to 'lost', which is not a state"),
        Planted(event("rescale", {"generation": 2}), "falls from generation 3 to 2"),
        Planted("UPDATE trainers SET generation = 2 WHERE number = 2", "in generation 2, but has been in 3"),
        Planted(event("worker.started", {"worker": "t2-1"}), "the worker id t2-1 is used a second time"),
        Planted("UPDATE trainers SET next_worker = 2 WHERE number = 2", "would reuse the number of worker t2-2"),
        Planted("UPDATE workers SET worker = 't9-1' WHERE worker = 't2-1'", "t9-1 is not named after its trainer, t2"),
        Planted(event("decision", {"nodes": {"a": ["n1", "n2"], "b": ["n2"]}}), "a decision gives n2 to a and to b"),
        Planted(event("decision", {"nodes": {"a": ["n1", "n1"]}}), "a decision gives n1 to a and to a"),
        Planted("UPDATE workers SET ended = NULL WHERE worker = 't1-1'", "worker t1-1 still runs on n1"),
        Planted("UPDATE nodes SET left = 5 WHERE node = 'n2'", "worker t2-1 runs on n2, which is not here"),
        Planted("UPDATE workers SET node = 'n3'", "2 workers run on n3: t2-1, t2-2"),
        Planted("UPDATE workers SET trainer = 9 WHERE worker = 't2-1'", "refers to a row of trainers that does not"),
        Planted(f"{ALL_EVENTS} seq IN (4, 6)", "2 events are missing between number 1 and"),
        Planted(f"{ALL_EVENTS} seq < 4", "the events from number 1 to 3 are missing"),
        Planted(f"{ALL_EVENTS} seq > 15", "the events after number 15 are missing"),
        Planted("UPDATE trainers SET metrics = '{'", "the database is damaged: it holds '{' where JSON must be"),
        Planted("DROP TRIGGER events_refuse_update; UPDATE events SET data = 'x' WHERE seq = 5", "it holds 'x' where"),
        Planted("PRAGMA user_version = 99", "written by a newer BFTrainer"),
        Planted("PRAGMA user_version = 0", "`bftrainer serve` brings it up to date"),
    ],
    ids=lambda planted: planted.found,
)
def test_what_is_wrong_in_the_database_is_found(folder: Path, planted: Planted) -> None:
    database = sqlite3.connect(folder / "bftrainer.db")
    database.executescript(planted.sql)
    database.close()
    with controller(folder):
        findings = worse(examine(folder))
    assert any(level == "error" and planted.found in what for level, what in findings), findings


def test_a_worker_that_is_slow_to_end_is_not_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(folder / "bftrainer.db") as store, controller(folder):
        store._db.run("UPDATE workers SET ended = NULL WHERE worker = 't1-1'")
        monkeypatch.setattr(doctor.time, "time", lambda: 5.0 + invariants.LAG_S)
        assert worse(examine(folder)) == []


def test_damage_to_the_file_is_found(folder: Path) -> None:
    path = folder / "bftrainer.db"
    with Store.open(path) as store:
        for n in range(300):
            store.log(9.0, OtherEvent("filler", data={"n": n}))
    whole = path.read_bytes()
    for page in range(2, len(whole) // 4096):
        path.write_bytes(whole[: page * 4096] + b"\xa5" * 4096 + whole[(page + 1) * 4096 :])
        findings = worse(examine(folder))
        assert "error" in {level for level, _ in findings}, page
        assert not any("\n" in what for _, what in findings)


@pytest.mark.parametrize("content", [b"", b"notes, not a database " * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_no_database_of_ours_is_an_error(folder: Path, content: bytes) -> None:
    (folder / "bftrainer.db").write_bytes(content)
    assert "error" in {level for level, _ in worse(examine(folder))}


def test_many_findings_of_a_kind_are_cut_short(folder: Path) -> None:
    with Store.open(folder / "bftrainer.db") as store, controller(folder):
        for _ in range(100):
            store.log(9.0, OtherEvent("worker.started", trainer="t2", data={"worker": "t2-1"}))
        findings = worse(examine(folder))
    assert len(findings) == invariants.MOST + 1
    assert findings[-1] == ("error", "and 90 more of this kind")


def test_nothing_is_changed_by_looking(folder: Path) -> None:
    def contents() -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.endswith(("-wal", "-shm"))}

    before = contents()
    examine(folder)
    assert contents() == before


def test_values_of_an_environment_that_a_back_up_does_not_have_are_told(folder: Path) -> None:
    with Store.open(folder / "bftrainer.db") as store, controller(folder):
        row = store.add_trainer(name="secret", owner="ada", spec={"script": "a.py", "env": {"KEY": "abc"}}, time=1.0)
        store.log(1.0, OtherEvent("trainer.submitted", trainer=row.id))
        assert worse(examine(folder)) == []
        store.environments.remove(row.id)
        ((level, what),) = worse(examine(folder))
    assert level == "warning"
    assert f"the values of KEY of trainer {row.id} are not in" in what


# The folder.


@pytest.mark.parametrize(
    ("name", "mode", "level"),
    [
        ("", 0o755, "warning"),
        ("bftrainer.db", 0o644, "warning"),
        ("client.json", 0o640, "error"),
        ("agent-secret", 0o604, "error"),
        ("environments", 0o750, "error"),
    ],
)
def test_what_others_can_read_is_told(folder: Path, name: str, mode: int, level: str) -> None:
    (folder / "environments").mkdir(mode=0o700)
    (folder / name).chmod(mode)
    with controller(folder):
        (finding,) = [finding for finding in examine(folder) if finding.level != "ok"]
    assert finding.level == level
    assert "open to others" in finding.what
    assert finding.advice.startswith("chmod ")


def test_a_disk_that_is_nearly_full_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(doctor, "ENOUGH_BYTES", usage.total + 1)
    with controller(folder):
        ((level, what),) = worse(examine(folder))
    assert level == "warning"
    assert "MB left" in what


# Processes.

WAITING = "import sys; print('here', flush=True); sys.stdin.read()"


@contextmanager
def process(*argv: str, output: Path | None = None, **env: str) -> Iterator[int]:
    """A process that waits until it is not needed any more."""
    argv = argv or ("-c", WAITING)
    with output.open("w") if output else open(os.devnull, "w") as file:  # noqa: PTH123
        running = subprocess.Popen(
            [sys.executable, *argv],
            env=os.environ | env,
            stdin=subprocess.PIPE,
            stdout=file if output else subprocess.PIPE,
        )
        try:
            if running.stdout:
                assert running.stdout.readline() == b"here\n"
            yield running.pid
        finally:
            running.kill()
            running.communicate()


@pytest.mark.waits
def test_a_process_of_a_worker_that_is_not_known_to_run_is_found(folder: Path) -> None:
    with controller(folder), process(BFTRAINER_STATE_ID=THIS, BFTRAINER_WORKER="t1-1") as pid:
        ((level, what),) = worse(examine(folder))
    assert (level, what) == ("warning", f"process {pid} is worker t1-1, which is not known to run")
    with controller(folder):
        assert worse(examine(folder)) == []


@pytest.mark.waits
def test_on_a_copy_of_the_folder_nothing_is_said_of_the_processes_and_the_end_of_the_original(folder: Path) -> None:
    copy = folder.with_name("restored")
    shutil.copytree(folder, copy)
    with process(BFTRAINER_STATE_ID=THIS, BFTRAINER_WORKER="t1-1"):
        findings = examine(copy)
    assert worse(findings) == []
    assert not any("kill" in finding.what + finding.advice for finding in findings)
    (told,) = [finding for finding in findings if "is a copy of" in finding.what]
    assert str(folder) in told.what
    assert f"bftrainer doctor --state {folder}" in told.advice


@pytest.mark.waits
def test_a_folder_that_does_not_say_which_it_was_gets_no_advice_to_kill(folder: Path) -> None:
    with Store.open(folder / "bftrainer.db") as store:
        store.keep(FOLDER_KEY, None)
    with controller(folder), process(BFTRAINER_STATE_ID=THIS, BFTRAINER_WORKER="t1-1"):
        findings = examine(folder)
    assert worse(findings) == []
    assert any("this folder may be a copy" in finding.what for finding in findings)


def test_a_controller_on_a_copy_takes_an_id_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = folder.with_name("restored")
    shutil.copytree(folder, copy)
    with Store.open(folder / "bftrainer.db") as store:
        assert take_identity(folder, store) == THIS
        assert capsys.readouterr().err == ""
    with Store.open(copy / "bftrainer.db") as store:
        own = take_identity(copy, store)
        assert own != THIS
        assert f"is a copy of {folder}" in capsys.readouterr().err
        assert take_identity(copy, store) == own


HERE = FolderIdentity("/state", "login1", 5, 77)


@pytest.mark.parametrize(
    ("now", "same"),
    [
        (FolderIdentity("/state", "login1", 9, 77), True),  # after a restart of the host
        (FolderIdentity("/state", "login2", 9, 77), True),  # a shared folder, seen from another host
        (FolderIdentity("/moved", "login1", 5, 77), True),
        (FolderIdentity("/state", "login1", 5, 78), True),  # a back-up took its place
        (FolderIdentity("/copy", "login1", 5, 78), False),
        (FolderIdentity("/state", "login2", 5, 78), False),
    ],
)
def test_a_folder_is_told_from_its_copies(now: FolderIdentity, same: bool) -> None:
    assert HERE.is_same(now) is same
    assert FolderIdentity.from_json(HERE.as_json()) == HERE


@pytest.mark.waits
def test_a_process_of_a_running_worker_or_of_another_state_is_left_in_peace(folder: Path) -> None:
    with (
        controller(folder),
        process(BFTRAINER_STATE_ID=THIS, BFTRAINER_WORKER="t2-1"),
        process(BFTRAINER_STATE_ID="other-state", BFTRAINER_WORKER="t1-1"),
        process(BFTRAINER_STATE_ID=THIS),
    ):
        assert worse(examine(folder)) == []


@pytest.mark.waits
def test_a_running_worker_without_controller_and_agent_is_an_orphan(folder: Path) -> None:
    def left_over() -> list[str]:
        return [what for _, what in worse(examine(folder)) if what.startswith("process")]

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with process(BFTRAINER_STATE_ID=THIS, BFTRAINER_WORKER="t2-1") as pid:
        assert left_over() == []  # its agent, this very process, lives
        with Store.open(folder / "bftrainer.db") as store:
            store.update_node("n2", pid=ended.pid)
        assert left_over() == [f"process {pid} is worker t2-1, which has neither a controller nor an agent any more"]
        with controller(folder):
            assert left_over() == []


@pytest.mark.waits
def test_a_forked_worker_is_known_by_its_output(folder: Path, tmp_path: Path) -> None:
    # Such a process shows the environment and the command line of the warm parent it was forked from.
    mark = "import sys  # bftrainer.processes.forker\nsys.stdin.read()"
    ready = "import sys  # bftrainer.processes.forker\nprint('here', flush=True); sys.stdin.read()"
    env = {STATE_ID: THIS, "BFTRAINER_WORKER": "t1-1"}
    with (
        controller(folder),
        process("-c", ready, **env),
        process("-c", mark, output=tmp_path / "t2-2.log", **env),
        process("-c", mark, output=tmp_path / "t2-7.log", **env) as orphan,
    ):
        assert [what for _, what in worse(examine(folder))] == [
            f"process {orphan} is worker t2-7, which is not known to run"
        ]


# The command.


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setenv("COLUMNS", "100")

    def call(*args: str) -> tuple[int, str, str]:
        status = main.run(["doctor", *args])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_the_command_says_that_all_is_in_order(folder: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    with controller(folder):
        status, out, err = run("--state", str(folder))
    assert (status, err) == (0, "")
    assert "the database file is sound" in out
    assert out.rstrip().endswith(f"{folder}: all in order")


def test_the_command_fails_on_errors_and_gives_json(
    folder: Path, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "client.json").chmod(0o644)
    monkeypatch.setenv("BFTRAINER_STATE", str(folder))
    status, out, err = run("--json")
    found = json.loads(out)
    assert (status, err) == (1, "")
    assert (found["state"], found["errors"], found["warnings"]) == (str(folder), 1, 2)
    assert {"level", "what", "advice"} == set(found["findings"][0])
    assert run()[0] == 1


def test_warnings_alone_do_not_fail(folder: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = run("--state", str(folder))
    assert status == 0
    assert "0 errors, 2 warnings" in out


def test_what_was_found_in_a_database_cannot_drive_the_terminal(
    folder: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    with Store.open(folder / "bftrainer.db") as store:
        store._db.run("UPDATE trainers SET state = ? WHERE number = 3", ("[red]\x1b[2J\n",))
        store._db.run("UPDATE trainers SET name = ? WHERE number = 3", ("[red]\x1b[2J\n",))
    status, out, _ = run("--state", str(folder))
    assert status == 1
    assert "\x1b[2J" not in out
    assert "[red]?[2J?" in out


def test_no_database_is_a_wrong_call(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    with pytest.raises(InputError, match="there is no bftrainer.db here"):
        examine(tmp_path)
    status, out, err = run("--state", str(tmp_path / "nowhere"))
    assert (status, out) == (2, "")
    assert err.startswith(f"bftrainer: {tmp_path / 'nowhere'}: there is no bftrainer.db here")
    assert err.count("\n") == 1
