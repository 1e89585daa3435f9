"""What agents say of GPUs and ranks, as the API, `/metrics`, the history and `bftrainer report` show it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bftrainer.cli.main import run
from bftrainer.cluster.controller.nodes.state import GPU_USE_S
from bftrainer.cluster.history.history import Viewer, pool_over_time
from bftrainer.cluster.history.queries import read_finished, read_past
from bftrainer.cluster.http import prometheus, status, views
from bftrainer.cluster.wire import codec
from bftrainer.cluster.wire.messages import MOST_GPUS, Beat, Gpu, GpuUse, Join, RankStatus, Started
from bftrainer.elastic.protocol import ProtocolError
from support.cluster.api import SPEC, by, play
from support.cluster.bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, gpus={"n1": 4, "n2": 2})
    yield made
    made.store.close()


def node(bench: Bench, name: str, now: float | None = None) -> Any:
    """A node as the API shows it."""
    return views.node(bench.cluster.nodes[name], bench.cluster, bench.now if now is None else now)


def trainer(bench: Bench, name: str) -> Any:
    """A trainer as the API shows it."""
    row = bench.store.trainer(name)
    assert row is not None
    live = bench.cluster.trainers.get(name)
    return views.trainer_in_detail(row, live, bench.now, [], nodes=bench.cluster.nodes)


def test_a_node_shows_its_gpus_their_newest_use_and_the_ranks_on_them(bench: Bench) -> None:
    bench.join("n1", "n2", "n3")
    assert node(bench, "n1")["ranks"] == []
    bench.submit("3-3")
    bench.cluster.beat("n1", bench.now, (GpuUse("0", 90, 1000), GpuUse("1", 10, 500), GpuUse("9", 1, 1)))
    bench.cluster.beat("n1", bench.now, (GpuUse("0", 80, 2000), GpuUse("1", -1, -1), GpuUse("2", 101, 7)))
    bench.cluster.beat("n1", bench.now)  # without a reading
    shown = node(bench, "n1")
    assert [(gpu["id"], gpu["percent"], gpu["used_mb"]) for gpu in shown["gpus"]] == [
        ("0", 80, 2000), ("1", None, None), ("2", None, 7), ("3", None, None),
    ]  # fmt: skip
    assert shown["gpus"][0] | {"percent": None, "used_mb": None} == {
        "id": "0", "kind": "cuda", "name": "NVIDIA A100", "memory_mb": 81920, "percent": None, "used_mb": None,
    }  # fmt: skip
    assert shown["slots"] == 4
    assert shown["ranks"] == [{"pid": 100 + i, "device": str(i)} for i in range(4)]
    assert [node(bench, name)["slots"] for name in ("n2", "n3")] == [2, 1]
    assert node(bench, "n3")["gpus"] == node(bench, "n3")["ranks"] == []
    assert node(bench, "n1", bench.now + GPU_USE_S + 1)["gpus"][0]["percent"] is None  # too old to be true


def test_a_node_that_comes_back_has_no_reading_of_before(bench: Bench) -> None:
    bench.join("n1")
    bench.cluster.beat("n1", bench.now, (GpuUse("0", 90, 1000),))
    bench.take("n1")
    bench.join("n1")
    assert {gpu["percent"] for gpu in node(bench, "n1")["gpus"]} == {None}


def test_the_ranks_of_a_trainer_add_up_over_its_nodes_and_survive_a_restart(bench: Bench) -> None:
    bench.join("n1", "n2", "n3")
    name = bench.submit("3-3")
    assert trainer(bench, name)["ranks"] == 4 + 2 + 1
    workers = {worker["node"]: worker["ranks"] for worker in trainer(bench, name)["workers"]}
    assert {node: len(ranks) for node, ranks in workers.items()} == {"n1": 4, "n2": 2, "n3": 0}
    bench.pass_time(100)
    bench.restart()
    assert trainer(bench, name)["ranks"] == 7
    assert {worker["node"]: worker["ranks"] for worker in trainer(bench, name)["workers"]} == workers
    assert node(bench, "n1")["ranks"] == workers["n1"]
    assert trainer(bench, name)["gpu_seconds"] == 6 * 100


def test_ranks_are_those_that_run_or_will_run(bench: Bench) -> None:
    bench.gpus = {}
    bench.join("n1")
    name = bench.submit("1-1", ranks_per_node=3)
    assert trainer(bench, name)["ranks"] == 3
    worker = bench.members(name)[0]
    bench.tell("n1", Started(worker, 5, ranks=(RankStatus(5), RankStatus(6))))
    assert trainer(bench, name)["ranks"] == 2
    bench.finish(name)
    assert trainer(bench, name)["ranks"] == 0
    other = bench.submit("1-1", launcher="torchrun", ranks_per_node=2)
    assert trainer(bench, other)["ranks"] == 2  # torchrun is one process, and starts its ranks


@pytest.mark.parametrize(
    "message",
    [
        Join("n1", "h", "a", gpus=tuple(Gpu(str(i)) for i in range(MOST_GPUS + 1))),
        Beat(gpus=tuple(GpuUse(str(i)) for i in range(MOST_GPUS + 1))),
        Started("t1-1", 1, ranks=tuple(RankStatus(i) for i in range(MOST_GPUS + 1))),
    ],
    ids=["join", "beat", "started"],
)
def test_a_node_has_at_most_256_gpus_and_ranks(message: Any) -> None:
    with pytest.raises(ProtocolError, match="must have at most 256 entries"):
        codec.decode(codec.encode(message))


def test_the_id_of_a_gpu_can_be_shown() -> None:
    with pytest.raises(ProtocolError, match="characters that can be printed"):
        codec.decode(codec.encode(Join("n1", "h", "a", gpus=(Gpu("\x1b[2J"),))))


def test_the_api_shows_gpus_and_whose_ranks_run_only_to_those_who_may_know(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        bench.gpus = {"n1": 4, "n2": 2}
        made = await client.post("/v1/trainers", json={**SPEC, "nodes": "1-1"}, headers=by(tokens, "ann"))
        assert made.json()["ranks"] == made.json()["gpu_seconds"] == 0
        bench.settle()
        bench.join("n1", "n2")
        (used,) = bench.nodes_of("t1")
        mine, others = [
            next(row for row in answer.json()["nodes"] if row["node"] == used)
            for answer in [await client.get("/v1/nodes", headers=by(tokens, who)) for who in ("ann", "bob")]
        ]
        assert len(mine["gpus"]) == len(others["gpus"]) == len(mine["ranks"]) == bench.gpus[used]
        assert others["ranks"] == []
        bench.pass_time(100)
        found = (await client.get("/v1/status", headers=by(tokens, "root"))).json()
        assert (found["pool"]["gpus"], found["pool"]["used_gpus"]) == (6, bench.gpus[used])
        assert found["trainers"][0]["ranks"] == bench.gpus[used]

    play(tmp_path, scene)


def test_totals_and_accounts_have_gpu_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        bench.gpus = {"n1": 4, "n2": 4}
        monkeypatch.setattr(status.time, "time", lambda: bench.now)
        for owner in ("ann", "bob"):
            await client.post("/v1/trainers", json={**SPEC, "nodes": "1-1"}, headers=by(tokens, owner))
        bench.settle()
        bench.join("n1", "n2", "n3")
        bench.pass_time(100)
        bench.finish("t1")
        bench.pass_time(50)
        totals = (await client.get("/v1/status", headers=by(tokens, "root"))).json()["totals"]
        assert (totals["gpu_seconds"], totals["used_gpu_seconds"]) == (8 * 150, 4 * 100 + 4 * 150)
        assert (await client.get("/v1/me", headers=by(tokens, "ann"))).json()["use"]["gpu_seconds"] == 400
        owners = (await client.get("/v1/owners", headers=by(tokens, "root"))).json()["owners"]
        assert {row["owner"]: row["use"]["gpu_seconds"] for row in owners} == {"ann": 400, "bob": 600}
        bench.now += 2 * status.RECENT_S  # t1 is among the sums of those that ended
        totals = (await client.get("/v1/status", headers=by(tokens, "ann"))).json()["totals"]
        assert totals["used_gpu_seconds"] == 400

    play(tmp_path, scene)


def test_the_figures_for_prometheus_have_one_value_per_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "MOST_NODES", 2)

    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        bench.gpus = {"n1": 4, "n2": 2, "n10": 1}
        monkeypatch.setattr(prometheus.time, "time", lambda: bench.now)
        await client.post("/v1/trainers", json={**SPEC, "nodes": "4-4"}, headers=by(tokens, "ann"))
        bench.settle()
        bench.join("n1", "n2", "n3", "n10")
        bench.pass_time(100)
        bench.cluster.beat("n1", bench.now, (GpuUse("0", 90, 100), GpuUse("1", 30, 200), GpuUse("2", -1, -1)))
        text = (await client.get("/metrics", headers=by(tokens, "root"))).text
        found = {
            (sample.name, sample.labels.get("node") or sample.labels.get("owner", "")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert found["bftrainer_pool_gpus", ""] == found["bftrainer_pool_gpus_used", ""] == 7
        assert found["bftrainer_pool_gpu_seconds_total", ""] == 700
        assert found["bftrainer_trainer_gpu_seconds_total", ""] == 700
        assert found["bftrainer_owner_gpu_seconds_total", "ann"] == 700
        assert {key[1]: value for key, value in found.items() if key[0] == "bftrainer_node_gpus"} == {"n1": 4, "n2": 2}
        assert found["bftrainer_node_gpu_utilization_ratio", "n1"] == pytest.approx(0.6)
        assert found["bftrainer_node_gpu_memory_used_bytes", "n1"] == 300 << 20
        assert ("bftrainer_node_gpu_utilization_ratio", "n2") not in found
        assert found["bftrainer_nodes_without_gpu_series", ""] == 1

    play(tmp_path, scene)


def test_the_page_gets_gpu_hours_of_the_window_and_of_finished_trainers(bench: Bench) -> None:
    bench.join("n1", "n2", "n3")
    bench.pass_time(100)
    name = bench.submit("2-2")
    on = bench.nodes_of(name)
    bench.pass_time(3600)
    bench.finish(name)
    window = pool_over_time(read_past(bench.store._db, bench.now - 3600, bench.now), 16, Viewer(None))
    assert window["gpu_hours"] == pytest.approx(6)
    assert window["used_gpu_hours"] == pytest.approx(sum(bench.gpus.get(node, 0) for node in on))
    ((row,), _) = read_finished(bench.store._db, "", 99, 10, None)
    assert row["gpu_seconds"] == 3600 * window["used_gpu_hours"]


def test_a_report_has_gpu_hours_in_every_form(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # a narrow table breaks the words of its head
    bench.join("n1", "n3")
    name = bench.submit("1-1")
    used = bench.gpus.get(*bench.nodes_of(name), 0)
    bench.pass_time(3600)
    bench.finish(name)
    page, table = tmp_path / "page.html", tmp_path / "table.csv"
    words = ["report", "--state", str(tmp_path), "--no-efficiency"]
    assert run([*words, "--json", "--html", str(page), "--csv", str(table)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["gpu_hours"], found["used_gpu_hours"], found["unused_gpu_hours"]) == (4, used, 4 - used)
    assert found["owners"][0]["gpu_hours"] == found["trainers"][0]["gpu_hours"] == used
    assert found["gpu_seconds"] == "14400.000000"
    rows = [line.split(",") for line in table.read_text().splitlines()]
    assert rows[0][-2:] == ["gpu_seconds", "gpu_hours"]
    assert sum(float(row[-2]) for row in rows[1:]) == 14400
    assert page.read_text().count("GPU-hours") == 3  # a figure and two tables
    assert run(words) == 0
    out = capsys.readouterr().out
    assert "4.00 GPU-hours harvested" in out
    assert out.count("GPU-hours") == 3


def test_a_report_of_nodes_without_gpus_says_nothing_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(tmp_path)
    bench.join("n1")
    name = bench.submit("1-1")
    bench.pass_time(3600)
    bench.finish(name)
    bench.store.close()
    assert run(["report", "--state", str(tmp_path), "--no-efficiency", "--html", str(tmp_path / "page.html")]) == 0
    assert "GPU" not in capsys.readouterr().out + (tmp_path / "page.html").read_text()
