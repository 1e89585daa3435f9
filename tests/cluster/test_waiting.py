"""Why a trainer has no nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bftrainer.cluster.controller.active import ControllerSettings
from bftrainer.cluster.http.wait_reason import WaitReasons
from bftrainer.cluster.store.schema import OwnerRow
from support.cluster.bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    found = Bench(tmp_path)
    yield found
    found.store.close()


def why(bench: Bench, trainer: str) -> str:
    return WaitReasons(bench.cluster).of(bench.cluster.trainers[trainer])


def test_the_reason_follows_what_happens(bench: Bench) -> None:
    large = bench.submit("9-12")
    assert why(bench, large) == "the pool has no nodes"
    bench.join("n1", "n2", "n3", "n4")
    assert why(bench, large) == "needs at least 9 nodes; the pool has 4"
    small = bench.submit("1-4")
    assert why(bench, small) == "", "it trains"
    bench.take("n1", "n2", "n3", "n4")
    assert (bench.state(small), why(bench, small)) == ("waiting", "the pool has no nodes")
    with bench.store.transaction():
        bench.act(bench.cluster.pause(1.0, bench.now))
    assert why(bench, small) == "harvesting is paused"


def test_one_whose_turn_has_not_come_is_told_so(bench: Bench) -> None:
    bench.cluster.planner.scheduler.policy = replace(bench.cluster.planner.scheduler.policy, max_parallel=1)
    bench.join("n1", "n2")
    bench.submit("1-2")
    second = bench.submit("1-2")
    assert why(bench, second) == "waits for its turn: max parallel is 1"


def test_one_for_whom_nothing_is_left_is_told_so(bench: Bench) -> None:
    bench.join("n1")
    trainers = [bench.submit("1"), bench.submit("1")]
    reasons = [why(bench, trainer) for trainer in trainers]
    assert sorted(reasons) == ["", "the nodes are worth more to other trainers now"]


def test_a_cap_is_named_without_saying_what_others_have(bench: Bench) -> None:
    with bench.store.transaction():
        bench.store.put_owner(OwnerRow("someone", max_nodes=2))
        assert bench.cluster.planner.read_limits(bench.now)
    bench.join("n1", "n2", "n3", "n4")
    bench.submit("2", name="first")
    second = bench.submit("1", name="second")
    assert why(bench, second) == "its owner's cap of 2 nodes is used up"


def test_a_dry_run_says_what_it_would_give(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ControllerSettings(dry_run=True))
    bench.join("n1", "n2")
    assert why(bench, bench.submit("1-2")) == "a dry run starts nothing; it would have 2 nodes"
    bench.store.close()
