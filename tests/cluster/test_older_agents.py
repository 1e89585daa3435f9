"""Agents of version 0.1.0 stay while the controller is upgraded: their workers know of one rank per node only."""

from __future__ import annotations

from pathlib import Path

from support.cluster.bench import Bench


def ranks(bench: Bench) -> dict[str, int]:
    """How many ranks the worker that was started last on each node has."""
    return {bench.workers[start.worker].node: start.ranks for start in bench.started if start.worker in bench.workers}


def test_nodes_have_one_rank_per_gpu(tmp_path: Path) -> None:
    bench = Bench(tmp_path, gpus={"n1": 4, "n2": 2})
    bench.join("n1", "n2", "n3")
    bench.submit("3-3")
    assert ranks(bench) == {"n1": 4, "n2": 2, "n3": 1}


def test_newcomers_have_one_rank_while_a_worker_of_an_older_agent_trains(tmp_path: Path) -> None:
    bench = Bench(tmp_path, gpus={"n2": 4})
    bench.older = {"n1"}
    bench.join("n1")
    name = bench.submit("1-2")
    bench.join("n2")
    bench.pass_time(60)
    assert set(bench.nodes_of(name)) == {"n1", "n2"}
    assert ranks(bench) == {"n1": 1, "n2": 1}


def test_a_node_with_an_older_agent_is_not_used_by_a_trainer_that_has_several_ranks(tmp_path: Path) -> None:
    bench = Bench(tmp_path, gpus={"n1": 4})
    bench.older = {"n2"}
    bench.join("n1")
    bench.submit("1-2")
    assert ranks(bench) == {"n1": 4}
    bench.join("n2")
    bench.pass_time(60)
    assert ranks(bench) == {"n1": 4}
    bench.submit("1-1")  # another trainer can use it
    bench.pass_time(200)
    assert ranks(bench) == {"n1": 4, "n2": 1}
