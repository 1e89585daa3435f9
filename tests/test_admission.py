"""The queue: trainers that cannot run keep nobody waiting, and no node is idle that a trainer could use."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.allocate import admission
from bftrainer.allocate.problem import Limits
from bftrainer.allocate.quotas import Quota
from bftrainer.core.curve import Curve
from bftrainer.core.objective import find_objective
from bftrainer.core.pool import Event
from bftrainer.core.trainer import Trainer
from bftrainer.scheduler import Plan, Policy, Scheduler, State

CURVE = Curve.through([1, 8, 64], [100.0, 700.0, 5000.0])
LIVE = Policy(objective=find_objective("weighted-efficiency"), max_parallel=None)


def trainer(name: str, least: int, most: int, owner: str = "", curve: Curve = CURVE) -> Trainer:
    return Trainer(name, curve, least, most, 1.0, 1.0, owner=owner)


def some(name: str, number: int, least: int, most: int, owner: str = "") -> list[Trainer]:
    return [trainer(f"{name}{i}", least, most, owner) for i in range(number)]


def pool_of(nodes: int, *trainers: Trainer) -> State:
    state, _ = State().pool_changed(Event(0.0, joined=tuple(f"n{i}" for i in range(nodes))))
    return state.submitted(*trainers)


def running(plan: Plan) -> dict[str, int]:
    return {name: nodes for name, nodes in plan.counts.items() if nodes}


@pytest.mark.parametrize("parallel", [1, 10, None])
def test_ten_trainers_of_eight_nodes_do_not_stop_a_trainer_of_one_on_six_nodes(parallel: int | None) -> None:
    state = pool_of(6, *some("big", 10, 8, 64), trainer("small", 1, 4))
    assert running(Scheduler(replace(LIVE, max_parallel=parallel)).decide(state)) == {"small": 4}


def test_trainers_that_cannot_run_now_come_first_when_the_pool_grows() -> None:
    scheduler = Scheduler(Policy(max_parallel=2))
    state = pool_of(6, *some("big", 3, 8, 8), *some("small", 4, 1, 2))
    plan = scheduler.decide(state)
    assert running(plan) == {"small0": 2, "small1": 2}
    state = state.after(plan)
    assert scheduler.decide(state).considered == plan.considered, "nobody is admitted again for the same places"
    state, _ = state.pool_changed(Event(60.0, joined=tuple(f"m{i}" for i in range(12))))
    plan = scheduler.decide(state)
    assert running(plan) == {"big0": 8, "big1": 8, "small0": 1, "small1": 1}, "and nobody is thrown out"
    state = state.after(plan).finished("big0").finished("small0")
    plan = scheduler.decide(state)
    assert [t.name for t in plan.considered] == ["big1", "small1"], "two can run: two is max parallel"
    state = state.after(plan).finished("small1")
    assert [t.name for t in scheduler.decide(state).considered] == ["big1", "big2"], "it came before small2"


def test_a_running_trainer_is_not_thrown_out_for_those_that_came_first() -> None:
    scheduler = Scheduler(Policy(max_parallel=1))
    state = pool_of(4, trainer("big", 8, 8), trainer("small", 1, 4))
    state = state.after(scheduler.decide(state))
    state, _ = state.pool_changed(Event(60.0, joined=tuple(f"m{i}" for i in range(8))))
    assert running(scheduler.decide(state)) == {"big": 8, "small": 4}


def test_trainers_that_cannot_run_beside_earlier_ones_leave_the_rest_to_others() -> None:
    state = pool_of(6, *some("four", 10, 4, 4), *some("one", 3, 1, 1))
    plan = Scheduler(Policy(max_parallel=10)).decide(state)
    assert running(plan) == {"four0": 4, "one0": 1, "one1": 1}
    assert "one2" not in plan.counts


def test_an_owner_whose_trainers_exceed_the_cap_together_keeps_nobody_waiting() -> None:
    state = pool_of(8, *some("ann", 4, 3, 3, "ann"), *some("bob", 2, 1, 1, "bob"))
    state = state.after(Scheduler(Policy(max_parallel=4)).decide(state))
    plan = Scheduler(Policy(max_parallel=4, quotas={"ann": Quota(max_nodes=4)})).decide(state)
    assert sorted(running(plan).values()) == [1, 1, 3]


def test_trainers_that_exclude_each_other_take_one_place() -> None:
    group = some("either", 3, 1, 2)
    limits = Limits(exclusive=(frozenset(t.name for t in group),))
    state = pool_of(8, *group, *some("other", 3, 1, 2))
    plan = Scheduler(Policy(max_parallel=3, limits=limits)).decide(state)
    assert len(running(plan)) == 3
    assert running(plan).keys() >= {"other0", "other1"}


@pytest.mark.parametrize(("nodes", "most"), [(200, 8), (2000, 64)])
def test_by_default_the_live_system_leaves_no_node_idle(nodes: int, most: int) -> None:
    plan = Scheduler(LIVE).decide(pool_of(nodes, *some("t", 300, 1, most)))
    assert sum(plan.counts.values()) == nodes
    assert len(plan.considered) < 300, "not more are considered than useful"


def test_nodes_that_earlier_trainers_cannot_use_go_to_later_ones() -> None:
    flat = Curve.through([1, 4, 64], [100.0, 400.0, 100.0])  # more than four nodes are of no use
    early = [trainer(f"early{i}", 1, 64, curve=flat) for i in range(40)]
    state = pool_of(640, *early, *some("late", 60, 1, 64))
    plan = Scheduler(LIVE).decide(state)
    assert sum(plan.counts.values()) == 640
    assert len(plan.considered) < 100


def test_the_number_for_a_large_pool_is_bounded_by_the_time_of_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = some("t", 400, 1, 8)
    assert admission.automatic_parallel(200.0, queue) == 71
    monkeypatch.setattr(admission, "MOST_CELLS", 200 * 40)
    assert admission.automatic_parallel(200.0, queue) == 40
    monkeypatch.setattr(admission, "MOST_CELLS", 1)
    assert admission.automatic_parallel(200.0, queue) == 25, "as many as can use the pool"


@settings(max_examples=80)
@given(st.integers(0, 10**9))
def test_no_node_is_idle_that_a_waiting_trainer_could_use(seed: int) -> None:
    rng = random.Random(seed)
    quotas = {"ann": Quota(max_nodes=rng.randint(0, 20))} if rng.random() < 0.5 else {}
    scheduler = Scheduler(replace(LIVE, quotas=quotas))
    state, outside = State(), [f"n{i}" for i in range(60)]
    for step in range(8):
        least = [rng.choice([1, 1, 2, 5, 30]) for _ in range(rng.randint(0, 12))]
        state = state.submitted(
            *(
                replace(trainer(f"t{step}.{i}", n, n + rng.randint(0, 9), rng.choice(["ann", "bob"])), submit=step)
                for i, n in enumerate(least)
            )
        )
        joiners = tuple(rng.sample(outside, rng.randint(0, len(outside))))
        leavers = tuple(rng.sample(sorted(state.pool), rng.randint(0, len(state.pool))))
        outside = [n for n in outside if n not in joiners] + list(leavers)
        state, _ = state.pool_changed(Event(step * 60.0, joiners, leavers))
        plan = scheduler.decide(state)
        before, state = state, state.after(plan)
        idle = len(state.pool) - sum(plan.counts.values())
        held = sum(plan.counts[t.name] for t in plan.considered if t.owner == "ann")
        for one in state.waiting:
            free = min(idle, plan.limits.owner_caps.get("ann", 60) - held) if one.owner == "ann" else idle
            assert one.min_nodes > free, (one, idle)
        assert sorted(t.name for t in (*state.admitted, *state.waiting)) == sorted(
            t.name for t in (*before.admitted, *before.waiting)
        )
        assert set(before.admitted) <= set(state.admitted), "nobody loses its place"
