from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings

from bftrainer.allocate import milp
from bftrainer.allocate.milp import MilpAllocator, first_counts, obeys
from bftrainer.allocate.problem import Limits, Problem
from bftrainer.core.curve import Curve
from bftrainer.errors import InputError
from support.allocate.brute import brute_force, lacking, same, within_limits
from support.allocate.problems import LINE, claim, large_problem, solves
from support.allocate.strategies import problems
from support.examples import examples


@settings(max_examples=examples(200))
@given(problems(max_claims=5, max_pool=20))
def test_it_finds_what_brute_force_finds(problem: Problem) -> None:
    best, _ = brute_force(problem)
    decision = MilpAllocator().allocate(problem)
    assert decision.status == "optimal"
    assert problem.feasible(decision.counts)
    assert decision.objective == problem.objective(decision.counts)
    assert same(problem, decision.objective, best)


@settings(max_examples=examples(150))
@given(problems(max_claims=4, max_pool=7, with_limits=True))
def test_it_keeps_to_limits_and_finds_the_best_within_them(problem: Problem) -> None:
    best, counts = brute_force(problem)
    decision = MilpAllocator().allocate(problem)
    assert decision.status == "optimal"
    assert obeys(problem, decision.counts)
    assert lacking(problem, decision.counts) == lacking(problem, counts)
    assert same(problem, decision.objective, best)


@settings(max_examples=100)
@given(problems(max_claims=4, max_pool=7, with_limits=True))
def test_it_starts_the_solver_from_a_point_of_its_model(problem: Problem) -> None:
    start = first_counts(problem)
    assert obeys(problem, start)
    if obeys(problem, problem.current):
        assert start == problem.current
    for shares_only in (True, False):
        written = milp._write(problem, start, shares_only)
        if written is not None:
            point = written.point(problem, start)
            assert solves(written.model, point)
            assert tuple(point[written.nodes]) == start


@settings(max_examples=50)
@given(problems(max_claims=3, max_pool=5, with_limits=True))
def test_what_obeys_is_what_brute_force_lists(problem: Problem) -> None:
    listed = set(within_limits(problem))
    span = range(problem.pool + 2)
    for counts in np.ndindex(*(len(span) for _ in problem.claims)):
        assert obeys(problem, counts) == (counts in listed)


def test_an_owner_gets_no_more_than_its_cap() -> None:
    both = (claim("a", owner="ann"), claim("b", owner="ann"), claim("c", owner="bob", most=3))
    problem = Problem(20, 10.0, both, Limits(owner_caps={"ann": 5, "nobody": 2}))
    decision = MilpAllocator().allocate(problem)
    assert decision.counts[0] + decision.counts[1] == 5
    assert decision.counts[2] == 3


def test_a_share_comes_before_any_gain() -> None:
    rich = claim("rich", current=8, owner="ann", value=LINE.scaled(1e9))
    poor = claim("poor", owner="bob", value=LINE.scaled(1e-6))
    decision = MilpAllocator().allocate(Problem(8, 10.0, (rich, poor), Limits(owner_shares={"bob": 3})))
    assert decision.counts == (5, 3)
    assert decision.status == "optimal"
    assert decision.objective == pytest.approx(10 * 5e9 - 8e9 + 10 * 3e-6)


def test_a_share_out_of_reach_is_met_as_far_as_it_can_be() -> None:
    rich = claim("rich", owner="ann", value=LINE.scaled(1e9))
    small = claim("small", owner="bob", most=2)
    giant = claim("giant", owner="bob", least=50, most=60)
    problem = Problem(8, 10.0, (rich, small, giant), Limits(owner_shares={"bob": 100, "nobody": 7}))
    decision = MilpAllocator().allocate(problem)
    assert decision.counts == (6, 2, 0)
    assert decision.status == "optimal"


def test_a_current_map_that_lacks_a_share_is_not_kept() -> None:
    claims = (claim("a", current=4, owner="ann", value=LINE.scaled(2)), claim("b", owner="bob"))
    problem = Problem(4, 1.0, claims, Limits(owner_shares={"bob": 1}))
    assert MilpAllocator().allocate(problem).counts == (3, 1)


def test_of_an_exclusive_group_one_trainer_runs() -> None:
    group = frozenset({"a", "b"})
    problem = Problem(20, 10.0, (claim("a"), claim("b", most=9), claim("c")), Limits(exclusive=[group]))
    assert MilpAllocator().allocate(problem).counts == (0, 9, 8)


