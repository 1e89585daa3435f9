from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.allocate import milp_nodes
from bftrainer.allocate.milp import first_counts
from bftrainer.allocate.milp_nodes import NodeMilpAllocator, current_map, migration_free
from bftrainer.allocate.problem import Limits, Problem
from bftrainer.allocate.solver import solve
from bftrainer.errors import InputError
from support.allocate.brute import brute_force, same
from support.allocate.problems import claim, large_problem, solves
from support.allocate.strategies import problems
from support.examples import examples


@settings(max_examples=examples(200))
@given(problems(max_claims=4, max_pool=10))
def test_it_finds_what_brute_force_finds(problem: Problem) -> None:
    best, _ = brute_force(problem)
    decision = NodeMilpAllocator().allocate(problem)
    assert decision.status == "optimal"
    assert problem.feasible(decision.counts)
    assert decision.objective == problem.objective(decision.counts)
    assert same(problem, decision.objective, best)


@settings(max_examples=40)
@given(problems(max_claims=4, max_pool=8).filter(lambda problem: problem.pool > 0 and len(problem.claims) > 0))
def test_in_its_map_growers_keep_every_node_and_shrinkers_take_none(problem: Problem) -> None:
    start = first_counts(problem)
    written = milp_nodes._write(problem, start)
    values = solve(written.model, written.point(start), 60).values
    assert values is not None
    had, has = written.current, np.rint(values[written.has]).astype(bool)
    assert (has.sum(axis=0) <= 1).all()
    for before, after in zip(had, has, strict=True):
        assert (before <= after).all() or (after <= before).all()
    assert (np.rint(values[written.changed]).astype(bool) == had ^ has).all()
    assert np.rint(values[written.up]).tolist() == (has.sum(axis=1) > problem.current).tolist()
    assert np.rint(values[written.down]).tolist() == (has.sum(axis=1) < problem.current).tolist()


@settings(max_examples=100)
@given(
    problems(max_claims=4, max_pool=10).filter(lambda problem: problem.pool > 0 and len(problem.claims) > 0), st.data()
)
def test_every_count_vector_is_a_point_of_its_model(problem: Problem, data: st.DataObject) -> None:
    left, counts = problem.pool, []
    for one in problem.claims:
        allowed = [n for n in range(left + 1) if one.allows(n)]
        counts.append(data.draw(st.sampled_from(allowed)))
        left -= counts[-1]
    written = milp_nodes._write(problem, first_counts(problem))
    point = written.point(tuple(counts))
    assert point[written.has].sum(axis=1).tolist() == counts
    assert solves(written.model, point)


def test_the_current_map_hands_out_nodes_in_order() -> None:
    problem = Problem(5, 1.0, (claim("a", current=2), claim("b"), claim("c", current=1)))
    assert current_map(problem).astype(int).tolist() == [[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]]


def test_where_the_pool_shrank_the_current_map_ends_with_the_pool() -> None:
    problem = Problem(3, 1.0, (claim("a", current=2), claim("b", current=4), claim("c", current=1)))
    assert current_map(problem).astype(int).tolist() == [[1, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_a_swap_takes_the_nodes_that_were_released() -> None:
    problem = Problem(4, 1.0, (claim("a", current=3), claim("b", current=1)))
    assert migration_free(current_map(problem), (1, 3)).astype(int).tolist() == [[1, 0, 0, 0], [0, 1, 1, 1]]


def test_one_trainer_may_grow_from_nothing_to_the_whole_pool() -> None:
    decision = NodeMilpAllocator().allocate(Problem(6, 10.0, (claim("a"),)))
    assert decision.counts == (6,)


def test_limits_are_refused_with_the_way_out() -> None:
    problem = Problem(4, 1.0, (claim("a", owner="ann"),), Limits(owner_caps={"ann": 1}))
    with pytest.raises(InputError, match="use the milp allocator"):
        NodeMilpAllocator().allocate(problem)


def test_a_model_that_would_fill_the_memory_is_refused_with_the_way_out() -> None:
    problem = Problem(600_000, 1.0, (claim("a"), claim("b")))
    with pytest.raises(InputError, match="2 trainers × 600000 nodes; use the milp allocator"):
        NodeMilpAllocator().allocate(problem)


def test_without_time_the_current_map_is_kept() -> None:
    problem = large_problem(1)
    decision = NodeMilpAllocator(time_limit_s=1e-9).allocate(problem)
    assert decision.status == "kept"
    assert decision.counts == problem.current


def test_without_time_a_map_that_cannot_be_kept_is_cut_down() -> None:
    problem = Problem(10, 10.0, (claim("a", current=8), claim("b", current=8, least=3), claim("c", current=8)))
    decision = NodeMilpAllocator(time_limit_s=1e-9).allocate(problem)
    assert decision.status == "time-limit"
    assert decision.counts == (8, 0, 2)


@pytest.mark.parametrize("limit_s", [0.001, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_in_any_time_it_is_never_worse_than_the_status_quo(limit_s: float, seed: int) -> None:
    problem = large_problem(seed)
    decision = NodeMilpAllocator(time_limit_s=limit_s).allocate(problem)
    assert problem.feasible(decision.counts)
    assert decision.status in ("optimal", "time-limit", "kept")
    assert decision.objective >= problem.objective(problem.current)
    assert (decision.status == "kept") <= (decision.counts == problem.current)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(0, 10.0, (claim("a", current=3), claim("b"))),
        Problem(10, 10.0, ()),
        Problem(3, 10.0, (claim("a", least=4, most=8), claim("b"))),
        Problem(3, 10.0, (claim("a", least=1000, most=2000),)),
        Problem(9, 10.0, (claim("a", current=9, most=4, down_s=1e6), claim("b"))),
        Problem(9, 10.0, (claim("a", current=2, least=3, up_s=1e6),)),
        Problem(6, 1e-3, (claim("a", current=5), claim("b", current=5, down_s=0.0), claim("c", current=900, most=900))),
        Problem(6, 1e6, (claim("a", current=4, up_s=1e9), claim("b"))),
    ],
    ids=[
        "an empty pool",
        "no claims",
        "a minimum beyond the pool",
        "a minimum far beyond the pool",
        "more than the maximum",
        "stopped below the minimum",
        "more running than the pool holds",
        "costs beyond the horizon",
    ],
)
def test_corner(problem: Problem) -> None:
    decision = NodeMilpAllocator().allocate(problem)
    assert decision.status == "optimal"
    assert same(problem, decision.objective, brute_force(problem)[0])


def test_gurobi_finds_the_same() -> None:
    pytest.importorskip("gurobipy")
    problem = large_problem(4, trainers=5, pool=30)
    decision = NodeMilpAllocator(backend="gurobi").allocate(problem)
    assert decision.status == "optimal"
    assert same(problem, decision.objective, brute_force(problem)[0])


def test_settings_are_checked() -> None:
    assert NodeMilpAllocator().name == "milp-nodes"
    with pytest.raises(InputError, match="time_limit_s"):
        NodeMilpAllocator(time_limit_s=-1)
