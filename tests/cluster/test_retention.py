"""Files of finished trainers go by age, size and on request; those of others never, and nobody exceeds a quota."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from bftrainer.cli.main import run
from bftrainer.cluster import serve
from bftrainer.cluster.config.keys import DEFAULTS, Config, RetentionSettings, Server
from bftrainer.cluster.config.load import load_config
from bftrainer.cluster.controller.owners import OwnerLimits, QuotaError
from bftrainer.cluster.doctor import invariants
from bftrainer.cluster.launchers.base import StateLayout
from bftrainer.cluster.report.usage import account
from bftrainer.cluster.retention import rules
from bftrainer.cluster.retention.files import TrainerFiles, measure
from bftrainer.cluster.retention.housekeeper import Housekeeper
from bftrainer.cluster.retention.rules import DAY_S, TrainerDisk
from bftrainer.cluster.retention.stored import SINCE_KEY, store_settings
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.events import OtherEvent
from bftrainer.cluster.store.rows import OwnerRow
from bftrainer.cluster.store.state_folder import LOCK_FILE
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.elastic.snapshot_header import HEADER, Lineage, header
from bftrainer.errors import BFTrainerError
from bftrainer.util import locks
from support.benchmarks import load_benchmark
from support.cluster.api import SPEC, by, play
from support.cluster.bench import Bench
from support.waiting import wait_until

NOW = 1000 * DAY_S
NO_LIMITS = RetentionSettings(0, 400, 0, 0, 0, 0, 0)


def files(state: Path, trainer: str, kilobytes: int = 1) -> Path:
    """Three snapshots, two logs and an output file of a trainer, each of so many kB."""
    layout = StateLayout(state, "")
    layout.prepare(trainer)
    folder = layout.folder(trainer)
    for name in ("log", "log.1", "output/model.pt"):
        (folder / name).write_bytes(b"x" * 1000 * kilobytes)
    payload = b"x" * (1000 * kilobytes - HEADER)
    for step in (5, 10, 15):
        head = header(step, len(payload), sha256(payload).hexdigest(), Lineage())
        (folder / snapshot(step)).write_bytes(head + payload)
    return folder


def snapshot(step: int) -> str:
    return f"snapshots/snapshot-{step:012d}.bft"


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def disk(id_: str, ended: float | None, owner: str = "ann", older: int = 20, logs: int = 10) -> TrainerDisk:
    return TrainerDisk(id_, id_, owner, ended, TrainerFiles(older, logs, 100))


def chosen(removals: list[rules.Removal]) -> list[tuple[str, str]]:
    return [(removal.trainer.id, removal.part) for removal in removals]


# What goes.


def test_parts_of_finished_trainers_go_when_their_time_has_come() -> None:
    settings = replace(NO_LIMITS, snapshots_days=1.0, logs_days=10.0, results_days=100.0)
    ages = {"t1": 0.5, "t2": 2.0, "t3": 20.0, "t4": 200.0}
    disks = [disk(id_, NOW - age * DAY_S) for id_, age in ages.items()] + [disk("t5", None)]
    assert chosen(rules.by_settings(disks, settings, (), NOW)) == [
        ("t2", "older snapshots"),
        ("t3", "older snapshots"),
        ("t3", "log"),
        ("t4", "all files"),
    ]
    assert rules.by_settings(disks, NO_LIMITS, (), NOW) == []


def test_what_ended_before_the_first_start_counts_from_that_start() -> None:
    settings = replace(NO_LIMITS, snapshots_days=1.0, logs_days=10.0, results_days=100.0)
    disks = [disk("t1", NOW - 900 * DAY_S), disk("t2", NOW + 4 * DAY_S)]
    found = [chosen(rules.by_settings(disks, settings, (), NOW + days * DAY_S, since=NOW)) for days in (0, 2, 11, 101)]
    assert [[part for id_, part in each if id_ == "t1"] for each in found] == [
        [],
        ["older snapshots"],
        ["older snapshots", "log"],
        ["all files"],
    ]
    assert ("t2", "older snapshots") in found[2]
    assert ("t2", "log") not in found[2]


def test_of_too_many_bytes_those_of_the_trainers_that_ended_first_go() -> None:
    disks = [disk(f"t{n}", NOW - n) for n in range(5)]
    settings = replace(NO_LIMITS, finished_gb=100e-9)  # 100 bytes, of 5 x 30
    assert chosen(rules.by_settings(disks, settings, (), NOW)) == [
        ("t4", "older snapshots"),
        ("t4", "log"),
        ("t3", "older snapshots"),
    ]


def test_owners_over_their_quota_lose_older_snapshots_only() -> None:
    disks = [disk("t1", None), disk("t2", NOW), disk("t3", None, "bob")]
    removals = rules.by_settings(disks, NO_LIMITS, {"ann"}, NOW)
    assert chosen(removals) == [("t1", "older snapshots"), ("t2", "older snapshots")]


# The housekeeper.


class Site:
    """A store, its folder and its housekeeper."""

    def __init__(self, state: Path, settings: RetentionSettings = NO_LIMITS) -> None:
        self.config: Config = replace(DEFAULTS, server=Server(state=state), retention=settings)
        self.state, self.store = state, Store.open(state / FILE)
        self.limits = OwnerLimits(self.store, 1.0)
        self.handled: set[str] = set()
        self.keeper = Housekeeper(self.store, self.config, self.limits, self.handled)

    def trainer(self, owner: str, ended: float | None, kilobytes: int = 1) -> str:
        row = self.store.add_trainer(name=f"{owner}-{self.store.kept('n', 0)}", owner=owner, spec=SPEC, time=1.0)
        self.store.keep("n", self.store.kept("n", 0) + 1)
        if ended is not None:
            self.store.update_trainer(row.id, state="done", ended=ended, samples=7)
        files(self.state, row.id, kilobytes)
        return row.id

    def folder(self, trainer: str) -> Path:
        return self.state / "trainers" / trainer

    def clean(self, now: float = NOW) -> None:
        asyncio.run(self.keeper.clean(now))
        while self.keeper.tick(now):
            pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path, replace(NO_LIMITS, snapshots_days=1.0, logs_days=10.0, results_days=100.0))
    yield made
    made.store.close()


def test_the_last_snapshot_and_the_output_stay_until_their_time_and_unfinished_trainers_keep_all(site: Site) -> None:
    runs, done, gone = (site.trainer("ann", ended) for ended in (None, NOW - 20 * DAY_S, NOW - 200 * DAY_S))
    ending = site.trainer("ann", NOW - 200 * DAY_S)
    site.handled.add(ending)
    before = names(site.folder(runs))
    site.clean()
    assert names(site.folder(runs)) == names(site.folder(ending)) == before
    assert names(site.folder(done)) == {"snapshots/snapshot-000000000015.bft", "output/model.pt"}
    assert not site.folder(gone).exists()
    told = [(row.trainer, row.data["part"], row.data["by"]) for row in site.store.events(kind="trainer.pruned")]
    assert told == [
        (done, "older snapshots", "retention"),
        (done, "log", "retention"),
        (gone, "all files", "retention"),
    ]
    assert site.limits.disk_used == {"ann": 2 * 6000 + 2000}
    wait_until(lambda: not list((site.state / "trainers" / ".removed").iterdir()), "the removed folder is deleted")


def test_a_row_goes_when_its_files_are_gone_and_the_log_begins_later(site: Site) -> None:
    gone, kept = site.trainer("ann", NOW - 200 * DAY_S), site.trainer("ann", NOW - 50 * DAY_S)
    for number in range(3000):
        site.store.log(NOW - 3000 + number, OtherEvent("x"))
    site.clean()
    assert [row.id for row in site.store.trainers()] == [gone, kept]  # the log still begins with everything
    site.store.trim_events(1000)
    site.clean()
    assert [row.id for row in site.store.trainers()] == [kept]
    assert site.store.totals.of_finished() == {"ann": (2, 0.0, 14, 0.0)}


def test_links_are_neither_followed_nor_removed_with_what_they_point_to(site: Site, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_bytes(b"x" * 10**6)
    within, whole = site.trainer("ann", NOW - 200 * DAY_S), site.trainer("ann", NOW - 200 * DAY_S)
    (site.folder(within) / "output" / "link").symlink_to(elsewhere)
    site.folder(whole).rename(tmp_path / "moved")
    site.folder(whole).symlink_to(tmp_path / "moved")
    assert measure(site.folder(within)).total == 6000
    site.clean()
    wait_until(lambda: not list((site.state / "trainers" / ".removed").iterdir()), "the removed folder is deleted")
    assert (elsewhere / "precious").exists()
    assert names(tmp_path / "moved")


def damage(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("position", [30, -1], ids=["header", "payload"])
def test_a_damaged_snapshot_does_not_count_as_the_one_to_resume_from(site: Site, position: int) -> None:
    done = site.trainer("ann", NOW - 2 * DAY_S)
    damage(site.folder(done) / snapshot(15), position)
    site.clean()
    left = {name for name in names(site.folder(done)) if "snapshots" in name}
    assert left == {snapshot(10), snapshot(15)}


@pytest.mark.parametrize("position", [30, -1], ids=["header", "payload"])
def test_nothing_goes_if_no_snapshot_is_whole(site: Site, position: int) -> None:
    done = site.trainer("ann", NOW - 2 * DAY_S)
    for step in (5, 10, 15):
        damage(site.folder(done) / snapshot(step), position)
    before = names(site.folder(done))
    site.clean()
    assert names(site.folder(done)) == before
    assert site.store.events(kind="trainer.pruned") == []


def test_nothing_goes_while_a_snapshot_cannot_be_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    done = site.trainer("ann", NOW - 2 * DAY_S)
    before, opened = names(site.folder(done)), Path.open

    def fail(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name in snapshot(15):
            raise OSError(5, "Input/output error")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", fail)
    site.clean()
    assert names(site.folder(done)) == before


@pytest.mark.parametrize("linked", ["", "snapshots"])
def test_snapshots_and_logs_behind_a_link_are_neither_counted_nor_removed(
    site: Site, tmp_path: Path, linked: str
) -> None:
    done = site.trainer("ann", NOW - 50 * DAY_S)
    (site.folder(done) / linked).rename(tmp_path / "moved")
    (site.folder(done) / linked).symlink_to(tmp_path / "moved")
    before = names(tmp_path / "moved")
    assert measure(site.folder(done)) == (TrainerFiles(0, 2000, 1000) if linked else TrainerFiles())
    site.clean()
    assert names(tmp_path / "moved") == before


def test_a_file_system_that_refuses_does_not_end_the_controller(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = site.trainer("ann", NOW - 200 * DAY_S)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    (removed,) = asyncio.run(site.keeper.clean(NOW))
    assert "Permission denied" in removed.problem
    assert site.folder(gone).exists()
    assert site.store.events(kind="trainer.pruned") == []


# Quotas.


def test_an_owner_over_the_quota_is_refused_and_keeps_one_snapshot_of_what_runs(tmp_path: Path) -> None:
    site = Site(tmp_path, replace(NO_LIMITS, owner_gb=10e-6))
    spec = TrainerSpec.model_validate(SPEC)
    runs, _ = site.trainer("ann", None), site.trainer("ann", NOW)
    site.clean()
    assert site.limits.disk_used == {"ann": 12000 - 4 * 1000}  # older snapshots went at once
    assert {path for path in names(site.folder(runs)) if "snapshot" in path} == {"snapshots/snapshot-000000000015.bft"}
    site.limits.check("ann", spec, 0)
    site.trainer("ann", NOW, kilobytes=9)
    site.clean()
    with pytest.raises(QuotaError, match=r"ann's trainers use .* kB of 10 kB: .*bftrainer prune"):
        site.limits.check("ann", spec, 0)
    site.limits.check("bob", spec, 0)
    site.store.put_owner(OwnerRow("ann", max_disk_mb=1))
    site.limits.read()
    site.limits.check("ann", spec, 0)
    site.store.close()


def test_the_api_shows_use_and_quota_and_refuses_submits(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        bench.store.put_owner(OwnerRow("ann", max_disk_mb=2))
        mine = by(tokens, "ann")
        assert (await client.post("/v1/trainers", json={**SPEC, "name": "a"}, headers=mine)).status_code == 201
        files(tmp_path, "t1", kilobytes=1000)
        await client.post("/v1/prune", json={}, headers=by(tokens, "root"))
        me = (await client.get("/v1/me", headers=mine)).json()
        assert (me["use"]["disk_bytes"], me["limits"]["disk_bytes"]) == (4_000_000, 2_000_000)
        refused = await client.post("/v1/trainers", json=SPEC, headers=mine)
        assert refused.status_code == 409
        assert "use 4 MB of 2 MB" in refused.json()["error"]
        owners = (await client.get("/v1/owners", headers=by(tokens, "root"))).json()["owners"]
        assert [row["use"]["disk_bytes"] for row in owners if row["owner"] == "ann"] == [4_000_000]
        await client.post("/v1/trainers/t1/cancel", headers=mine)
        done = (await client.post("/v1/prune", json={"trainers": ["a"]}, headers=mine)).json()
        assert done["bytes"] == 4_000_000
        assert (await client.post("/v1/trainers", json=SPEC, headers=mine)).status_code == 201

    play(tmp_path, scene)


# Pruning on request.


def test_owners_prune_their_own_finished_trainers_by_the_api(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        ann, bob, root = (by(tokens, name) for name in ("ann", "bob", "root"))
        for owner, name in ((ann, "a1"), (ann, "a2"), (bob, "b1")):
            await client.post("/v1/trainers", json={**SPEC, "name": name}, headers=owner)
        for number in (1, 2, 3):
            files(tmp_path, f"t{number}")

        async def prune(who: dict[str, str], **body: Any) -> Any:
            answer = await client.post("/v1/prune", json=body, headers=who)
            return answer.json() if answer.status_code == 200 else (answer.status_code, answer.json()["error"])

        status, error = await prune(ann, trainers=["a1"])
        assert status == 409
        assert "t1 (a1) is queued: only files of finished trainers" in error
        assert "bftrainer cancel t1" in error
        assert (await prune(ann, trainers=["b1"]))[0] == 404
        assert (await prune(ann))[0] == 403
        assert (await prune(ann, trainers=["a1"], mine=True))[0] == 422
        assert (await prune(ann, trainer=["a1"]))[0] == 422
        for number in (1, 3):
            await client.post(f"/v1/trainers/t{number}/cancel", headers=root)
        before = {number: names(tmp_path / "trainers" / f"t{number}") for number in (1, 2, 3)}
        dry = await prune(ann, mine=True, older_than_s=0, dry_run=True)
        assert [(row["trainer"], row["part"], row["bytes"]) for row in dry["removed"]] == [("t1", "all files", 6000)]
        assert {number: names(tmp_path / "trainers" / f"t{number}") for number in before} == before
        assert (await prune(ann, mine=True, older_than_s=3600))["removed"] == []
        assert (await prune(ann, mine=True, older_than_s=0))["bytes"] == 6000
        assert not (tmp_path / "trainers" / "t1").exists()
        assert names(tmp_path / "trainers" / "t2") == before[2]
        assert names(tmp_path / "trainers" / "t3") == before[3]
        assert (await prune(root, older_than_s=0))["removed"][0]["owner"] == "bob"
        assert (await client.get("/v1/trainers/t1", headers=ann)).status_code == 200

    play(tmp_path, scene)


def test_a_thousand_old_trainers_are_listed_off_the_event_loop(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        with bench.store.transaction():
            for number in range(1000):
                row = bench.store.add_trainer(name=f"old{number}", owner="ann", spec=SPEC, time=1.0)
                bench.store.update_trainer(row.id, state="done", ended=2.0, samples=5)
        await client.post("/v1/trainers", json={**SPEC, "name": "new"}, headers=by(tokens, "ann"))
        statements: list[str] = []
        bench.store._db.connection.set_trace_callback(statements.append)
        shown = (await client.get("/v1/trainers?all=true", headers=by(tokens, "ann"))).json()["trainers"]
        done = (await client.get("/v1/trainers?all=true&state=done", headers=by(tokens, "ann"))).json()["trainers"]
        me = (await client.get("/v1/me", headers=by(tokens, "ann"))).json()
        bench.store._db.connection.set_trace_callback(None)
        assert [row["id"] for row in shown] == [f"t{number}" for number in range(1, 1002)]
        assert shown[-1]["state"] == "queued"
        assert len(done) == 1000
        assert (me["use"]["trainers_finished"], me["use"]["samples"]) == (1000, 5000)
        about = [sql for sql in statements if "FROM trainers" in sql]
        assert about
        assert all("ended IS NULL OR ended >" in sql for sql in about)  # the controller's connection reads few rows

    play(tmp_path, scene)


# The command.


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("BFTRAINER_URL", raising=False)
    monkeypatch.setenv("BFTRAINER_STATE", str(tmp_path))
    site = Site(tmp_path)
    for ended in (None, 1.0):
        site.trainer("ann", ended)
    site.store.keep(SINCE_KEY, 0.0)
    site.store.close()
    return tmp_path


def test_the_command_prunes_a_folder_without_a_controller(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prune", "t1"]) == 2
    assert "t1 (ann-0) is queued: only files of finished trainers can be removed" in capsys.readouterr().err
    assert run(["prune", "--dry-run"]) == 0
    assert " ".join(capsys.readouterr().out.split()).endswith("t2 ann-1 ann all files 6 kB 6 kB would be freed")
    assert (state / "trainers" / "t2").exists()
    assert run(["prune", "t2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["bytes"], found["removed"][0]["trainer"], found["problems"]) == (6000, "t2", [])
    assert not (state / "trainers" / "t2").exists()
    assert not list((state / "trainers" / ".removed").iterdir())
    assert names(state / "trainers" / "t1")
    assert run(["prune", "--older-than", "0w"]) == 0
    assert "nothing to remove" in capsys.readouterr().out
    assert not locks.is_locked(state / LOCK_FILE)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["t2", "--mine"], "leave out TRAINER"),
        (["--older-than", "soon"], "--older-than must be an age such as 12h, 30d or 52w"),
        (["--mine"], "add --older-than"),
        (["t99"], "there is no trainer 't99'"),
    ],
)
def test_a_call_that_is_wrong_is_refused(
    state: Path, capsys: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    assert run(["prune", *args]) == 2
    assert says in capsys.readouterr().err
    assert (state / "trainers" / "t2").exists()


def test_the_database_is_trimmed_and_made_smaller_where_no_controller_runs(
    state: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BFTRAINER_TRAINERS_KEEP_EVENTS", "1000")
    with Store.open(state / FILE) as store, store.transaction():
        for number in range(4000):
            store.log(float(number), OtherEvent("x", data={"text": "x" * 5000}))
    assert run(["prune", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["database_bytes"] < found["database_bytes_before"] / 2
    with Store.open(state / FILE) as store:
        assert store.event_span().count == 1000


@pytest.fixture
def started(state: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder after a controller that was started with a file of its own and with --set has ended."""
    file = tmp_path_factory.mktemp("etc") / "site.toml"
    file.write_text('retention.results_days = 0\nretention.logs_days = 0\napi.token_lifetime = "2h"\n')
    overrides = {"server.state": state, "retention.snapshots_days": "0", "server.host": "127.0.0.1"}

    def ended(*args: Any, **kwargs: Any) -> None:
        raise BFTrainerError("that was it")

    monkeypatch.setattr(serve, "_build", ended)
    with pytest.raises(BFTrainerError, match="that was it"):
        asyncio.run(serve.serve(load_config(file, env={}, overrides=overrides)))
    return file