def test_a_current_map_against_the_limits_is_left_even_without_time() -> None:
    claims = (claim("a", current=4, owner="ann"), claim("b", current=4, owner="ann"), claim("c", current=2))
    for limits in (Limits(owner_caps={"ann": 5}), Limits(exclusive=[frozenset({"a", "b"})])):
        problem = Problem(10, 10.0, claims, limits)
        decision = MilpAllocator(time_limit_s=1e-9).allocate(problem)
        assert obeys(problem, decision.counts)
        assert decision.counts[0] == 4
        assert decision.status == "time-limit"


def test_without_time_the_current_map_is_kept() -> None:
    problem = large_problem(1)
    decision = MilpAllocator(time_limit_s=1e-9).allocate(problem)
    assert decision.status == "kept"
    assert decision.counts == problem.current
    assert decision.objective == problem.objective(problem.current)


def test_without_time_a_map_that_cannot_be_kept_is_cut_down() -> None:
    problem = Problem(10, 10.0, (claim("a", current=8), claim("b", current=8, least=3), claim("c", current=8)))
    decision = MilpAllocator(time_limit_s=1e-9).allocate(problem)
    assert decision.status == "time-limit"
    assert decision.counts == (8, 0, 2)


@pytest.mark.parametrize("limit_s", [0.001, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_in_any_time_it_is_never_worse_than_the_status_quo(limit_s: float, seed: int) -> None:
    problem = large_problem(seed)
    decision = MilpAllocator(time_limit_s=limit_s).allocate(problem)
    assert problem.feasible(decision.counts)
    assert decision.status in ("optimal", "time-limit", "kept")
    assert decision.objective >= problem.objective(problem.current)
    assert (decision.status == "kept") <= (decision.counts == problem.current)


@pytest.mark.parametrize(
    ("problem", "counts"),
    [
        (Problem(0, 10.0, (claim("a", current=3), claim("b"))), (0, 0)),
        (Problem(10, 10.0, ()), ()),
        (Problem(3, 10.0, (claim("a", least=4, most=8), claim("b"))), (0, 3)),
        (Problem(9, 10.0, (claim("a", current=9, most=4),)), (4,)),
        (Problem(9, 10.0, (claim("a", current=9, most=4, down_s=1e6),)), (4,)),
        (Problem(9, 10.0, (claim("a", current=2, least=3, up_s=1e6),)), (8,)),  # stopped: a start costs nothing
        (Problem(6, 10.0, (claim("a", current=4, up_s=11.0),)), (4,)),  # 2·10 s of gain, 4·11 s of cost
        (Problem(6, 10.0, (claim("a", current=4, up_s=0.0),)), (6,)),
        (Problem(6, 1e-3, (claim("a", current=4), claim("b"))), (4, 2)),
        (Problem(8, 1e6, (claim("a", current=8), claim("b", value=LINE.scaled(2)))), (0, 8)),
        (Problem(8, 1.0, (claim("a", value=Curve.through([4, 5], [9.0, 1.0])),)), (4,)),
        (Problem(9, 1.0, (claim("a", value=Curve.through([50], [50.0]), most=70), claim("b"))), (1, 8)),
    ],
    ids=[
        "an empty pool",
        "no claims",
        "a minimum beyond the pool",
        "more than the maximum",
        "more than the maximum at any cost",
        "stopped below the minimum",
        "growth too dear",
        "growth for nothing",
        "a tiny horizon",
        "a huge horizon",
        "a curve that falls",
        "curve points beyond the pool",
    ],
)
def test_corner(problem: Problem, counts: tuple[int, ...]) -> None:
    decision = MilpAllocator().allocate(problem)
    assert decision.status == "optimal"
    assert same(problem, decision.objective, problem.objective(counts))
    assert same(problem, decision.objective, brute_force(problem)[0])


def test_a_pool_of_a_million_nodes_is_no_larger_a_model() -> None:
    problem = Problem(1_000_000, 120.0, tuple(claim(f"t{k}", most=10**6, value=LINE.scaled(k + 1)) for k in range(5)))
    decision = MilpAllocator().allocate(problem)
    assert decision.status == "optimal"
    assert same(problem, decision.objective, 120.0 * 100 * 15)


@pytest.mark.parametrize("backend", ["highs", "gurobi"])
def test_the_same_problem_gets_the_same_answer(backend: Literal["highs", "gurobi"]) -> None:
    if backend == "gurobi":
        pytest.importorskip("gurobipy")
    problem = large_problem(4, trainers=8, pool=60)
    first, second = (MilpAllocator(backend=backend).allocate(problem) for _ in range(2))
    assert first.counts == second.counts
    assert same(problem, first.objective, brute_force(problem)[0])


def test_settings_are_checked() -> None:
    assert MilpAllocator().name == "milp"
    with pytest.raises(InputError, match="time_limit_s"):
        MilpAllocator(time_limit_s=0)
    with pytest.raises(InputError, match="backend"):
        MilpAllocator(backend="cplex")  # type: ignore[arg-type]
