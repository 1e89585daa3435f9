"""Nodes with two ranks each train together: what scripts and managers see of them, and who saves the state."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from bftrainer.elastic import load_snapshot, protocol
from bftrainer.elastic.local.coordinator import Coordinator, Happening
from bftrainer.elastic.protocol import Formed, Report, Taken
from support.elastic.jobs import SETTINGS, play, run_alone, script

pytestmark = pytest.mark.waits

WORKER = script("ranks_worker.py")
TWO_RANKS = replace(SETTINGS, ranks_per_node=2)
WAIT_S = 60.0


def lines(folder: Path) -> list[dict[str, Any]]:
    """All that the ranks wrote down."""
    texts = [path.read_text() for path in folder.glob("ranks-*.jsonl")]
    return [json.loads(line) for text in texts for line in text[: text.rfind("\n") + 1].splitlines()]


def trained(folder: Path, nodes: int) -> list[dict[str, Any]]:
    """The numbers of the ranks of the newest generation, if all ranks of so many nodes train in it."""
    found = [line for line in lines(folder) if "step" in line]
    newest = [line for line in found if line["generation"] == max(line["generation"] for line in found)]
    return sorted(newest, key=lambda line: line["rank"]) if len(newest) == 2 * nodes else []


def test_ranks_have_numbers_of_their_own_and_nodes_are_counted_as_nodes(tmp_path: Path) -> None:
    formed: list[int] = []
    reports: list[Report] = []

    def watch(happening: Happening) -> None:
        if isinstance(happening.message, Formed):
            formed.append(happening.message.world)
        if isinstance(happening.message, Report):
            reports.append(happening.message)

    async def scenario(job: Coordinator) -> None:
        await job.add(2)
        await job.until(lambda: bool(trained(tmp_path, 2)), WAIT_S, "two nodes that train")
        await job.add(1)
        await job.until(lambda: bool(trained(tmp_path, 3)), WAIT_S, "three nodes that train")
        (first, *_) = job.members
        for rank in trained(tmp_path, 3):
            node = job.members.index(rank["worker"])
            assert (rank["node_rank"], rank["nodes"], rank["world"], rank["local_world"]) == (node, 3, 6, 2)
            assert rank["rank"] == 2 * node + rank["local_rank"]
        job.signal(first, signal.SIGKILL, 1)
        await job.until(lambda: len(job.nodes) == 2 and bool(trained(tmp_path, 2)), WAIT_S, "two nodes that go on")
        assert {rank["worker"] for rank in trained(tmp_path, 2)} == set(job.members) == set(job.nodes) - {first}
        await job.until(lambda: any(report.rates for report in reports), WAIT_S, "a rate that was measured")
        (tmp_path / "end").touch()

    assert play(scenario, tmp_path, [WORKER, str(tmp_path)], TWO_RANKS, watch).status == "done"
    start = [line for line in lines(tmp_path) if line["generation"] == 0]
    assert {(line["local_rank"], line["local_world"], line["rank"], line["nodes"]) for line in start} == {
        (0, 2, 0, 1),
        (1, 2, 0, 1),
    }
    assert set(formed) <= {1, 2, 3}
    assert max(formed) == 3
    assert {report.world for report in reports} <= {0, 1, 2, 3}
    assert {int(nodes) for report in reports for nodes in report.rates} <= {1, 2, 3}
    weights = [line["weights"] for line in lines(tmp_path) if "weights" in line]
    assert len(weights) == 4
    assert len(set(weights)) == 1


def committed_by_rank_0(line: dict[str, Any]) -> bool:
    return line.get("local_rank") == 0 and "committed" in line


def test_one_rank_saves_the_last_step_when_a_node_with_two_ranks_is_taken(tmp_path: Path) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(1)
        await job.until(lambda: any(map(committed_by_rank_0, lines(tmp_path))), WAIT_S, "a step to save")
        (node,) = job.members
        job._workers.say(node, protocol.as_json(Taken(20.0)))
        await job.until(lambda: not job.nodes, WAIT_S, "the end of the node")
        await job.stop()

    assert play(scenario, tmp_path, [WORKER, str(tmp_path)], TWO_RANKS).status == "stopped"
    found = lines(tmp_path)
    (saved,) = [line for line in found if "saved" in line]
    assert saved["local_rank"] == 0
    assert saved["saved"] == max(line["committed"] for line in found if committed_by_rank_0(line))
    assert load_snapshot(tmp_path / "snapshots").step == saved["saved"]


def test_one_rank_of_each_node_saves_when_all_nodes_leave(tmp_path: Path) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(1)
        await job.until(lambda: bool(trained(tmp_path, 1)), WAIT_S, "a node that trains")
        await job.stop()

    assert play(scenario, tmp_path, [WORKER, str(tmp_path)], TWO_RANKS).status == "stopped"
    (saved,) = [line for line in lines(tmp_path) if "saved" in line]
    assert saved["local_rank"] == 0


def test_alone_a_script_is_the_only_rank_of_the_only_node(tmp_path: Path) -> None:
    (tmp_path / "end").touch()
    run_alone(tmp_path, WORKER, tmp_path, BFTRAINER_LOCAL_RANK="3", BFTRAINER_LOCAL_WORLD="4")
    for line in lines(tmp_path):
        assert (line["rank"], line["world"], line["local_rank"], line["local_world"]) == (0, 1, 0, 1)
        assert (line["node_rank"], line["nodes"]) == (0, 1)
