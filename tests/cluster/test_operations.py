"""`/metrics`, `/healthz` and `/readyz`, and `bftrainer report`: what an operator relies on."""

from __future__ import annotations

import asyncio
import csv
import dataclasses
import io
import json
import re
import sqlite3
import stat
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bftrainer.cli.main import run
from bftrainer.cluster.config.keys import Api, Config, Server
from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.controller.output.logbook import Logbook
from bftrainer.cluster.http import app as app_module
from bftrainer.cluster.http import prometheus, readiness, status
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.store import Store
from support.cluster.api import SECRET, SPEC, NoPool, by
from support.cluster.bench import Bench
from support.cluster.live import EXAMPLES, Live
from support.waiting import wait_until

Scene = Callable[[httpx.AsyncClient, Bench, Controller, dict[str, str]], Awaitable[None]]


class Pool(NoPool):
    """A pool that has, or has not, a problem."""

    problem: Any = None

    def describe(self) -> dict[str, Any]:
        if isinstance(self.problem, Exception):
            raise self.problem
        return {"kind": "none", "problem": self.problem}


def play(folder: Path, scene: Scene, settings: Api | None = None) -> None:
    bench = Bench(folder)

    async def begin() -> None:
        tokens = {}
        for name, role in (("ann", "user"), ("bob", "user"), ("root", "admin")):
            tokens[name] = bench.store.tokens.create(name=name, owner=name, role=role, time=1.0)
        config = dataclasses.replace(Config(), server=Server(state=folder), api=settings or Api())
        controller = Controller(bench.cluster, Pool(), config, lambda trainer: Logbook(folder / trainer, 1 << 20), {})
        app = app_module.build(controller, SECRET)
        app.state.api.mark_open()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await scene(client, bench, controller, tokens)

    try:
        asyncio.run(begin())
    finally:
        bench.store.close()


