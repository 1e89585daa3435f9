from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.allocate.place import Compact
from bftrainer.allocate.problem import Limits
from bftrainer.allocate.registry import make_allocator
from bftrainer.core.curve import Curve
from bftrainer.core.objective import efficiency
from bftrainer.core.pool import Event
from bftrainer.core.topology import Topology
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError
from bftrainer.scheduler import Plan, Policy, Scheduler, State
from bftrainer.simulate.study import deal_trainers, split_nodes

CURVE = Curve.through([0, 1, 2, 4, 8], [0.0, 100.0, 190.0, 350.0, 600.0])


def trainer(name: str, least: int = 1, most: int = 8, submit: float = 0.0, **more: object) -> Trainer:
    return Trainer(name, CURVE, least, most, 18.0, 12.0, submit=submit, **more)  # type: ignore[arg-type]


def joined(time: float, *nodes: str) -> Event:
    return Event(time, joined=nodes)


def started(*trainers: Trainer, nodes: int) -> State:
    state = State()
    for one in trainers:
        state = state.submitted(one)
    return state.pool_changed(joined(0.0, *(f"n{i}" for i in range(nodes))))[0]


def test_a_decision_starts_trainers_and_says_why() -> None:
    state = started(trainer("a"), trainer("b"), nodes=4)
    plan = Scheduler().decide(state)
    assert plan.counts == {"a": 2, "b": 2}
    assert [change.action for change in plan.changes] == ["start", "start"]
    assert plan.changes[0].gain == 120 * 190
    assert plan.changes[0].reason == "a starts on 2 nodes (from 0): worth +22,800 over 120 s, less 0 lost in rescaling"
    assert sorted(plan.placed.nodes["a"] + plan.placed.nodes["b"]) == ["n0", "n1", "n2", "n3"]


def test_a_trainer_grows_when_that_pays_within_the_horizon() -> None:
    state = started(trainer("a"), nodes=2)
    state = state.after(Scheduler().decide(state))
    state, _ = state.pool_changed(joined(60.0, "n7", "n8"))
    short, long = (Scheduler(Policy(horizon_s=h)).decide(state).changes[0] for h in (20.0, 120.0))
    assert (short.action, short.after) == ("keep", 2)
    assert (long.action, long.after, long.cost) == ("grow", 4, 18.0 * 190)
    assert long.reason.startswith("a grows to 4 nodes (from 2): worth +19,200 over 120 s, less 3,420 lost")


def test_only_so_many_trainers_are_considered_first_come_first_served() -> None:
    state = started(trainer("late", submit=9.0), trainer("a", submit=1.0), trainer("b", submit=2.0), nodes=30)
    plan = Scheduler(Policy(max_parallel=2)).decide(state)
    assert list(plan.counts) == ["a", "b"]
    state = state.after(plan).finished("a")
    assert list(Scheduler(Policy(max_parallel=2)).decide(state).counts) == ["b", "late"]


def test_a_trainer_that_lost_nodes_is_reported_and_goes_on_with_the_rest() -> None:
    state = started(trainer("a"), nodes=4)
    state = state.after(Scheduler().decide(state))
    state, lost = state.pool_changed(Event(30.0, left=("n1", "n2")))
    assert {name: set(nodes) for name, nodes in lost.items()} == {"a": {"n1", "n2"}}
    assert set(state.assigned["a"]) == {"n0", "n3"}


def test_a_trainer_preempted_below_its_minimum_has_stopped_and_frees_its_nodes() -> None:
    state = started(trainer("big", least=4), trainer("small"), nodes=4)
    state = state.after(Scheduler(Policy(max_parallel=1)).decide(state))
    assert len(state.assigned["big"]) == 4
    state, lost = state.pool_changed(Event(30.0, left=("n0",)))
    assert lost == {"big": ("n0",)}
    assert dict(state.assigned) == {}
    plan = Scheduler(Policy(max_parallel=2)).decide(state)
    assert plan.counts == {"big": 0, "small": 3}
    assert [c.action for c in plan.changes] == ["wait", "start"]
    assert plan.changes[0].reason == "big waits: it needs at least 4 nodes; the pool has 3"


