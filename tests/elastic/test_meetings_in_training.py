"""Evaluations of rank 0 reach all ranks, whoever is killed or joins meanwhile."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bftrainer.elastic.local.coordinator import Coordinator  # noqa: E402
from support.elastic.jobs import on, play, script  # noqa: E402

pytestmark = pytest.mark.waits

WORKER = script("meeting_worker.py")


def finals(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob("final-*.pt"))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    assert play(on(1), folder, [WORKER, str(folder)]).status == "done"
    return finals(folder)[0]


def check_tracked(folder: Path) -> None:
    """The tracker's run is one, for all ranks that were rank 0, and has each value of each step once, in order."""
    lines = [json.loads(line) for line in (folder / "tracked.jsonl").read_text().splitlines()]
    assert len({run for _, run, *_ in lines}) == 1
    assert len({name for name, _, what, *_ in lines if what == "open"}) >= 2, "rank 0 and the next one"
    logged = [
        (metric, step) for _, _, what, *rest in lines if what == "log" for step, *names in [rest] for metric in names
    ]
    assert [step for metric, step in logged if metric == "loss"] == list(range(1, 17))
    assert [step for metric, step in logged if metric == "middle"] == list(range(1, 17, 2))
    assert [step for metric, step in logged if metric == "end"] == [4, 8, 12, 16]
    assert [what for *_, what in lines].count("finish") == 1


@pytest.mark.parametrize("where", ["middle-1", "end-1", "end-3"])
def test_an_evaluation_whose_rank_0_is_killed_is_made_by_the_next_and_newcomers_wait_for_its_end(
    where: str, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    (tmp_path / f"hold-{where}").touch()

    def evaluating(but: str = "") -> list[str]:
        names = [path.name.removeprefix(f"evaluates-{where}-") for path in tmp_path.glob(f"evaluates-{where}-*")]
        return [name for name in names if name != but]

    async def scenario(job: Coordinator) -> None:
        await job.add(3)
        await job.until(lambda: bool(evaluating()), 60, "the evaluation")
        (first,) = evaluating()
        (newcomer,) = await job.add(1)
        await job.until(lambda: job.roster.is_ready(newcomer), 60, "a newcomer that waits")
        job.signal(first, signal.SIGKILL)
        await job.until(lambda: bool(evaluating(first)), 60, "the next one's evaluation")
        (second,) = evaluating(first)
        assert second != newcomer, "who has not the state cannot evaluate it"
        (tmp_path / f"go-{second}").touch()

    assert play(scenario, tmp_path, [WORKER, str(tmp_path)], nodes=(3, 8)).status == "done"
    found = finals(tmp_path)
    assert len(found) == 3, "both survivors and the newcomer came to the end"
    for final in found:
        assert final["n"] == undisturbed["n"] == 12
        assert final["samples"] == undisturbed["samples"] == 256
        assert final["lr"] == pytest.approx(undisturbed["lr"], abs=1e-15)
        assert final["best"] == found[0]["best"]
        assert final["plateau"] == found[0]["plateau"]
        for name, weight in final["model"].items():
            assert weight.equal(found[0]["model"][name])
            assert (weight - undisturbed["model"][name]).abs().max() < 1e-12
    check_tracked(tmp_path)
    lines = [json.loads(line) for log in tmp_path.glob("log-*.jsonl") for line in log.read_text().splitlines()]
    by_place: dict[tuple[str, int], set[str]] = {}
    for kind, number, value, *rest in lines:
        said = json.dumps([value, rest if kind == "end" else None])
        by_place.setdefault((kind, number), set()).add(said)
    assert {place: len(values) for place, values in by_place.items() if len(values) != 1} == {}, "one value for all"
