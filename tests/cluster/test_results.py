"""Results over the HTTP API: the files of a trainer, and the best trainers of a group from their whole history."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from bftrainer.cluster.http import results
from bftrainer.cluster.jobs.extremes import MetricExtremes
from bftrainer.cluster.jobs.progress import TrainerProgress
from bftrainer.cluster.wire.direction import default_direction
from bftrainer.elastic.metrics import MOST, Position
from bftrainer.elastic.protocol import Report
from support.cluster.api import SPEC, by, play
from support.cluster.bench import Bench

HERE = Position(1, 2, 3)


# Extremes.


def test_extremes_are_the_first_of_the_least_and_of_the_greatest_values() -> None:
    extremes = MetricExtremes()
    for step, value in enumerate([0.5, 0.2, float("nan"), 0.9, 0.2, float("inf"), 0.9, 0.4]):
        extremes.note({"a": value}, {"a": [0, step, 10 * step]}, HERE)
    assert extremes.as_json() == {"a": {"min": [0.2, 0, 1, 10], "max": [0.9, 0, 3, 30]}}
    extremes.note({"b": 1.0}, {}, HERE)
    assert extremes.as_json()["b"] == {"min": [1.0, 1, 2, 3], "max": [1.0, 1, 2, 3]}
    again = MetricExtremes()
    again.load(extremes.as_json())
    again.note({"a": 0.1, "b": 2.0}, {}, HERE)
    assert again.as_json()["a"] == {"min": [0.1, 1, 2, 3], "max": [0.9, 0, 3, 30]}
    assert again.as_json()["b"]["max"] == [2.0, 1, 2, 3]


def test_a_script_that_reports_new_names_for_ever_fills_no_memory() -> None:
    extremes = MetricExtremes()
    for number in range(2 * MOST):
        extremes.note({str(number): 1.0}, {}, HERE)
    assert len(extremes.as_json()) == MOST


def test_reports_of_an_earlier_generation_do_not_count() -> None:
    progress = TrainerProgress()
    progress.take(Report(2, 10, metrics={"a": 1.0}, metrics_at={"a": (0, 10, 100)}))
    progress.take(Report(1, 10, metrics={"a": 9.0}, metrics_at={"a": (0, 10, 100)}))
    assert progress.extremes.as_json()["a"]["max"][0] == 1.0


@pytest.mark.parametrize(
    ("metric", "direction"),
    [("accuracy", "max"), ("val_loss", "min"), ("top5_error", "min"), ("Perplexity", "min"), ("RMSE", "min"),
     ("mae", "min"), ("bleu", "max")],
)  # fmt: skip
def test_the_name_of_a_metric_says_which_values_are_better(metric: str, direction: str) -> None:
    assert default_direction(metric) == direction


# The best of a group.


def reports(bench: Bench, trainer: str, *values: float) -> None:
    """A trainer reports these accuracies, one per epoch of ten steps."""
    for epoch, value in enumerate(values, 1):
        bench.now += 10
        at = [epoch, 10 * epoch, 100 * epoch]
        bench.report(
            trainer,
            **dict(zip(("epoch", "step", "samples"), at, strict=True)),
            metrics={"accuracy": value, "val_loss": 1 - value},
            metrics_at={"accuracy": at, "val_loss": at},
        )


async def sweep(client: httpx.AsyncClient, bench: Bench, headers: dict[str, str], **more: Any) -> None:
    """Three trainers of a group `lr`, two of which get a node."""
    for number in (1, 2, 3):
        spec = {**SPEC, "nodes": "1", "name": f"lr-{number}", "group": "lr", "params": {"lr": f"0.{number}"}, **more}
        assert (await client.post("/v1/trainers", json=spec, headers=headers)).status_code == 201
    bench.join("n1", "n2")
    bench.settle()


def test_the_best_value_is_that_of_the_whole_training_and_not_the_last(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        mine = by(tokens, "ann")
        await sweep(client, bench, mine)
        url = "/v1/groups/lr/best"
        nothing = (await client.get(f"{url}?by=accuracy", headers=mine)).json()
        assert [(row["id"], row["best"]) for row in nothing["trainers"]] == [("t1", None), ("t2", None), ("t3", None)]
        reports(bench, "t1", 0.6, 0.7, 0.8)
        reports(bench, "t2", 0.5, 0.9, 0.7)
        found = (await client.get(f"{url}?by=accuracy", headers=mine)).json()
        assert (found["direction"], found["count"], found["metrics"]) == ("max", 3, ["accuracy", "val_loss"])
        first, second, last = found["trainers"]
        assert (first["id"], first["best"], first["value"], first["params"]) == ("t2", 0.9, 0.7, {"lr": "0.2"})
        assert first["best_at"] == {"epoch": 2, "step": 20, "samples": 200}
        assert first["at"] == {"epoch": 3, "step": 30, "samples": 300}
        assert (first["epoch"], first["step"], first["state"]) == (3, 30, "running")
        assert first["folder"] == str(tmp_path / "trainers" / "t2" / "output")
        assert first["run_s"] > 0
        assert first["node_seconds"] > 0
        assert (second["id"], second["best"], last["id"], last["best"]) == ("t1", 0.8, "t3", None)
        assert (last["state"], last["run_s"], last["node_seconds"]) == ("queued", 0.0, 0.0)
        least = (await client.get(f"{url}?by=val_loss&limit=1", headers=mine)).json()
        assert [(row["id"], row["best"]) for row in least["trainers"]] == [("t2", pytest.approx(0.1))]
        assert (least["direction"], least["count"]) == ("min", 3)
        worst = (await client.get(f"{url}?by=accuracy&direction=min", headers=mine)).json()
        assert [(row["id"], row["best"]) for row in worst["trainers"]][:2] == [("t2", 0.5), ("t1", 0.6)]

    play(tmp_path, scene)


def test_finished_trainers_are_judged_by_what_is_stored(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        mine = by(tokens, "ann")
        await sweep(client, bench, mine, env={"BFTRAINER_OUTPUT": "/scratch/mine"})
        reports(bench, "t1", 0.6, 0.9, 0.8)
        bench.pass_time(100.0)
        started = bench.cluster.trainers["t1"].started
        bench.finish("t1")
        row = (await client.get("/v1/groups/lr/best?by=accuracy&limit=1", headers=mine)).json()["trainers"][0]
        assert "t1" not in bench.cluster.trainers
        assert (row["state"], row["best"], row["best_at"]["step"]) == ("done", 0.9, 20)
        assert started is not None
        assert row["run_s"] == pytest.approx(bench.now - started)
        assert row["node_seconds"] == pytest.approx(row["run_s"], rel=0.01)
        assert row["folder"] == "/scratch/mine"

    play(tmp_path, scene)


def test_a_group_and_a_metric_that_do_not_exist_are_named_and_others_see_nothing(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        mine = by(tokens, "ann")
        await sweep(client, bench, mine)
        reports(bench, "t1", 0.6)
        answer = await client.get("/v1/groups/lr/best?by=acuracy", headers=mine)
        assert answer.status_code == 422
        assert answer.json()["error"] == "group lr: unknown metric 'acuracy': did you mean 'accuracy'?"
        for path, who in (("/v1/groups/rl/best", "ann"), ("/v1/groups/lr/best", "bob")):
            answer = await client.get(f"{path}?by=accuracy", headers=by(tokens, who))
            assert answer.status_code == 404
            assert "`bftrainer status` lists all groups" in answer.json()["error"]
        assert (await client.get("/v1/groups/lr/best?by=accuracy", headers=by(tokens, "root"))).status_code == 200
        assert (await client.get("/v1/groups/lr/best?by=accuracy&direction=up", headers=mine)).status_code == 422

    play(tmp_path, scene)


def test_a_trainer_of_an_older_version_is_judged_by_the_points_of_its_history(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        mine = by(tokens, "ann")
        await sweep(client, bench, mine)
        reports(bench, "t1", 0.6)
        bench.finish("t1")
        for time, value in ((2000.0, 0.7), (2010.0, 0.95), (2020.0, None), (2030.0, 0.8)):
            at = {"accuracy": [1, int(time), 5]}
            bench.store.add_point("t1", time, 5, {"accuracy": value}, at)  # type: ignore[dict-item] # it was NaN
        bench.store.update_trainer("t1", extremes={})
        (row,) = (await client.get("/v1/groups/lr/best?by=accuracy&limit=1", headers=mine)).json()["trainers"]
        assert (row["best"], row["best_at"]["step"]) == (0.95, 2010)

    play(tmp_path, scene)


def test_extremes_survive_a_restart_and_those_of_an_older_version_come_from_the_history(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.join("n1")
    trainer = bench.submit("1")
    reports(bench, trainer, 0.6, 0.9, 0.8)
    bench.pass_time(10.0)
    before = bench.cluster.trainers[trainer].job.progress.extremes.as_json()
    assert before["accuracy"]["max"] == [0.9, 2, 20, 200]
    bench.restart()
    assert bench.cluster.trainers[trainer].job.progress.extremes.as_json() == before
    bench.store.update_trainer(trainer, extremes={})
    bench.restart()
    assert bench.cluster.trainers[trainer].job.progress.extremes.as_json() == before
    bench.store.close()


# Files.


def test_the_files_of_a_trainer_are_listed_with_its_state_and_its_last_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        mine, url = by(tokens, "ann"), "/v1/trainers/resnet/results"
        await client.post("/v1/trainers", json={**SPEC, "name": "resnet"}, headers=mine)
        folder = tmp_path / "trainers" / "t1" / "output"
        found = (await client.get(url, headers=mine)).json()
        assert (found["state"], found["exists"], found["files"], found["problem"]) == ("queued", False, [], "")
        assert (found["host"], found["folder"]) == (socket.gethostname(), str(folder))
        bench.join("n1")
        bench.settle()
        reports(bench, "t1", 0.5, float("nan"))
        (folder / "plots").mkdir(parents=True)
        for name, size in (("model-10.pt", 3), ("model-9.pt", 2), ("plots/a.png", 1), (".model.pt.7-0a1b2c3d.tmp", 9)):
            (folder / name).write_bytes(b"x" * size)
        (folder / "link").symlink_to("/etc/passwd")
        found = (await client.get(url, headers=mine)).json()
        assert [(file["name"], file["bytes"]) for file in found["files"]] == [
            ("model-9.pt", 2),
            ("model-10.pt", 3),
            ("plots/a.png", 1),
        ]
        assert found["files"][0]["time"] == (folder / "model-9.pt").stat().st_mtime
        assert (found["state"], found["exists"], found["complete"]) == ("running", True, True)
        assert found["metrics"]["accuracy"] is None  # not a number
        assert found["metrics_at"]["accuracy"] == {"epoch": 2, "step": 20, "samples": 200}
        monkeypatch.setattr(results, "MOST_FILES", 2)
        found = (await client.get(url, headers=mine)).json()
        assert (len(found["files"]), found["complete"]) == (2, False)
        assert (await client.get(url, headers=by(tokens, "bob"))).status_code == 404

    play(tmp_path, scene)


def test_a_folder_that_cannot_be_read_is_said_to_be_so(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        (tmp_path / "file").touch()
        spec = {**SPEC, "name": "a", "env": {"BFTRAINER_OUTPUT": str(tmp_path / "file")}}
        await client.post("/v1/trainers", json=spec, headers=by(tokens, "ann"))
        found = (await client.get("/v1/trainers/a/results", headers=by(tokens, "ann"))).json()
        assert (found["folder"], found["exists"], found["problem"]) == (
            str(tmp_path / "file"),
            False,
            "Not a directory",
        )

    play(tmp_path, scene)