def test_a_shrinking_trainer_is_told_that_others_gain_more() -> None:
    fast = Trainer("fast", Curve.through([0, 8], [0.0, 80_000.0]), 1, 8, 1.0, 1.0)
    state = started(trainer("slow"), nodes=8)
    state = state.after(Scheduler().decide(state)).submitted(fast)
    changes = {c.trainer: c for c in Scheduler().decide(state).changes}
    assert changes["slow"].action in ("shrink", "stop")
    assert changes["slow"].reason.endswith("others gain more from its nodes")


def test_an_automatic_horizon_is_the_time_between_leaves_once_enough_were_seen() -> None:
    scheduler = Scheduler(Policy(horizon_s=None))
    state = State().pool_changed(joined(0.0, *(f"n{i}" for i in range(40))))[0]
    assert scheduler.horizon_s(state) == 120.0
    for i in range(20):
        state, _ = state.pool_changed(Event(300.0 * (i + 1), left=(f"n{i}",)))
    assert scheduler.horizon_s(state) == 300.0
    assert scheduler.decide(state.submitted(trainer("a"))).horizon_s == 300.0


def test_automatic_max_parallel_lies_between_idle_nodes_and_starved_trainers() -> None:
    scheduler = Scheduler(Policy(max_parallel=None))
    state = started(*(trainer(f"t{i}") for i in range(200)), nodes=64)
    # 8 trainers can use 64 nodes at their largest, 64 fit at their smallest.
    assert scheduler.max_parallel(state) == round(math.sqrt(8 * 64))
    # Never fewer than with the paper's setting.
    assert scheduler.max_parallel(started(trainer("a"), nodes=64)) == 10
    assert scheduler.max_parallel(started(trainer("a", least=8), nodes=2)) == 10
    assert scheduler.max_parallel(State()) == 10


def test_a_smaller_automatic_number_never_drops_a_trainer_that_was_admitted() -> None:
    scheduler = Scheduler(Policy(max_parallel=None))
    state = started(*(trainer(f"t{i}") for i in range(50)), nodes=64)
    plan = scheduler.decide(state)
    state = state.after(plan)
    state, _ = state.pool_changed(Event(3600.0, left=tuple(f"n{i}" for i in range(60))))
    state, _ = state.pool_changed(Event(360000.0, left=("n60",)))
    assert set(scheduler.decide(state).considered) >= set(plan.considered)


def test_the_objective_and_the_allocator_are_the_policys() -> None:
    fast = Trainer("fast", Curve.through([0, 8], [0.0, 80_000.0]), 1, 8)
    state = started(fast, trainer("slow"), nodes=8)
    assert Scheduler().decide(state).counts == {"fast": 8, "slow": 0}
    by_efficiency = Scheduler(Policy(objective=efficiency)).decide(state).counts
    assert by_efficiency["fast"] >= by_efficiency["slow"] > 0 or by_efficiency["fast"] == 8
    assert Scheduler(Policy(allocator=make_allocator("equal"))).decide(state).counts == {"fast": 4, "slow": 4}


def test_limits_reach_the_milp_allocator() -> None:
    policy = Policy(
        allocator=make_allocator("milp"),
        limits=Limits(owner_caps={"ann": 3}, exclusive=[frozenset({"b", "c"}), frozenset({"c", "not considered"})]),
    )
    state = started(trainer("a", owner="ann"), trainer("b"), trainer("c"), nodes=12)
    counts = Scheduler(policy).decide(state).counts
    assert counts["a"] == 3
    assert 0 in (counts["b"], counts["c"])


