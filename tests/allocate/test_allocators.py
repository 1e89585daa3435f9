"""The conformance suite of allocators: what any of them must do, whatever its method."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings

from bftrainer.allocate import exact, kernel
from bftrainer.allocate.anytime import merit
from bftrainer.allocate.exact import ExactAllocator
from bftrainer.allocate.problem import Allocator, Claim, Limits, Problem
from bftrainer.allocate.registry import ALLOCATORS, make_allocator
from bftrainer.core.curve import Curve
from bftrainer.errors import InputError
from support.allocate.brute import brute_force, lacking, same, within_limits
from support.allocate.strategies import problems
from support.examples import examples

every_allocator = pytest.mark.parametrize("name", ALLOCATORS)
LINE = Curve.through([0, 10], [0.0, 100.0])


def claim(
    name: str = "t",
    current: int = 0,
    least: int = 1,
    most: int = 8,
    value: Curve = LINE,
    cost: float = 0.0,
    owner: str = "",
) -> Claim:
    return Claim(name, current, least, most, value, cost, cost, owner)


CORNERS: dict[str, Problem] = {
    "no pool": Problem(0, 120.0, (claim("a"), claim("b", current=3))),
    "no claims": Problem(10, 120.0, ()),
    "nothing at all": Problem(0, 120.0, ()),
    "minimum above the pool": Problem(5, 120.0, (claim("a", least=6, most=9), claim("b"))),
    "current above the maximum": Problem(20, 120.0, (claim("a", current=12, most=8, cost=5.0),)),
    "preempted below the minimum": Problem(20, 120.0, (claim("a", current=2, least=4, most=8, cost=500.0),)),
    "current map above the pool": Problem(6, 120.0, (claim("a", current=5), claim("b", current=5, cost=20.0))),
    "rescaling costs more than it brings": Problem(20, 10.0, (claim("a", current=3, cost=1000.0), claim("b"))),
    "worthless nodes": Problem(9, 120.0, (claim("a", value=Curve.through([0, 4], [0.0, 0.0])),)),
    "falling curve": Problem(9, 120.0, (claim("a", current=8, value=Curve.through([0, 2, 8], [0.0, 50.0, 10.0])),)),
    "a cliff": Problem(9, 120.0, (claim("a", value=Curve.through([0, 7, 8], [0.0, 1.0, 900.0])), claim("b"))),
    "curve beyond the pool": Problem(3, 120.0, (claim("a", most=500, value=Curve.through([0, 400], [0.0, 400.0])),)),
    "tiny horizon": Problem(9, 1e-3, (claim("a", current=2, cost=1.0), claim("b"))),
    "huge horizon": Problem(9, 1e6, (claim("a", current=2, cost=1.0), claim("b"))),
}


@every_allocator
@pytest.mark.parametrize("corner", CORNERS)
def test_a_corner_case_gives_allowed_counts_and_their_true_objective(name: str, corner: str) -> None:
    problem = CORNERS[corner]
    decision = make_allocator(name).allocate(problem)
    assert problem.feasible(decision.counts)
    assert decision.objective == problem.objective(decision.counts)
    assert decision.solve_ms >= 0
    assert decision.status == ("heuristic" if name == "equal" else "optimal")
    if name != "equal":
        assert same(problem, decision.objective, brute_force(problem)[0])


@every_allocator
@settings(max_examples=60)
@given(problem=problems(4, 12))
def test_counts_keep_to_the_pool_and_to_every_claim(name: str, problem: Problem) -> None:
    decision = make_allocator(name).allocate(problem)
    assert len(decision.counts) == len(problem.claims)
    assert all(type(n) is int for n in decision.counts)
    assert problem.feasible(decision.counts)
    assert decision.objective == problem.objective(decision.counts)


@every_allocator
@settings(max_examples=25)
@given(problem=problems(4, 12))
def test_the_same_problem_has_the_same_answer(name: str, problem: Problem) -> None:
    first, second = (make_allocator(name).allocate(problem).counts for _ in range(2))
    assert first == second


@every_allocator
@settings(max_examples=40)
@given(problem=problems(4, 12))
def test_an_optimal_answer_is_never_worse_than_keeping_the_current_map(name: str, problem: Problem) -> None:
    decision = make_allocator(name).allocate(problem)
    if decision.status == "optimal" and problem.feasible(problem.current):
        kept = problem.objective(problem.current)
        assert decision.objective >= kept or same(problem, decision.objective, kept)


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("exact", Limits(exclusive=[frozenset({"a"})])),
        ("milp-nodes", Limits(owner_caps={"": 2})),
        ("equal", Limits(owner_caps={"": 2})),
    ],
)
def test_limits_are_refused_where_they_cannot_be_held(name: str, limits: Limits) -> None:
    problem = Problem(5, 120.0, (claim("a"),), limits)
    with pytest.raises(InputError, match="use the milp allocator"):
        make_allocator(name).allocate(problem)


@settings(max_examples=examples(300))
@given(problem=problems(max_claims=4, max_pool=8, with_limits=True))
def test_exact_keeps_to_the_limits_of_owners_and_finds_the_best_within_them(problem: Problem) -> None:
    problem = replace(problem, limits=replace(problem.limits, exclusive=()))
    best, counts = brute_force(problem)
    decision = ExactAllocator(compiled=False).allocate(problem)
    assert decision.counts in set(within_limits(problem))
    assert lacking(problem, decision.counts) == lacking(problem, counts)
    assert same(problem, decision.objective, best)


@settings(max_examples=40)
@given(problem=problems(max_claims=12, max_pool=40, with_limits=True))
def test_exact_and_milp_agree_on_limits_of_owners(problem: Problem) -> None:
    problem = replace(problem, limits=replace(problem.limits, exclusive=()))
    ours, theirs = (make_allocator(name).allocate(problem) for name in ("exact", "milp"))
    assert merit(problem, ours.counts)[0] == merit(problem, theirs.counts)[0]
    assert same(problem, ours.objective, theirs.objective)


@pytest.mark.parametrize("name", ["exact", "milp"])
def test_a_large_minimum_takes_nothing_of_anothers_share(name: str) -> None:
    def counts(least: int, pool: int, **shares: int) -> tuple[int, ...]:
        claims = (claim("a", owner="ann", least=least, most=10), claim("b", owner="bob", most=10))
        return make_allocator(name).allocate(Problem(pool, 120.0, claims, Limits(owner_shares=shares))).counts

    for least in (6, 8, 10):
        assert counts(least, 10, ann=5, bob=5) == (0, 10)
    assert counts(4, 8, ann=3, bob=5) == (0, 8)
    assert counts(4, 8, ann=3, bob=4) == (4, 4)  # a share is filled by whole trainers where nobody suffers
    assert counts(1, 10, ann=5, bob=5) == (5, 5)


def test_exact_shares_a_large_pool_out() -> None:
    claims = tuple(
        claim(f"t{i}", owner=("ann", "bob", "cat", "dan")[i % 4], least=1 + i % 4, most=64) for i in range(100)
    )
    limits = Limits(owner_shares={"ann": 300, "bob": 300}, owner_caps={"ann": 500, "cat": 250})
    decision = ExactAllocator(compiled=False).allocate(Problem(1000, 120.0, claims, limits))
    held = {owner: sum(decision.counts[i] for i in range(n, 100, 4)) for n, owner in enumerate(("ann", "bob", "cat"))}
    assert (decision.status, sum(decision.counts)) == ("optimal", 1000)
    assert held["ann"] >= 300
    assert held["bob"] >= 300
    assert held["cat"] <= 250


@settings(max_examples=examples(520))
@given(problem=problems(5, 16))
def test_exact_finds_what_trying_everything_finds(problem: Problem) -> None:
    assert same(problem, ExactAllocator().allocate(problem).objective, brute_force(problem)[0])


@settings(max_examples=examples(520))
@given(problem=problems(5, 16))
def test_exact_finds_the_same_in_its_way_for_large_problems(problem: Problem) -> None:
    usual = ExactAllocator().allocate(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "SMALL", -1)
        by_runs = ExactAllocator().allocate(problem)
    assert same(problem, by_runs.objective, usual.objective)
    assert problem.feasible(by_runs.counts)


@settings(max_examples=examples(520))
@given(problem=problems(5, 16))
def test_compiled_code_decides_as_numpy_does(problem: Problem) -> None:
    pytest.importorskip("numba")
    assert ExactAllocator(compiled=True).allocate(problem).counts == ExactAllocator().allocate(problem).counts


@settings(max_examples=60)
@given(problem=problems(5, 16))
def test_the_loops_that_are_compiled_are_right_as_python_too(problem: Problem) -> None:
    interpreted = ExactAllocator()
    interpreted._kernel = kernel.plan
    assert interpreted.allocate(problem).counts == ExactAllocator().allocate(problem).counts


def test_compiled_code_is_loaded_only_by_those_who_decide_often(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []

    def load() -> kernel.Kernel:
        loads.append(True)
        return kernel.plan

    monkeypatch.setattr(exact, "load_kernel", load)
    allocator, problem = ExactAllocator(), Problem(4, 120.0, (claim("a"),))
    for _ in range(exact.MANY - 1):
        allocator.allocate(problem)
    assert not loads
    for _ in range(3):
        allocator.allocate(problem)
    assert loads == [True]


def test_without_numba_nobody_gets_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "load_kernel", lambda: None)
    with pytest.raises(InputError, match=r"need numba: pip install 'bftrainer\[fast\]'"):
        ExactAllocator(compiled=True)


@settings(max_examples=examples(500))
@given(problem=problems(4, 10))
def test_exact_and_the_node_level_model_of_the_paper_agree(problem: Problem) -> None:
    nodes = make_allocator("milp-nodes").allocate(problem)
    assert nodes.status == "optimal"
    assert same(problem, ExactAllocator().allocate(problem).objective, nodes.objective)


@settings(max_examples=examples(200))
@given(problem=problems(12, 60))
def test_exact_and_the_count_model_agree_on_larger_problems(problem: Problem) -> None:
    counts = make_allocator("milp").allocate(problem)
    assert counts.status == "optimal"
    assert same(problem, ExactAllocator().allocate(problem).objective, counts.objective)


def problem_with_starts(seed: int) -> Problem:
    """Trainers of all sizes whose nodes take time to start, some of them longer than the horizon."""
    dice = random.Random(seed)
    pool = dice.randint(4, 14)
    drawn = []
    for k in range(dice.randint(2, 4)):
        nodes = sorted(dice.sample(range(1, pool + 3), dice.randint(1, 4)))
        rates = [n * dice.uniform(0.2, 1.5) for n in nodes]
        least = dice.choice([1, 1, 2, 3])
        times = [dice.choice([0.0, 0.5, 5.0, 18.0]), dice.choice([0.3, 3.0, 12.0])]
        start_s = dice.choice([1.0, 15.0, 60.0, 119.0, 500.0])
        current = dice.randint(0, pool // 2)
        value = Curve.through(nodes, rates)
        drawn.append(Claim(f"t{k}", current, least, least + dice.randint(0, pool), value, *times, start_s=start_s))
    return Problem(pool, dice.choice([30.0, 120.0]), tuple(drawn))


def test_exact_is_best_where_nodes_take_time_to_start() -> None:
    for seed in range(300):
        problem = problem_with_starts(seed)
        assert same(problem, ExactAllocator().allocate(problem).objective, brute_force(problem)[0]), seed


@pytest.mark.parametrize(("name", "count"), [("milp", 100), ("milp-nodes", 40)])
def test_the_models_agree_with_exact_where_nodes_take_time_to_start(name: str, count: int) -> None:
    for seed in range(count):
        problem = problem_with_starts(seed)
        found = make_allocator(name).allocate(problem).objective
        assert same(problem, found, ExactAllocator().allocate(problem).objective), seed


def test_growth_is_worth_nothing_where_nodes_start_later_than_the_horizon_ends() -> None:
    grows, too_late = (Claim("a", 4, 1, 8, LINE, 0.0, 0.0, start_s=start_s) for start_s in (119.0, 120.0))
    assert ExactAllocator().allocate(Problem(8, 120.0, (grows,))).counts == (8,)
    assert ExactAllocator().allocate(Problem(8, 120.0, (too_late,))).counts == (4,)


def test_the_trainer_whose_nodes_start_sooner_gets_them() -> None:
    slow, quick = (Claim(name, 0, 1, 8, LINE, 0.0, 0.0, start_s=s) for name, s in (("slow", 30.0), ("quick", 5.0)))
    assert ExactAllocator().allocate(Problem(8, 120.0, (slow, quick))).counts == (0, 8)


@pytest.mark.parametrize("small", [1_000_000, -1])
def test_on_a_tie_a_trainer_stays_as_it_is(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "SMALL", small)
    # Twins on a straight line and no cost: any split of the pool is worth the same.
    twins = (claim("a", current=3), claim("b", current=5), claim("c", current=2))
    assert ExactAllocator().allocate(Problem(10, 120.0, twins)).counts == (3, 5, 2)


@pytest.mark.parametrize("small", [1_000_000, -1])
def test_on_a_tie_the_earlier_submission_gets_more(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "SMALL", small)
    twins = (claim("a"), claim("b"), claim("c"))
    assert ExactAllocator().allocate(Problem(10, 120.0, twins)).counts == (8, 2, 0)


def test_rescaling_happens_only_when_it_pays_within_the_horizon() -> None:
    # Growing from 4 to 8 brings 40 more a second and costs 40 × 18 once: it pays after 18 s.
    def grown(horizon_s: float) -> int:
        return ExactAllocator().allocate(Problem(8, horizon_s, (claim("a", current=4, cost=18.0),))).counts[0]

    assert (grown(17.0), grown(19.0)) == (4, 8)


@settings(max_examples=examples(150))
@given(problem=problems(6, 25))
def test_equal_serves_in_order_and_differs_by_one_node_where_nothing_else_binds(problem: Problem) -> None:
    counts = make_allocator("equal").allocate(problem).counts
    left = problem.pool
    for c, n in zip(problem.claims, counts, strict=True):
        assert (n > 0) == (c.min_nodes <= left)
        left -= c.min_nodes if n else 0
    between = [n for c, n in zip(problem.claims, counts, strict=True) if c.min_nodes < n < c.max_nodes]
    if between:
        assert max(between) - min(between) <= 1
        assert between == sorted(between, reverse=True)
        assert sum(counts) == problem.pool


def test_equal_shares_are_equal_and_leftovers_go_to_the_first() -> None:
    assert make_allocator("equal").allocate(Problem(11, 120.0, (claim("a"), claim("b"), claim("c")))).counts == (
        4,
        4,
        3,
    )
    capped = (claim("a", most=2), claim("b"), claim("c"))
    assert make_allocator("equal").allocate(Problem(11, 120.0, capped)).counts == (2, 5, 4)


def test_an_unknown_allocator_is_refused() -> None:
    with pytest.raises(InputError, match="allocator must be one of exact, milp, milp-nodes, equal"):
        make_allocator("guess")


def test_every_allocator_has_the_name_it_is_asked_by() -> None:
    made: list[Allocator] = [make_allocator(name) for name in ALLOCATORS]
    assert [allocator.name for allocator in made] == list(ALLOCATORS)
    assert all(math.isfinite(a.allocate(CORNERS["a cliff"]).objective) for a in made)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: claim(current=-1), "trainer 't': current must be from 0"),
        (lambda: claim(least=0), "trainer 't': min_nodes must be 1 or more"),
        (lambda: claim(least=5, most=4), r"trainer 't': max_nodes must be at least min_nodes \(5\), but got 4"),
        (lambda: claim(cost=math.nan), "trainer 't': up_s must be a number of seconds"),
        (lambda: Problem(-1, 120.0, ()), "pool must be from 0 to 1000000 nodes"),
        (lambda: Problem(10**9, 120.0, ()), "pool must be from 0 to 1000000 nodes"),
        (lambda: Problem(5, -1.0, ()), "horizon_s must be a number of seconds above 0"),
        (lambda: Problem(5, 120.0, (claim(), claim())), "trainer 't' is named twice"),
        (lambda: Problem(5, 120.0, (claim(),), Limits(exclusive=[frozenset({"x"})])), "names trainer 'x'"),
    ],
)
def test_a_problem_that_makes_no_sense_names_the_trainer_and_the_field(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make()
