"""The queue on a fake cluster: who runs, and what waiting trainers are told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bftrainer.cluster.http.wait_reason import WaitReasons
from bftrainer.cluster.report.rerun import KINDS, check
from bftrainer.cluster.spec.trainer import TrainerSpec
from support.cluster.bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    found = Bench(tmp_path)
    yield found
    found.store.close()


def automatic(bench: Bench) -> Bench:
    """The bench with the live default of max parallel."""
    bench.policy = replace(bench.policy, max_parallel=None)
    bench.cluster.planner.scheduler.policy = replace(bench.cluster.planner.scheduler.policy, max_parallel=None)
    return bench


def submit(bench: Bench, owner: str, nodes: str = "1-8", **more: Any) -> str:
    spec = TrainerSpec.model_validate({"script": "/train.py", "nodes": nodes, **more})
    with bench.store.transaction():
        trainer, effects = bench.cluster.submit(spec, owner, bench.now)
        bench.act(effects)
    bench.settle()
    return trainer


def why(bench: Bench, trainer: str) -> str:
    return WaitReasons(bench.cluster).of(bench.cluster.trainers[trainer])


@pytest.mark.parametrize("auto", [False, True])
def test_ten_trainers_of_eight_nodes_do_not_stop_a_trainer_of_one(bench: Bench, auto: bool) -> None:
    if auto:
        automatic(bench)
    bench.join(*(f"n{i}" for i in range(6)))
    large = [submit(bench, "bob", "8-64") for _ in range(10)]
    small = submit(bench, "ann", "1-4")
    assert len(bench.nodes_of(small)) == 4
    assert why(bench, small) == ""
    assert {why(bench, one) for one in large} == {"needs at least 8 nodes; the pool has 6"}
    bench.restart()
    assert len(bench.nodes_of(small)) == 4
    bench.join(*(f"m{i}" for i in range(8)))
    assert len(bench.nodes_of(large[0])) >= 8, "the first one runs once it can"
    assert bench.nodes_of(small), "and nobody is thrown out for it"
    assert check(bench.store.all_events(KINDS), bench.policy).mismatches == ()


def test_one_that_waits_while_all_nodes_are_used_is_told_so(bench: Bench) -> None:
    automatic(bench).join("n1", "n2")
    trainers = [submit(bench, "ann", "1-1") for _ in range(12)]
    assert sum(bool(bench.nodes_of(one)) for one in trainers) == 2
    assert why(bench, trainers[-1]) == "waits for its turn: the nodes are used by earlier trainers"
    assert why(bench, trainers[5]) == "the nodes are worth more to other trainers now"