def removed(capsys: pytest.CaptureFixture[str], *args: str) -> list[str]:
    capsys.readouterr()
    assert run(["prune", "--dry-run", "--json", *args]) == 0
    return [row["part"] for row in json.loads(capsys.readouterr().out)["removed"]]


def test_without_a_controller_the_settings_of_the_last_one_count(
    state: Path, started: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert removed(capsys) == []
    (state / "config.toml").write_text("retention.results_days = 1\n")  # not the file of the controller
    assert removed(capsys) == []
    other = started.with_name("other.toml")
    other.write_text("retention.logs_days = 1\n")
    assert removed(capsys, "--config", str(other)) == ["log"]
    assert removed(capsys, "--config", str(started)) == []  # --set counts on
    monkeypatch.setenv("BFTRAINER_RETENTION__RESULTS_DAYS", "1")
    assert removed(capsys) == ["all files"]


def test_the_first_start_in_a_folder_of_an_older_version_removes_nothing_by_age(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(state / FILE) as store:
        store.forget(SINCE_KEY)
    assert removed(capsys) == []
    with Store.open(state / FILE) as store:
        store_settings(store, DEFAULTS, time.time() - 2 * DAY_S)
        store_settings(store, DEFAULTS, time.time())  # a later start
    assert removed(capsys) == ["older snapshots"]
    site = Site(state, DEFAULTS.retention)
    site.clean(time.time())
    site.store.close()
    assert snapshot(15) in names(state / "trainers" / "t2")


def test_tokens_get_the_lifetime_that_the_last_controller_was_started_with(
    started: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    capsys.readouterr()
    assert run(["token", "create", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["expires"] == pytest.approx(time.time() + 7200, abs=600)
    monkeypatch.setenv("BFTRAINER_API__TOKEN_LIFETIME", "never")
    assert run(["token", "create", "b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["expires"] is None


@pytest.mark.parametrize("content", ['{"url": "http://127.0.0.1:9", "token": "bft_of_another"}', "damaged"])
def test_a_folder_whose_client_file_names_another_controller_is_left_alone(
    state: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (state / "client.json").write_text(content)
    assert run(["prune", "t2"]) != 0
    assert "127.0.0.1:9" in (told := capsys.readouterr().err) or "damaged" in told
    assert (state / "trainers" / "t2").exists()
    assert not locks.is_locked(state / LOCK_FILE)
    with Store.open(state / FILE) as store:
        token = store.tokens.create(name="mine", owner="ann", role="admin", time=1.0)
    (state / "client.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "token": token}))
    assert run(["prune", "t2"]) == 0
    assert not (state / "trainers" / "t2").exists()


@pytest.mark.waits
def test_beside_a_controller_the_command_asks_it(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another process holds the lock, as a controller does; there is none to ask, and nothing is touched."""
    held = "import sys, time; from pathlib import Path; from bftrainer.util import locks\n"
    held += "lock = locks.take_lock(Path(sys.argv[1])); print(lock, flush=True); time.sleep(600)"
    holder = subprocess.Popen([sys.executable, "-c", held, state / LOCK_FILE], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip().isdigit()
        assert run(["prune", "t2"]) != 0
        assert "controller" in capsys.readouterr().err
        assert (state / "trainers" / "t2").exists()
    finally:
        os.kill(holder.pid, 9)
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()


def test_quotas_are_set_and_listed_by_the_owner_command(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = Site(state)
    site.clean()
    site.store.close()
    assert run(["owner", "set", "ann", "--max-disk", "1.5GB"]) == 0
    assert "at most 1.5 GB on disk" in capsys.readouterr().out
    assert run(["owner", "set", "ann", "--max-disk", "much"]) == 2
    assert "--max-disk must be a size such as 500GB" in capsys.readouterr().err
    assert run(["owner", "set", "ann", "--max-disk", "500kB"]) == 2
    assert "from 1MB" in capsys.readouterr().err
    assert run(["owner", "list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["owners"]
    assert (row["max_disk_mb"], row["disk_bytes"]) == (1500, 12000)
    assert run(["owner", "set", "ann", "--max-disk", "none"]) == 0


# Weeks of a large site, in short: benchmarks/years.py.


@pytest.fixture
def years(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_benchmark("years", monkeypatch)


def test_hours_of_a_busy_site_stay_within_the_limits(years: ModuleType, tmp_path: Path) -> None:
    retention = replace(NO_LIMITS, events_days=0.03, snapshots_days=0.005, logs_days=0.01, results_days=0.02)
    found = years.run(tmp_path, days=0.2, nodes=700, per_day=800, retention=retention, seed=1)
    (row,) = found["over_time"]
    assert found["slices"] > 10
    assert found["events_written"] > 2 * row["events"]
    assert found["database_mb_most"] < 20
    with Store.open(tmp_path / FILE) as store:
        assert store.problems() == []
        assert store.totals.removed() > 0
        assert list(invariants.log_is_whole(store.event_span())) == []
        trainers = store.trainers()
        assert list(invariants.history(store.all_events(invariants.EVENT_KINDS), trainers, trimmed=True)) == []
        account(store)
