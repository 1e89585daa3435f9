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
    lines = [json.loads(line) for log in tmp_path.glob("log-*.jsonl") for line in log.read_text().splitlines()]
    by_place: dict[tuple[str, int], set[str]] = {}
    for kind, number, value, *rest in lines:
        said = json.dumps([value, rest if kind == "end" else None])
        by_place.setdefault((kind, number), set()).add(said)
    assert {place: len(values) for place, values in by_place.items() if len(values) != 1} == {}, "one value for all"