def figures(text: str) -> dict[str, float]:
    """Every sample by its name and labels, as Prometheus reads them."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def test_the_figures_are_those_of_the_cluster(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, controller: Controller, tokens: dict[str, str]) -> None:
        for owner in ("ann", "bob"):
            assert (await client.post("/v1/trainers", json=SPEC, headers=by(tokens, owner))).status_code == 201
        bench.settle()
        bench.join("n1", "n2", "n3")
        bench.pass_time(10)
        for trainer, samples in (("t1", 100), ("t2", 50)):
            bench.report(trainer, samples=samples, total=200, step=1)
        bench.cluster.trainers["t1"].learned.first_step({"imports": 9.5})
        bench.cluster.trainers["t1"].learned.rescaled("up", 0.5, 0.25, 0.125, {"form": 0.25})
        bench.pass_time(10)
        bench.take("n3")
        controller.on_decision(0.03)
        assert (await client.get("/nowhere/at/all", headers=by(tokens, "ann"))).status_code == 404
        assert (await client.get("/v1/trainers/t2", headers=by(tokens, "ann"))).status_code == 404
        answer = await client.get("/metrics", headers=by(tokens, "root"))
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = figures(answer.text)
        assert found["bftrainer_pool_nodes"] == 2
        assert found["bftrainer_pool_nodes_used"] == 2
        assert found["bftrainer_agents{state=here}"] == 2
        assert found["bftrainer_trainers{state=running}"] == 2
        assert found["bftrainer_trainers{state=done}"] == 0
        assert found["bftrainer_trainer_samples_total"] == 150
        assert found["bftrainer_owner_samples_total{owner=bob}"] == 50
        assert found["bftrainer_trainer_preemptions_total"] == 1
        assert found["bftrainer_decisions_total"] == bench.cluster.planner.decisions
        assert found["bftrainer_pool_node_seconds_total"] > 0
        assert found["bftrainer_event_to_decision_seconds_count"] == 1
        assert found["bftrainer_decision_seconds_count"] == 1
        assert found["bftrainer_trainer_progress_ratio{name=train,owner=ann,trainer=t1}"] == 0.5
        assert found["bftrainer_trainer_start_seconds{name=train,owner=ann,part=imports,trainer=t1}"] == 9.5
        assert found["bftrainer_trainer_pause_seconds{name=train,owner=ann,part=form,trainer=t1}"] == 0.25
        assert found["bftrainer_api_requests_total{code=201,method=POST,path=/v1/trainers}"] == 2
        assert found["bftrainer_api_requests_total{code=404,method=GET,path=/v1/trainers/{ref}}"] == 1
        assert found["bftrainer_api_requests_total{code=404,method=GET,path=other}"] == 1
        assert found["bftrainer_events_total"] == bench.store.event_span().ever

    play(tmp_path, scene)


def test_users_see_their_own_trainers_in_the_figures_and_nobody_sees_any_without_a_token(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, controller: Controller, tokens: dict[str, str]) -> None:
        for owner in ("ann", "bob"):
            named = {**SPEC, "name": f"of-{owner}"}
            await client.post("/v1/trainers", json=named, headers=by(tokens, owner))
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {SECRET}"}):
            assert (await client.get("/metrics", headers=headers)).status_code == 401
        mine = (await client.get("/metrics", headers=by(tokens, "ann"))).text
        assert "of-ann" in mine
        assert "bob" not in mine
        assert all(token not in mine for token in (*tokens.values(), SECRET))

    play(tmp_path, scene)


def test_what_counts_up_does_not_go_down_when_a_training_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, controller: Controller, tokens: dict[str, str]) -> None:
        await client.post("/v1/trainers", json=SPEC, headers=by(tokens, "ann"))
        bench.settle()
        bench.join("n1")
        bench.pass_time(10)
        bench.report("t1", samples=100, step=10)
        bench.pass_time(10)
        before = figures((await client.get("/metrics", headers=by(tokens, "root"))).text)
        bench.take("n1")
        bench.join("n2")
        bench.report("t1", samples=40, step=4)  # from a snapshot
        bench.pass_time(10)
        monkeypatch.setattr(prometheus, "SUMS_EVERY_S", 0.0)
        after = figures((await client.get("/metrics", headers=by(tokens, "root"))).text)
        for name in ("bftrainer_trainer_samples_total", "bftrainer_owner_samples_total{owner=ann}"):
            assert after[name] >= before[name] == 100

    play(tmp_path, scene)


def test_a_monitor_reads_all_figures_and_nothing_else(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, controller: Controller, tokens: dict[str, str]) -> None:
        await client.post("/v1/trainers", json={**SPEC, "name": "of-ann"}, headers=by(tokens, "ann"))
        bench.settle()
        tokens["eye"] = bench.store.tokens.create(name="eye", owner="eye", role="monitor", time=1.0)
        assert "of-ann" in (await client.get("/metrics", headers=by(tokens, "eye"))).text
        for method, path in (("GET", "/v1/status"), ("POST", "/v1/trainers"), ("POST", "/v1/pause"), ("GET", "/v1/me")):
            answer = await client.request(method, path, headers=by(tokens, "eye"))
            assert answer.status_code in (403, 404), path
            assert "of-ann" not in answer.text
        assert not bench.cluster.paused

    play(tmp_path, scene)


def test_the_totals_are_of_all_trainers_that_ever_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, controller: Controller, tokens: dict[str, str]) -> None:
        for owner in ("ann", "bob", "ann"):
            await client.post("/v1/trainers", json={**SPEC, "nodes": "1-1"}, headers=by(tokens, owner))
        bench.settle()
        bench.join("n1", "n2", "n3")
        for trainer in ("t1", "t2", "t3"):
            bench.report(trainer, samples=100, step=1)
        bench.pass_time(50)
        bench.finish("t1")
        bench.finish("t2")
        end = bench.now

        async def totals(who: str, now: float) -> dict[str, Any]:
            monkeypatch.setattr(status.time, "time", lambda: now)
            return dict((await client.get("/v1/status", headers=by(tokens, who))).json()["totals"])

        for now in (end + 10, end + 2 * status.RECENT_S, end + 10):  # the clock may be set back
            found = await totals("root", now)
            assert (found["samples"], found["owner"]) == (300, None)
            assert found["used_node_seconds"] <= found["node_seconds"]
            mine = await totals("ann", now)
            assert (mine["samples"], mine["owner"]) == (200, "ann")
            assert (await totals("bob", now))["used_node_seconds"] == pytest.approx(50)

    play(tmp_path, scene)


def test_open_figures_name_nobody(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, controller: Controller, tokens: dict[str, str]) -> None:
        await client.post("/v1/trainers", json=SPEC, headers=by(tokens, "ann"))
        bench.settle()
        bench.gpus = {"secret-node": 4}
        bench.join("secret-node")
        answer = await client.get("/metrics")
        assert answer.status_code == 200
        assert "ann" not in answer.text
        assert "secret-node" not in answer.text
        assert "secret-node" in (await client.get("/metrics", headers=by(tokens, "ann"))).text
        assert figures(answer.text)["bftrainer_trainers{state=running}"] == 1
        assert figures(answer.text)["bftrainer_pool_gpus"] == 4
        wrong = await client.get("/metrics", headers={"Authorization": "Bearer wrong"})
        assert wrong.status_code == 401

    play(tmp_path, scene, Api(open_metrics=True))


def test_many_trainers_and_strange_requests_do_not_make_many_series(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, controller: Controller, tokens: dict[str, str]) -> None:
        for number in range(8):
            await client.post("/v1/trainers", json={**SPEC, "name": f"x{number}"}, headers=by(tokens, "ann"))
            await client.request(f"MADE{number}", f"/made/up/{number}")
            await client.get(f"/v1/trainers/t{number + 100}", headers=by(tokens, "ann"))
        found = figures((await client.get("/metrics", headers=by(tokens, "root"))).text)
        assert sum(key.startswith("bftrainer_trainer_nodes{") for key in found) == 3
        assert found["bftrainer_trainers_without_series"] == 5
        assert sum(key.startswith("bftrainer_api_requests_total") for key in found) <= 4

    play(tmp_path, scene, Api(metrics_trainers=3))


def test_names_with_quotes_do_not_break_the_figures(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, controller: Controller, tokens: dict[str, str]) -> None:
        odd = 'o"dd \\ {x="1"}'
        token = bench.store.tokens.create(name="odd", owner=odd, role="user", time=1.0)
        made = await client.post("/v1/trainers", json=SPEC, headers={"Authorization": f"Bearer {token}"})
        assert made.status_code == 201
        found = figures((await client.get("/metrics", headers=by(tokens, "root"))).text)
        assert f"bftrainer_owner_samples_total{{owner={odd}}}" in found

    play(tmp_path, scene)


def test_a_controller_is_ready_while_its_store_and_its_pool_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "CHECK_EVERY_S", 0.0)

    async def scene(client: httpx.AsyncClient, bench: Bench, controller: Controller, tokens: dict[str, str]) -> None:
        pool = controller.pool
        assert isinstance(pool, Pool)
        assert (await client.get("/healthz")).json()["ok"] is True
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["ready"]) == (200, True)
        for problem in ("sinfo: not found in /opt/slurm", ValueError("oh")):
            pool.problem = problem
            answer = await client.get("/readyz")
            assert answer.status_code == 503
            assert answer.json()["checks"] == {"controller": "ok", "store": "ok", "pool": "failed"}
            told = (await client.get("/readyz", headers=by(tokens, "ann"))).json()
            assert str(problem) in told["checks"]["pool"]
        pool.problem = None
        holder = sqlite3.connect(bench.store.path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")  # somebody writes, and does not come to an end
        try:
            bench.store._db.run("PRAGMA busy_timeout = 10")
            assert (await client.get("/readyz")).json()["checks"]["store"] == "failed"
        finally:
            holder.close()
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.get("/healthz")).status_code == 200
        controller.draining = True
        assert (await client.get("/readyz")).json()["checks"]["controller"] == "failed"
        controller.failed.set_exception(RuntimeError("the disk is full"))
        controller.failed.exception()
        assert (await client.get("/healthz")).status_code == 503

    play(tmp_path, scene)


@pytest.mark.waits
def test_a_running_controller_is_ready_keeps_a_log_and_can_be_reported_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    (state / "trainers" / "t41").mkdir(parents=True)  # of a trainer that a database put back from a copy forgot
    with Live(state, "--nodes", "2", "--set", "log.format=json") as live:
        wait_until(lambda: len([n for n in live.nodes() if n["state"] == "free"]) == 2, what="two nodes")
        address = live.api.address
        with httpx.Client(base_url=address.url, trust_env=False) as client:
            assert client.get("/readyz").json() == {
                "ready": True,
                "checks": {"controller": "ok", "store": "ok", "pool": "ok"},
            }
            found = figures(client.get("/metrics", headers={"Authorization": f"Bearer {address.token}"}).text)
        assert found["bftrainer_pool_nodes"] == 2
        assert found["bftrainer_event_to_decision_seconds_count"] >= 1
        capsys.readouterr()
        page, table = tmp_path / "month.html", tmp_path / "month.csv"
        assert run(["report", "--state", str(state), "--html", str(page), "--csv", str(table), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        copy = tmp_path / "copy.db"
        assert run(["backup", "--state", str(state), str(copy)]) == 0
        assert live.submit(EXAMPLES / "digits.py", nodes="3-3") == "t42"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    with Store.open(copy, read_only=True) as store:
        assert store.events(kind="node.joined")
    assert told["nodes_joined"] == 2
    assert told["unused_node_hours"] == told["node_hours"] > 0
    assert "What was harvested" in page.read_text()
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert sum(Decimal(row["node_seconds"]) for row in rows) == Decimal(told["node_seconds"])
    lines = [json.loads(line) for line in (state / "serve.log").read_text().splitlines()]
    assert {"serve.started", "node.joined"} <= {line.get("event") for line in lines}
    secret, token = (state / "agent-secret").read_text().strip(), address.token
    for path in (state / "serve.log", live.log):
        text = path.read_text()
        assert secret not in text
        assert token not in text


def test_a_report_is_for_people_for_spreadsheets_and_for_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(tmp_path)
    bench.join("n1", "n2", "n3")
    with bench.store.transaction():
        spec = TrainerSpec.model_validate({"script": "/train.py", "nodes": "1-2"})
        mine, effects = bench.cluster.submit(spec, "=<b>ann</b>", bench.now)
        bench.act(effects)
    bench.settle()
    bench.pass_time(3600)
    bench.report(mine, samples=1000, step=1)
    bench.finish(mine)
    bench.store.close()
    page, table = tmp_path / "r.html", tmp_path / "r.csv"
    words = ["report", "--state", str(tmp_path), "--from", "1970-01-01T00:16:40"]
    assert run([*words, "--html", str(page), "--csv", str(table)]) == 0
    said = capsys.readouterr().out
    assert "3.00 node-hours harvested" in said
    assert "66.7%" in said
    html = page.read_text()
    assert "<b>ann" not in html
    assert "&lt;b&gt;ann" in html
    assert not re.search(r"https?://|src=", html)
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [row["owner"] for row in rows] == ["'=<b>ann</b>", ""]
    assert sum(Decimal(row["node_seconds"]) for row in rows) == 3 * 3600
    assert run([*words, "--json", "--no-efficiency"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["owners"][0]["node_hours"] == pytest.approx(2.0)
    assert told["samples"] == 1000
    assert told["provenance"]["version"]


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--from", "yesterday"], 2, "--from must be a time"),
        (["--from", "2026"], 2, "--from must be a time"),
        (["--from", "20300101", "--to", "20290101"], 2, "got 2030-01-01T00:00:00 to 2029-01-01"),
        (["--tz", "Nowhere"], 2, "time zone"),
        (["--html", "/tmp"], 2, "/tmp: Is a directory"),
        (["--from", "2030-01-01", "--to", "2029-01-01"], 2, "after its start"),
        (["--html", "/no/such/folder/r.html"], 2, "there is no folder"),
        (["--state", "/no/such/state"], 2, "there is no database"),
    ],
)
def test_a_report_that_cannot_be_made_says_why_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, says: str
) -> None:
    bench = Bench(tmp_path)
    bench.join("n1")
    bench.pass_time(5)
    bench.take("n1")
    bench.store.close()
    assert run(["report", "--state", str(tmp_path), *words]) == status
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
