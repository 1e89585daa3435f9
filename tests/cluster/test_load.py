"""The load benchmark, small: what a real controller makes of many agents at once is right, however long it takes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from bftrainer.cluster.config.keys import Config, PolicySettings
from bftrainer.cluster.config.policy import policy_of
from bftrainer.cluster.doctor import invariants
from bftrainer.cluster.report.rerun import KINDS, check
from bftrainer.cluster.store.events import OtherEvent
from bftrainer.cluster.store.store import FILE, Store
from support.benchmarks import load_benchmark

pytestmark = pytest.mark.waits

PARALLEL = 8


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_benchmark("controller", monkeypatch)


def test_a_crowd_of_agents_leaves_a_store_in_order_and_decisions_that_can_be_made_again(
    benchmark: ModuleType, tmp_path: Path
) -> None:
    load = benchmark.Load(agents=40, trainers=12, seconds=3.0, churn=600.0, warm_up_s=1.5, ranks_per_node=2)
    found = benchmark.run(load, PARALLEL, tmp_path / "state")
    assert found["problems"] == []
    assert found["states"].get("failed", 0) == 0
    assert found["event_to_command_ms"]["join"]["count"] > 0
    assert found["event_to_command_ms"]["leave"]["count"] + found["event_to_command_ms"]["cut"]["count"] > 0
    assert found["api_ms"]["all"]["count"] > 0
    with Store.open(tmp_path / "state" / FILE, read_only=True) as store:
        trainers = store.trainers()
        running = store.workers(running=True)
        assert len(trainers) >= load.trainers
        assert max(Counter(worker.node for worker in running).values(), default=0) <= 1
        assert store.problems() == []
        assert list(invariants.trainers_agree(trainers)) == []
        assert list(invariants.history(store.all_events(invariants.EVENT_KINDS), trainers, trimmed=False)) == []
        policy = policy_of(Config(policy=PolicySettings(max_parallel=PARALLEL)))
        checked = check(store.all_events(KINDS), policy)
    assert checked.decisions > 0
    assert checked.mismatches == ()


def test_a_command_belongs_to_the_event_that_the_next_decision_follows(benchmark: ModuleType, tmp_path: Path) -> None:
    with Store.open(tmp_path / FILE) as store:
        store.log(10.1, OtherEvent("node.joined", node="a"))
        store.log(10.2, OtherEvent("decision", data={"changes": [{"trainer": "t2", "action": "shrink"}], "ms": 1}))
        store.log(10.2, OtherEvent("worker.started", trainer="t1", node="a", data={"worker": "t1-1"}))
        store.log(11.0, OtherEvent("decision", data={"changes": [], "ms": 1}))
        store.log(11.0, OtherEvent("worker.started", trainer="t1", node="b", data={"worker": "t1-2"}))
        commands = [
            (10.25, "a", "start", "t1-1", 0),
            (10.3, "c", "generation", "t2-1", 4),
            (10.4, "d", "generation", "t3-1", 2),
            (11.1, "b", "start", "t1-2", 0),
        ]
        book = benchmark.Book(store, commands)
    join = {"kind": "join", "time": 10.0, "nodes": ["a"], "survivors": []}
    assert sorted(book.answers(join)) == [10.25, 10.3]
    cut = {"kind": "cut", "time": 10.35, "nodes": ["e"], "survivors": [("d", "t3-1"), ("c", "t2-1")]}
    assert book.answers(cut) == [10.4]
