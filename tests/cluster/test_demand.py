"""How many nodes trainers could use, which a pool asks for before it takes more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bftrainer.cluster.controller.pool_host import ControllerPoolHost
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.rows import OwnerRow
from support.cluster.bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_demand_is_what_all_trainers_could_use_until_they_finish(bench: Bench) -> None:
    planner = bench.cluster.planner
    assert planner.demand() == 0
    first = bench.submit("1-8")
    bench.submit("2-4")
    assert planner.demand() == 12
    bench.join("a", "b")
    assert planner.demand() == 12, "nodes that trainers have count too"
    bench.cluster.cancel(first, "enough", bench.now)
    bench.settle()
    bench.pass_time(1.0)
    assert planner.demand() == 4


def test_limits_of_owners_and_of_the_policy_bound_the_demand(bench: Bench) -> None:
    planner = bench.cluster.planner
    for owner, nodes in (*[("ann", "1-8")] * 3, ("bob", "4-6")):
        spec = TrainerSpec.model_validate({"script": "/train.py", "nodes": nodes})
        with bench.store.transaction():
            bench.cluster.submit(spec, owner, bench.now)
    assert planner.demand() == 30
    bench.store.put_owner(OwnerRow("ann", max_nodes=5))
    planner.read_limits(bench.now)
    assert planner.demand() == 11
    bench.store.put_owner(OwnerRow("bob", max_nodes=3))
    planner.read_limits(bench.now)
    assert planner.demand() == 5, "bob's trainer needs more than bob may have"
    planner.scheduler.policy = replace(planner.scheduler.policy, max_parallel=1, quotas={})
    assert planner.demand() == 8, "the largest one"


def test_a_pool_learns_the_demand_and_which_nodes_are_used(bench: Bench) -> None:
    runner: Any = SimpleNamespace(cluster=bench.cluster)
    host = ControllerPoolHost(runner, runner, {})
    bench.submit("1-1")
    bench.join("a", "b")
    bench.settle()
    assert host.demand == 1
    bench.submit("64-64")
    assert host.demand == 65
    host.could_have(3)
    assert host.demand == 1, "a trainer that can never run needs no node"
    assert len(host.used) == 1
