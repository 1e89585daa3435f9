"""What the page is told of the past, and by whom it may be seen."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from bftrainer.cluster.config.keys import Config, PolicySettings, Server
from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.controller.metric_history import MOST, MetricHistory
from bftrainer.cluster.controller.output.logbook import Logbook
from bftrainer.cluster.history import history, queries
from bftrainer.cluster.history.decisions import read_decisions
from bftrainer.cluster.history.history import Asked, History, Viewer, nodes_over_time, pool_over_time
from bftrainer.cluster.history.queries import read_past
from bftrainer.cluster.http import app, dashboard, feed
from bftrainer.cluster.report import daily
from bftrainer.cluster.report.daily import look_back
from bftrainer.cluster.report.lost_samples import read_costs
from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.events import OtherEvent
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.store.tokens import TokenTable
from bftrainer.errors import InputError
from support.cluster.api import NoPool
from support.cluster.bench import Bench

Scene = Callable[[httpx.AsyncClient, dict[str, dict[str, str]]], Awaitable[None]]


def play(bench: Bench, scene: Scene) -> None:
    """Ask the API of a bench as its users, `ann` and `someone`, and as an admin."""

    async def run() -> None:
        by = {}
        for name, role in (("ann", "user"), ("someone", "user"), ("root", "admin")):
            token = bench.store.tokens.create(name=name, owner=name, role=role, time=1.0)
            by[name] = {"Authorization": f"Bearer {token}"}
        config = replace(Config(), server=Server(state=bench.folder))
        logbook = lambda trainer: Logbook(bench.folder / trainer, 1 << 20)  # noqa: E731
        controller = Controller(bench.cluster, NoPool(), config, logbook, {})
        transport = httpx.ASGITransport(app.build(controller, "s"), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await scene(client, by)

    asyncio.run(run())


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    found = Bench(tmp_path)
    yield found
    found.store.close()


def story(bench: Bench) -> None:
    """Two trainers on four nodes, of which one is taken from under its worker."""
    bench.join("n1", "n2", "n3", "n10")
    bench.submit("1-2", name="mine")
    bench.submit("1-2", name="other")
    bench.now += 100
    bench.take("n1")
    bench.now += 100


def past_of(bench: Bench, seconds: float = 300.0, end: float | None = None) -> Any:
    end = bench.now if end is None else end
    db = Database.open(bench.store.path, read_only=True)
    try:
        return read_past(db, end - seconds, end)
    finally:
        db.close()


def test_the_past_has_the_nodes_the_workers_and_what_was_taken(bench: Bench) -> None:
    story(bench)
    past = past_of(bench)
    assert sorted(past.present) == [
        ("n1", 1000.0, 1100.0), ("n10", 1000.0, 1200.0), ("n2", 1000.0, 1200.0), ("n3", 1000.0, 1200.0),
    ]  # fmt: skip
    assert [(time, node) for time, node, _ in past.taken] == [(1100.0, "n1")]
    assert {known.name for known in past.trainers.values()} == {"mine", "other"}
    pool = pool_over_time(past, 30, Viewer(None))
    assert pool["pool"]["high"][:10] == [0] * 10
    assert (pool["pool"]["mean"][15], pool["pool"]["mean"][25]) == (4, 3)
    assert pool["used"]["mean"][15] == 4
    assert pool["node_hours"] == pytest.approx(700 / 3600)
    assert pool["preemptions"] == 1
    nodes = nodes_over_time(past, 30, Viewer(None))
    assert nodes["nodes"] == ["n1", "n2", "n3", "n10"]
    assert len(nodes["taken"]) == 1


def test_no_more_nodes_are_used_than_there_are_while_one_leaves(bench: Bench) -> None:
    bench.join("n1", "n2")
    bench.submit("1-2")
    bench.now += 100
    next(worker for worker in bench.workers.values() if worker.node == "n1").hangs = True
    with bench.store.transaction():
        bench.act(bench.cluster.leaving("n1", 50.0, bench.now))
    bench.settle()
    bench.now += 40
    past = past_of(bench)
    assert ("n1", 1000.0, 1100.0) in past.present
    assert [one.end for one in past.held if one.node == "n1"] == [1140.0], "its worker still packs up"
    pool = pool_over_time(past, 30, Viewer(None))
    assert pool["used_node_hours"] == pool["node_hours"] == pytest.approx(240 / 3600)
    assert pool["used"]["high"][-2] == pool["pool"]["high"][-2] == 1
    (live,) = bench.cluster.trainers.values()
    assert live.held.node_seconds(bench.now) == bench.cluster.planner.pool_time.node_seconds(bench.now) == 240


def test_nodes_that_came_before_the_window_are_there_from_its_start(bench: Bench) -> None:
    story(bench)
    past = past_of(bench, 150.0)  # from 1050
    assert ("n1", 1050.0, 1100.0) in past.present
    assert ("n2", 1050.0, 1200.0) in past.present
    assert [node for _, node, _ in past.taken] == ["n1"]
    assert len(past_of(bench, 60.0).present) == 3  # n1 was gone before


def test_a_window_of_the_past_has_the_nodes_that_were_there_all_the_time(bench: Bench) -> None:
    bench.join("left", "back", "stays")
    bench.now = 2000.0
    bench.take("left", "back")
    bench.now = 3000.0
    bench.join("back", "late")
    assert sorted(past_of(bench, 100.0, end=1500.0).present) == [
        (node, 1400.0, 1500.0) for node in ("back", "left", "stays")
    ]
    assert past_of(bench, 100.0, end=2500.0).present == (("stays", 2400.0, 2500.0),)


def test_a_window_with_too_much_in_it_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    story(bench)
    monkeypatch.setattr(queries, "MOST_ROWS", 5)
    with pytest.raises(InputError, match=r"at most 5\); ask for a shorter window"):
        past_of(bench)
    assert past_of(bench, 60.0, end=900.0).present == ()


def test_a_user_sees_the_names_of_their_own_trainers_only(bench: Bench) -> None:
    story(bench)
    past = past_of(bench)
    number = next(number for number, known in past.trainers.items() if known.name == "mine")
    past.trainers[number] = replace(past.trainers[number], owner="ann")
    seen = nodes_over_time(past, 30, Viewer("ann"))["who"]
    assert sorted(one["name"] for one in seen) == ["mine", "someone else"]
    assert [one["id"] for one in seen if one["name"] == "someone else"] == [None]
    assert len(nodes_over_time(past, 30, Viewer("eve"))["who"]) == 1
    assert len(nodes_over_time(past, 30, Viewer(None))["who"]) == 2


def test_what_is_asked_again_at_once_is_not_read_again(bench: Bench) -> None:
    story(bench)

    async def scene() -> None:
        past = History(bench.store.path, lambda: bench.now)
        first = await past.nodes(Asked(300, 30), Viewer(None))
        bench.join("n11")
        assert await past.nodes(Asked(300, 30), Viewer(None)) == first
        bench.now += 60
        assert json.loads((await past.nodes(Asked(300, 30), Viewer(None))).plain)["of_nodes"] == 5

    asyncio.run(scene())


def test_few_pasts_are_kept_and_not_for_long(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    story(bench)
    monkeypatch.setattr(history, "_PAST_KEPT_S", 0.05)

    async def scene() -> None:
        kept = History(bench.store.path, lambda: bench.now)
        for seconds in range(60, 70):
            await kept.pool(Asked(float(seconds), 30, end=bench.now), Viewer(None))
        assert not kept._pasts
        for seconds in range(60, 70):
            await kept.pool(Asked(float(seconds), 30), Viewer(None))
            assert len(kept._pasts) <= 2
        async with asyncio.timeout(10):
            while kept._pasts:
                await asyncio.sleep(0.01)

    asyncio.run(scene())


def test_a_long_answer_is_compressed_once_for_all(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.join(*(f"node-{i}" for i in range(30)))
    monkeypatch.setattr(history, "_PACKED_FROM", 100)
    packed: list[bytes] = []
    real = gzip.compress

    def compress(body: bytes, level: int) -> bytes:
        packed.append(body)
        return real(body, level)

    monkeypatch.setattr(gzip, "compress", compress)

    async def scene(client: httpx.AsyncClient, by: dict[str, dict[str, str]]) -> None:
        plain = await client.get("/v1/history/nodes", headers={**by["root"], "Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers
        for _ in range(2):
            answer = await client.get("/v1/history/nodes", headers=by["root"])
            assert answer.headers["content-encoding"] == "gzip"
            assert answer.json() == plain.json()

    play(bench, scene)
    assert len(packed) == 1


def test_every_route_needs_a_token_but_the_page(bench: Bench) -> None:
    async def scene(client: httpx.AsyncClient, by: dict[str, dict[str, str]]) -> None:
        paths = ["history/pool", "history/nodes", "decisions", "insight", "finished", "stream", "trainers/t1/history"]
        for path in paths:
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                assert (await client.get(f"/v1/{path}", headers=headers)).status_code == 401
        for path in ("/", "/static/app.js", "/static/style.css", "/static/plotly.min.js"):
            answer = await client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-security-policy"] == dashboard.POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
        again = await client.get("/", headers={"If-None-Match": (await client.get("/")).headers["etag"]})
        assert again.status_code == 304

    play(bench, scene)


def test_only_the_files_of_the_page_are_given_out(bench: Bench) -> None:
    async def scene(client: httpx.AsyncClient, by: dict[str, dict[str, str]]) -> None:
        names = [
            "files.py",
            "index.html",
            "..",
            "%2e%2e%2fcluster%2fapi.py",
            "..%2f__init__.py",
            "app.js%00",
            "x" * 5000,
        ]
        for name in names:
            answer = await client.get(f"/static/{name}")
            assert answer.status_code in (200, 404), name
            assert answer.status_code == 404 or "<title>BFTrainer</title>" in answer.text

    play(bench, scene)


@pytest.mark.parametrize(
    "query",
    [
        "seconds=0",
        "seconds=nan",
        "seconds=inf",
        "seconds=1e99",
        "cells=0",
        "cells=1000000",
        "cells=x",
        "end=-1",
        "end=nan",
    ],
)
def test_a_window_that_makes_no_sense_is_refused(bench: Bench, query: str) -> None:
    async def scene(client: httpx.AsyncClient, by: dict[str, dict[str, str]]) -> None:
        answer = await client.get(f"/v1/history/nodes?{query}", headers=by["root"])
        assert answer.status_code == 422
        assert query.split("=")[0] in answer.json()["error"]

    play(bench, scene)


def test_decisions_are_told_with_reasons_and_users_see_their_part(bench: Bench) -> None:
    story(bench)

    async def scene(client: httpx.AsyncClient, by: dict[str, dict[str, str]]) -> None:
        found = (await client.get("/v1/decisions", headers=by["root"])).json()["decisions"]
        assert {change["trainer"] for one in found for change in one["changes"]} == {"t1", "t2"}
        assert [one["seq"] for one in found] == sorted((one["seq"] for one in found), reverse=True)
        assert all(
            change["reason"] and change["before"] != change["after"] for one in found for change in one["changes"]
        )
        older = await client.get(f"/v1/decisions?before={found[0]['seq']}&limit=1", headers=by["root"])
        assert older.json()["decisions"] == found[1:2]
        assert (await client.get("/v1/decisions", headers=by["ann"])).json()["decisions"] == []
        mine = (await client.get("/v1/decisions", headers=by["someone"])).json()["decisions"]
        assert {change["name"] for one in mine for change in one["changes"]} == {"mine", "other"}
        assert (await client.get("/v1/trainers/t1/history", headers=by["ann"])).status_code == 404
        assert (await client.get("/v1/trainers/t1/history", headers=by["someone"])).status_code == 200

    play(bench, scene)


def chain(bench: Bench, trainer: str, owner: str | None = None) -> list[tuple[int, int]]:
    """Sizes of a trainer as decisions and losses tell of them, oldest first."""
    db = Database.open(bench.store.path, read_only=True)
    try:
        found, following = read_decisions(db, 1 << 60, 200, owner)
    finally:
        db.close()
    assert following is None
    steps = [step for one in found for step in (*one["changes"], *one["lost"]) if step["trainer"] == trainer]
    return [(step["before"], step["after"]) for step in reversed(steps)]


def test_the_sizes_of_a_trainer_add_up_from_row_to_row(bench: Bench) -> None:
    bench.join("n1", "n2", "n3", "n4")
    trainer = bench.submit("2-4", name="mine")
    bench.now += 10
    bench.take("n1")  # 4 to 3, and nothing to decide
    bench.now += 10
    with bench.store.transaction():
        bench.act(bench.cluster.leaving("n2", 5.0, bench.now))  # 3 to 2, announced; then it leaves: one loss
    bench.settle()
    bench.now += 10
    bench.take("n3")  # below its minimum
    bench.now += 10
    bench.join("n5", "n6")
    sizes = chain(bench, trainer)
    assert sizes[0][0] == 0
    assert [(after, before) for (_, after), (before, _) in pairwise(sizes) if after != before] == []
    assert {(4, 3), (3, 2), (2, 0)} <= set(sizes)
    assert chain(bench, trainer, "someone") == sizes
    assert chain(bench, trainer, "eve") == []


def test_what_a_finished_trainer_held_is_not_lost_to_it(bench: Bench) -> None:
    bench.join("n1")
    trainer = bench.submit("1")
    bench.finish(trainer)
    bench.now += 10
    bench.take("n1")
    assert chain(bench, trainer) == [(0, 1)]


def test_the_api_says_why_a_trainer_is_queued(bench: Bench) -> None:
    bench.join("n1")
    bench.submit("9-12")

    async def scene(client: httpx.AsyncClient, by: dict[str, dict[str, str]]) -> None:
        for path in ("status", "trainers"):
            (row,) = (await client.get(f"/v1/{path}", headers=by["someone"])).json()["trainers"]
            assert row["reason"] == "needs at least 9 nodes; the pool has 1"
        row = (await client.get("/v1/trainers/t1", headers=by["someone"])).json()
        assert row["reason"] == "needs at least 9 nodes; the pool has 1"

    play(bench, scene)


def test_what_finished_long_ago_is_found_and_users_find_their_own(bench: Bench) -> None:
    for i in range(5):
        owner, group = ("ann", "sweep%") if i % 2 else ("someone", "")
        spec = {"script": "/t.py", "group": group}
        row = bench.store.add_trainer(name=f"Trial-{i}", owner=owner, spec=spec, time=1.0)
        bench.store.update_trainer(row.id, state="failed" if i == 4 else "done", ended=2.0, metrics={"loss": 0.5})
    bench.submit(name="unfinished")

    async def scene(client: httpx.AsyncClient, by: dict[str, dict[str, str]]) -> None:
        async def ask(who: str, query: str) -> tuple[list[str], int | None]:
            found = (await client.get(f"/v1/finished?{query}", headers=by[who])).json()
            return [row["name"] for row in found["trainers"]], found["before"]

        first, before = await ask("root", "limit=3")
        assert first == ["Trial-4", "Trial-3", "Trial-2"]
        assert await ask("root", f"limit=3&before={before}") == (["Trial-1", "Trial-0"], None)
        assert (await ask("ann", ""))[0] == ["Trial-3", "Trial-1"]
        assert (await ask("ann", "search=trial-2"))[0] == []
        assert (await ask("root", "search=TRIAL-2"))[0] == ["Trial-2"]
        assert (await ask("root", "search=sweep%25"))[0] == ["Trial-3", "Trial-1"], "no sign means anything else"
        assert (await ask("root", "search=failed"))[0] == ["Trial-4"]
        assert (await ask("root", "search=t5"))[0] == ["Trial-4"]
        assert (await client.get("/v1/finished?limit=0", headers=by["root"])).status_code == 422

    play(bench, scene)


def test_the_stream_tells_the_status_and_ends_with_the_token(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    story(bench)
    monkeypatch.setattr(feed, "STREAM_EVERY_S", 0.01)
    monkeypatch.setattr(feed, "_CHECK_S", 0.0)
    good = iter([True, False])

    async def scene(client: httpx.AsyncClient, by: dict[str, dict[str, str]]) -> None:
        monkeypatch.setattr(TokenTable, "check", _until(bench.store, good))
        answer = await client.get("/v1/stream", headers=by["root"])
        told = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert {row["name"] for row in told[0]["trainers"]} == {"mine", "other"}

    play(bench, scene)


def test_one_owner_cannot_take_all_streams(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MOST_STREAMS_EACH", 0)

    async def scene(client: httpx.AsyncClient, by: dict[str, dict[str, str]]) -> None:
        answer = await client.get("/v1/stream", headers=by["ann"])
        assert answer.status_code == 503
        assert "0 of your pages" in answer.json()["error"]

    play(bench, scene)

    async def count() -> None:
        streaming = feed.StatusFeed(lambda caller: {})
        row = next(row for row in bench.store.tokens.all() if row.owner == "ann")
        streams = [streaming.events(row, lambda: True, lambda: False) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        assert streaming.open == {"ann": 2}
        for stream in streams:
            await stream.aclose()
        assert streaming.open == {}

    asyncio.run(count())


def test_a_stream_ends_with_the_controller_however_long_it_rests(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "STREAM_EVERY_S", 3600.0)

    async def scene() -> None:
        row = bench.store.tokens.check(bench.store.tokens.create(name="a", owner="a", role="user", time=1.0))
        assert row is not None
        over: list[bool] = []
        stream = feed.StatusFeed(lambda caller: {}).events(row, lambda: True, lambda: bool(over))
        assert "status" in await anext(stream)
        over.append(True)
        async with asyncio.timeout(30):
            assert [text async for text in stream] == []

    asyncio.run(scene())


def _until(store: Store, good: Any) -> Any:
    real = store.tokens.check

    def check(self: TokenTable, token: str, time: float | None = None) -> Any:
        return real(token, time) if time is not None or next(good) else None

    return check


def test_points_stay_few_and_spread_over_the_whole_training(bench: Bench) -> None:
    bench.submit()
    points = MetricHistory("t1")
    for step in range(5000):
        points.note(bench.store, 2.0 * step, step, {"loss": 1 / (1 + step)})
        if step == 3000:
            points = MetricHistory("t1")  # the controller was restarted
    points.note(bench.store, 9999.0, 5000, {"loss": float("nan")}, last=True)
    rows = bench.store._db.rows("SELECT time, metrics FROM points WHERE trainer = 1 ORDER BY time")
    assert MOST / 4 < len(rows) <= MOST + 1
    assert rows[-1] == (9999.0, '{"loss":null}')
    assert max(after[0] - before[0] for before, after in pairwise(rows)) < 200


def test_a_trainer_without_metrics_has_points_too(bench: Bench) -> None:
    bench.submit()
    points = MetricHistory("t1")
    for step in range(3):
        points.note(bench.store, 1000.0 + 10 * step, 5 * step, {})
    assert bench.store.points("t1") == [(1010.0, 5), (1020.0, 10)]


def test_what_pauses_cost_is_counted_at_the_rate_before_them(bench: Bench) -> None:
    trainer = bench.submit()
    bench.store.update_trainer(trainer, learned={"in_use": {"2": 100.0}}, samples_redone=(1 << 63) - 1)
    for why, size in (("grow", 2), ("preempt", 4), ("start", 2)):
        bench.store.log(
            bench.now, OtherEvent("rescale", trainer=trainer, data={"why": why, "world_before": size, "pause_s": 0.5})
        )
    assert costs(bench, 10) == {"preemption": 100.0, "rescale": 50.0}
    assert costs(bench, -10)["rescale"] == 0


def costs(bench: Bench, seconds: float = 1e6) -> dict[str, float]:
    db = Database.open(bench.store.path, read_only=True)
    try:
        return read_costs(db, bench.now - seconds, bench.now)
    finally:
        db.close()


def test_a_trainer_that_lost_all_its_nodes_loses_until_it_trains_again(bench: Bench) -> None:
    bench.join("n1", "n2")
    trainer = bench.submit("1-2")
    bench.store.update_trainer(trainer, learned={"in_use": {"2": 10.0}})
    bench.now += 100
    bench.take("n1", "n2")
    early = costs(bench)["preemption"]  # the pause after the first of them
    bench.now += 50
    assert costs(bench)["preemption"] - early == 500.0, "it still waits"
    assert costs(bench, 20)["preemption"] == 200.0, "of this, what lies in the window"
    bench.join("n3")
    assert bench.state(trainer) == "running"
    bench.now += 1000
    assert costs(bench)["preemption"] - early == 500.0
    assert costs(bench)["rescale"] == 0.0


def test_a_script_that_fails_loses_nothing_to_preemption(bench: Bench) -> None:
    bench.join("n1")
    trainer = bench.submit("1")
    bench.store.update_trainer(trainer, learned={"in_use": {"1": 10.0}})
    bench.end(bench.members(trainer)[0], 1)
    for _ in range(20):
        bench.pass_time(1.0)
    assert bench.state(trainer) == "running"
    assert [row["why"] for row in rescales(bench)] == ["start", "start"]
    assert costs(bench) == {"preemption": 0.0, "rescale": 0.0}


def test_a_node_that_says_it_will_go_makes_a_preemption_of_a_shrink(bench: Bench) -> None:
    bench.join("n1", "n2", "n3")
    trainer = bench.submit("1-3")
    bench.store.update_trainer(trainer, learned={"in_use": {"3": 10.0}})
    before = costs(bench)
    with bench.store.transaction():
        bench.act(bench.cluster.leaving("n1", 50.0, bench.now))
    bench.settle()
    assert rescales(bench)[-1]["why"] == "shrink"
    assert costs(bench)["rescale"] == before["rescale"]
    assert costs(bench)["preemption"] == before["preemption"] + 0.2 * 10.0


def rescales(bench: Bench) -> list[Any]:
    return [event.data for event in bench.store.events(kind="rescale")]


@pytest.mark.parametrize(("efficiency", "least_s"), [(None, daily.SOON_S), (0.5, daily.EVERY_S)])
def test_one_looks_again_sooner_while_there_is_no_figure(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, efficiency: float | None, least_s: float
) -> None:
    class Process:
        returncode = 0

        async def communicate(self) -> tuple[bytes, bytes]:
            return json.dumps({"efficiency": efficiency}).encode(), b""

    async def start(*words: str, **more: Any) -> Process:
        return Process()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(daily, "SHARE", 1e9)

    async def scene() -> None:
        insights = daily.DailyEfficiency(bench.store.path, PolicySettings())
        assert insights.newest() is None
        began = time.monotonic()
        assert insights._task is not None
        await insights._task
        assert insights.newest() == {"efficiency": efficiency}
        assert least_s <= insights._due - began < 2 * least_s + 30

    asyncio.run(scene())


@pytest.mark.parametrize("window_s", [86400.0, 120.0])
def test_looking_back_says_how_efficient_it_was_or_why_it_cannot(bench: Bench, window_s: float) -> None:
    policy = PolicySettings()
    assert look_back(bench.store.path, policy, bench.now)["why"]
    story(bench)
    for trainer in ("t1", "t2"):
        bench.store.update_trainer(trainer, samples=500, started=1000.0)
    bench.store.log(bench.now, OtherEvent("trainer.note"))
    found = look_back(bench.store.path, policy, bench.now, window_s)
    assert found["why"] == ""
    assert 0 < found["bound"] <= 1.5
    assert found["efficiency"] > 0
    assert found["since"] == max(bench.now - window_s, 1000.0)


def test_what_was_made_before_the_last_day_does_not_count_in_it(bench: Bench) -> None:
    bench.join("n1", "n2")
    trainer = bench.submit("1-2", name="silent")  # no metrics, and no end that it tells
    bench.now += 3000
    bench.store.update_trainer(trainer, samples=3000, started=1000.0)
    bench.store.log(bench.now, OtherEvent("trainer.note"))
    whole, third = (look_back(bench.store.path, PolicySettings(), bench.now, seconds) for seconds in (3000.0, 1000.0))
    assert (whole["why"], third["why"]) == ("", "")
    assert third["efficiency"] == pytest.approx(whole["efficiency"], rel=0.05)