def test_placement_is_the_policys() -> None:
    nodes = [f"r{r}n{n}" for r in range(4) for n in range(4)]
    state = State().pool_changed(joined(0.0, *nodes))[0]
    for i in range(4):
        state = state.submitted(trainer(f"t{i}", least=4, most=4))
    compact = Policy(placement=Compact(Topology.from_pattern(nodes, r"(r\d)n\d")))
    plan = Scheduler(compact).decide(state)
    assert all(len({node[:2] for node in held}) == 1 for held in plan.placed.nodes.values())


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"horizon_s": 0.0}, "horizon must be a number of seconds above 0"),
        ({"horizon_s": math.inf}, "horizon must be"),
        ({"max_parallel": 0}, "max parallel must be 1 or more"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(policy: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Policy(**policy)  # type: ignore[arg-type]


def test_only_a_trainer_in_the_queue_can_finish() -> None:
    state = State().submitted(trainer("a"), trainer("b"))
    assert [t.name for t in state.finished("a").waiting] == ["b"]
    with pytest.raises(InputError, match="'c' is not in the queue"):
        state.finished("c")


def test_a_trainer_with_a_new_curve_is_valued_anew() -> None:
    scheduler = Scheduler()
    state = started(trainer("a"), trainer("b"), nodes=8)
    assert scheduler.decide(state).counts == {"a": 4, "b": 4}
    learned = replace(state.waiting[0], curve=Curve.through([0, 8], [0.0, 8000.0]))
    assert scheduler.decide(replace(state, waiting=(learned, state.waiting[1]))).counts == {"a": 8, "b": 0}


def check(state: State, plan: Plan) -> None:
    """What must hold of every plan."""
    after = plan.placed.nodes
    flat = [node for nodes in after.values() for node in nodes]
    assert len(flat) == len(set(flat))
    assert set(flat) <= set(state.pool)
    for change in plan.changes:
        before, now = set(state.assigned.get(change.trainer, ())), set(after[change.trainer])
        assert (len(before), len(now)) == (change.before, change.after)
        assert before <= now or now <= before  # a grower keeps every node, a shrinker takes no new one


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.sampled_from(["exact", "equal"]))
def test_no_plan_over_a_random_history_breaks_the_rules(seed: int, allocator: str) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(Policy(allocator=make_allocator(allocator), max_parallel=rng.choice([1, 3, None])))
    state = State()
    outside = [f"n{i}" for i in range(20)]
    for step in range(25):
        for _ in range(rng.randint(0, 1)):
            least = rng.choice([1, 1, 2, 5])
            state = state.submitted(trainer(f"t{step}", least, least + rng.randint(0, 8), submit=float(step)))
        queue = (*state.admitted, *state.waiting)
        if queue and rng.random() < 0.15:
            state = state.finished(rng.choice(queue).name)
        rng.shuffle(outside)
        joiners = tuple(outside[: rng.randint(0, len(outside))])
        leavers = tuple(rng.sample(sorted(state.pool), rng.randint(0, len(state.pool))))
        outside = [n for n in outside if n not in joiners] + list(leavers)
        state, lost = state.pool_changed(Event(step * 60.0, joiners, leavers))
        assert all(set(nodes) <= set(leavers) for nodes in lost.values())
        assert all(len(nodes) >= t.min_nodes for t in state.admitted if (nodes := state.assigned.get(t.name)))
        plan = scheduler.decide(state)
        check(state, plan)
        state = state.after(plan)


def test_a_machine_splits_into_disjoint_parts() -> None:
    nodes = [f"n{i}" for i in range(10)]
    parts = split_nodes(nodes, 3)
    assert [len(part) for part in parts] == [3, 3, 4]
    assert [node for part in parts for node in part] == nodes
    with pytest.raises(InputError, match="parts must be from 1 to the number of nodes"):
        split_nodes(nodes, 11)


def test_trainers_are_dealt_in_order_of_submission() -> None:
    trainers = [trainer(f"t{i}", submit=float(10 - i)) for i in range(5)]
    assert [[t.name for t in part] for part in deal_trainers(trainers, 2)] == [["t4", "t2", "t0"], ["t3", "t1"]]
