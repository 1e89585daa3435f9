"""Code at the top of an epoch and code after a committed step count once, whoever joins, resumes or is lost."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from bftrainer.elastic.local.coordinator import Coordinator
from support.elastic.jobs import on, play, script

pytestmark = pytest.mark.waits

WORKER = script("counting_worker.py")
PER_EPOCH = 6
"""Steps of an epoch; there is an evaluation after every third step."""


def argv(folder: Path, epochs: int) -> list[str]:
    return [WORKER, str(folder), str(epochs)]


def results(folder: Path, epochs: int) -> dict[str, dict[str, Any]]:
    paths = sorted(folder.glob(f"result-{epochs}-*.json"))
    return {path.stem.rpartition(f"result-{epochs}-")[2]: json.loads(path.read_text()) for path in paths}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    assert play(on(1), folder, argv(folder, 2)).status == "done"
    return results(folder, 2)["node-1"]


def is_as(undisturbed: dict[str, Any], found: dict[str, Any]) -> None:
    """Check that a rank ended with the counts and the numbers of a training that nothing happened to."""
    assert found["tops"] == undisturbed["tops"] == 2
    assert found["samples"] == undisturbed["samples"] == 2 * 24
    assert [step for step, _ in found["evaluations"]] == [3, 6, 9, 12]
    assert [value for _, value in found["evaluations"]] == pytest.approx(
        [value for _, value in undisturbed["evaluations"]], rel=1e-9
    )
    assert {(step, rate) for step, rate in found["rates"]} <= {
        (step, 0.1 / (1 + step // PER_EPOCH)) for step in range(2 * PER_EPOCH)
    }


def test_nodes_that_start_together_and_a_newcomer_count_the_top_of_each_epoch_once(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    (tmp_path / "hold-2").touch()

    async def scenario(job: Coordinator) -> None:
        await job.add(2)
        await job.until(lambda: len(list(tmp_path.glob("waits-2-*"))) == 2, 60, "the wait of both")
        await job.add(1)

    assert play(scenario, tmp_path, argv(tmp_path, 2), nodes=(2, 3)).status == "done"
    found = results(tmp_path, 2)
    assert {name: result["begun"] for name, result in found.items()} == {"node-1": 0, "node-2": 0, "node-3": 3}
    for result in found.values():
        is_as(undisturbed, result)
        assert result["evaluations"] == found["node-1"]["evaluations"]


def test_a_training_resumed_in_mid_epoch_counts_the_top_of_that_epoch_once(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    hold = tmp_path / f"hold-{PER_EPOCH + 1}"
    hold.touch()

    async def until_stopped(job: Coordinator) -> None:
        await job.add(2)
        await job.until(lambda: len(list(tmp_path.glob("waits-*"))) == 2, 60, "the wait of both")
        await job.stop()

    assert play(until_stopped, tmp_path, argv(tmp_path, 2), nodes=(2, 2)).status == "stopped"
    hold.unlink()
    assert play(on(2), tmp_path, argv(tmp_path, 2), nodes=(2, 2)).status == "done"
    found = results(tmp_path, 2)
    assert len(found) == 2
    for result in found.values():
        assert result["begun"] == PER_EPOCH + 2
        is_as(undisturbed, result)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_complete_training_that_is_prolonged_runs_the_top_of_its_next_epoch(
    nodes: int, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    for epochs in (1, 2):
        assert play(on(nodes), tmp_path, argv(tmp_path, epochs), nodes=(nodes, nodes)).status == "done"
    found = results(tmp_path, 2)
    assert len(found) == nodes
    for result in found.values():
        assert result["begun"] == PER_EPOCH
        is_as(undisturbed, result)


@pytest.mark.parametrize("step", [4, 5])
def test_a_peer_lost_in_a_step_changes_nothing_of_the_evaluations_after_committed_steps(
    step: int, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """The step that is lost is followed by an evaluation when it is made again, or is the one before such a step."""
    (tmp_path / f"stay-{step}-node-2").touch()

    async def scenario(job: Coordinator) -> None:
        await job.add(3)
        await job.until((tmp_path / f"waits-{step}-node-2").exists, 60, "the wait of the second")
        job.signal("node-2", signal.SIGKILL)
        await job.add(1)

    assert play(scenario, tmp_path, argv(tmp_path, 2), nodes=(3, 4)).status == "done"
    found = results(tmp_path, 2)
    assert set(found) == {"node-1", "node-3", "node-4"}
    for result in found.values():
        is_as(undisturbed, result)
        assert result["evaluations"] == found["node-1"]["evaluations"]
    calls = sorted(call for result in found.values() for call in result["calls"])
    assert [call for call in calls if call > step] == [6, 9, 12], "one of the ranks evaluated, once"
