from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.allocate.registry import make_allocator
from bftrainer.core import Curve, Fragment, Trace, Trainer, Window
from bftrainer.core.objective import efficiency, throughput
from bftrainer.errors import InputError
from bftrainer.scheduler import Policy
from bftrainer.simulate.best import best_values
from bftrainer.simulate.metrics import measure, static_time
from bftrainer.simulate.replay import Replay, ReplaySettings, replay
from support.examples import examples

LINE = Curve.through([0, 8], [0.0, 80.0])
BENT = Curve.through([0, 1, 2, 4, 8], [0.0, 10.0, 18.0, 30.0, 44.0])


def trainer(name: str, work: float, *, submit: float = 0.0, up: float = 0.0, down: float = 0.0, least: int = 1,
            most: int = 8, curve: Curve = LINE) -> Trainer:  # fmt: skip
    return Trainer(name, curve, least, most, up, down, work, submit, model="m")


def machine(*fragments: tuple[str, float, float], end: float = 1000.0) -> Trace:
    rows = [Fragment(node, a, b, open=b == end) for node, a, b in fragments]
    return Trace.from_fragments(rows, [f"n{i}" for i in range(8)], Window(0.0, end))


def run(
    trace: Trace, *trainers: Trainer, accounting: str = "stall", decide_on: str = "all", **policy: object
) -> Replay:
    return replay(trace, trainers, ReplaySettings(Policy(**policy), accounting, decide_on))  # type: ignore[arg-type]


def test_a_trainer_on_steady_nodes_is_done_when_its_work_is() -> None:
    done = run(machine(("n0", 0, 1000), ("n1", 0, 1000)), trainer("a", 2000.0))
    assert (done.end, done.finished, done.outcome) == (100.0, True, 2000.0)
    assert done.trainers[0].run_hours == pytest.approx(100 / 3600)
    assert done.used_node_seconds == 200.0


def test_a_start_takes_its_time_when_stalls_are_real() -> None:
    trace = machine(("n0", 0, 1000))
    assert run(trace, trainer("a", 1000.0, up=18.0)).end == 118.0
    paper = run(trace, trainer("a", 1000.0, up=18.0), accounting="paper")
    assert paper.end == 100.0  # a start from nothing costs nothing in the authors' rule


def test_a_preemption_costs_the_rate_before_the_loss_in_the_authors_rule() -> None:
    trace = machine(("n0", 0, 1000), ("n1", 0, 50))
    done = run(trace, trainer("a", 1e6, down=12.0), accounting="paper", decide_on="pool")
    assert done.lost["preemption"] == 20.0 * 12
    assert done.outcome == 20.0 * 50 - 240 + 10.0 * 950


def test_a_preemption_stalls_what_is_left() -> None:
    trace = machine(("n0", 0, 1000), ("n1", 0, 50))
    done = run(trace, trainer("a", 5000.0, down=12.0))
    assert done.lost["preemption"] == pytest.approx(10.0 * 12)
    assert done.end == pytest.approx(50 + 12 + (5000 - 1000) / 10)


def test_growing_costs_the_old_rate_in_the_authors_rule_and_the_new_one_in_a_stall() -> None:
    trace = machine(("n0", 0, 1000), ("n1", 100, 1000))
    work = trainer("a", 1e6, up=10.0)
    assert run(trace, work, accounting="paper").lost["rescale"] == 10.0 * 10
    assert run(trace, work).lost["rescale"] == 20.0 * 10


def test_a_preemption_and_a_rescale_at_one_instant_are_one_stall_the_longer() -> None:
    # At 100 one node leaves and two join: down 30 s and up 10 s begin together.
    trace = machine(("n0", 0, 1000), ("n1", 0, 100), ("n2", 100, 1000), ("n3", 100, 1000))
    done = run(trace, trainer("a", 1e6, up=10.0, down=30.0))
    assert done.lost["preemption"] == pytest.approx(30.0 * 30)
    assert done.lost["rescale"] == 0.0


def test_completions_are_noticed_at_pool_events_or_at_once() -> None:
    trace = machine(("n0", 0, 1000), ("n1", 200, 1000))
    late = run(trace, trainer("a", 1000.0), trainer("b", 1000.0), decide_on="pool", max_parallel=1)
    soon = run(trace, trainer("a", 1000.0), trainer("b", 1000.0), decide_on="all", max_parallel=1)
    assert late.trainers[0].end == 200.0
    assert soon.trainers[0].end == 100.0
    # a is done at 100 and noticed at 200; b, on both nodes then, is done at 250 and noticed when the trace ends.
    assert late.lost["waiting"] == 10.0 * 100 + 20.0 * 750
    assert (late.finished, late.end) == (True, 1000.0)


def test_arrivals_are_considered_when_they_come() -> None:
    trace = machine(("n0", 0, 1000), ("n1", 0, 1000))
    done = run(trace, trainer("a", 1e5), trainer("b", 200.0, submit=50.0, most=1), decide_on="all")
    assert done.trainers[1].start == 50.0
    assert run(trace, trainer("a", 1e5), trainer("b", 200.0, submit=50.0), decide_on="pool").trainers[1].start is None


def test_a_workload_that_never_finishes_ends_with_the_trace() -> None:
    done = run(machine(("n0", 0, 1000)), trainer("a", 1e9))
    assert (done.end, done.finished) == (1000.0, False)
    assert done.trainers[0].end is None
    assert done.outcome == pytest.approx(10_000.0)


def test_a_machine_without_idle_nodes_makes_nothing() -> None:
    done = run(machine(), trainer("a", 1e9))
    assert (done.outcome, done.end) == (0.0, 1000.0)
    assert measure(done, [trainer("a", 1e9)], Policy()).efficiency == 0.0


@pytest.mark.parametrize(
    ("trainers", "message"),
    [
        ([], "no trainer"),
        ([trainer("late", 1.0, submit=5000.0)], "'late' is submitted at or after the end of the trace"),
        ([trainer("big", 1.0, least=9, most=9)], "'big' needs at least 9 nodes, but the machine has 8"),
    ],
)
def test_a_workload_that_does_not_fit_the_trace_is_refused(trainers: list[Trainer], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replay(machine(("n0", 0, 1000)), trainers)


def test_on_a_steady_pool_without_costs_the_efficiency_is_one() -> None:
    trace = machine(*((f"n{i}", 0.0, 1000.0) for i in range(5)))
    trainers = [trainer(f"t{i}", 1500.0, curve=BENT) for i in range(9)]
    metrics = measure(run(trace, *trainers), trainers, Policy())
    assert metrics.efficiency == pytest.approx(1.0)
    assert metrics.bound == pytest.approx(1.0)
    assert metrics.eq_nodes == pytest.approx(5.0)


def test_the_static_pool_interpolates_between_whole_numbers_of_nodes() -> None:
    one = [trainer("a", 1000.0, curve=BENT)]
    # 10 and 18 samples a second on one and two nodes: 14 on one and a half.
    assert static_time(one, Policy(), 1.5, 0.0, 700.0) == pytest.approx(50.0)


def test_the_static_pool_waits_for_arrivals() -> None:
    two = [trainer("a", 100.0), trainer("b", 100.0, submit=60.0)]
    assert static_time(two, Policy(), 1.0, 0.0, 150.0) == pytest.approx(65.0)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=4), st.integers(0, 20))
def test_the_best_value_is_what_trying_everything_finds(sizes: list[tuple[int, int]], pool: int) -> None:
    kinds = [(BENT, least, least + more) for least, more in sizes]
    best = {0: 0.0}
    for curve, least, most in kinds:
        options = [0, *range(least, most + 1)]
        longer: dict[int, float] = {}
        for used, value in best.items():
            for n in options:
                longer[used + n] = max(longer.get(used + n, -math.inf), value + curve.rate(n))
        best = longer
    table = best_values(kinds)
    assert table[min(pool, len(table) - 1)] == pytest.approx(max(v for used, v in best.items() if used <= pool))


def history(seed: int) -> tuple[Trace, list[Trainer]]:
    """A small random machine and workload."""
    rng = random.Random(seed)
    rows = []
    for node in range(8):
        at = 0.0
        while at < 2000:
            start = at + rng.choice([0, 10, 40, 300])
            end = start + rng.choice([15, 60, 200, 900])
            if end > 2000:
                break
            rows.append((f"n{node}", start, end))
            at = end + rng.choice([10, 100])
    trainers = [
        trainer(
            f"t{i}",
            rng.choice([300.0, 2000.0, 20000.0]),
            submit=float(rng.choice([0, 0, 100, 700])),
            up=rng.choice([0.0, 5.0, 18.0]),
            down=rng.choice([0.0, 12.0]),
            least=rng.choice([1, 1, 2, 3]),
            curve=rng.choice([LINE, BENT]),
        )
        for i in range(rng.randint(1, 8))
    ]
    return machine(*rows, end=2000.0), trainers


@settings(max_examples=examples(120))
@given(
    st.integers(0, 10**9), st.sampled_from(["paper", "stall"]), st.sampled_from(["pool", "all"]),
    st.sampled_from(["exact", "equal"]), st.sampled_from([throughput, efficiency]), st.sampled_from([1, 3, None]),
)  # fmt: skip
def test_what_must_hold_of_every_replay(seed, accounting, decide_on, allocator, objective, parallel) -> None:
    trace, trainers = history(seed)
    policy = Policy(make_allocator(allocator), objective, 60.0, parallel)
    result = replay(trace, trainers, ReplaySettings(policy, accounting, decide_on))
    metrics = measure(result, trainers, policy)
    offered = trace.clip(Window(0.0, result.end)).lengths.sum() if result.end > 0 else 0.0
    assert result.pool_node_seconds == pytest.approx(offered)
    assert result.used_node_seconds <= result.pool_node_seconds + 1e-6
    assert result.outcome == pytest.approx(sum(row.samples for row in result.trainers), abs=1e-6)
    for one, row in zip(sorted(trainers, key=lambda t: t.submit), result.trainers, strict=True):
        assert row.samples <= one.work * (1 + 1e-9)
        assert accounting == "paper" or row.samples >= 0
        assert row.start is None or row.start >= one.submit
        assert row.end is None or row.samples == pytest.approx(one.work)
    parts = metrics.breakdown
    total = parts.allocation + parts.preemption + parts.rescale + parts.waiting
    assert total == pytest.approx(metrics.bound - metrics.efficiency, abs=1e-12)
    assert parts.allocation >= -1e-9
    if accounting == "stall":
        assert metrics.efficiency <= metrics.bound + 1e-9
    # What was made and what was lost is all there was to make: the sizes it was decided to run at, for as long.
    there_was = float((result.timeline.value[:-1] * np.diff(result.timeline.time)).sum())
    stalled = sum(result.lost_value.values()) if accounting == "stall" else result.lost_value["waiting"]
    charged = 0.0 if accounting == "stall" else result.lost_value["preemption"] + result.lost_value["rescale"]
    assert result.value + charged + stalled == pytest.approx(there_was, abs=1e-5)


@settings(max_examples=15)
@given(st.integers(0, 10**9))
def test_the_same_history_gives_the_same_replay(seed: int) -> None:
    trace, trainers = history(seed)
    first, second = (replay(trace, trainers) for _ in range(2))
    assert first.trainers == second.trainers
    assert first.outcome == second.outcome
    assert np.array_equal(first.timeline.value, second.timeline.value)


def test_fast_trainers_finish_although_the_clock_is_coarse() -> None:
    # Seconds since 1970 resolve a quarter of a microsecond, in which these make a tenth of a sample.
    start = 1_767_315_600.0
    rows = [Fragment(f"n{i}", start, start + 5000.0, open=True) for i in range(5)]
    trace = Trace.from_fragments(rows, window=Window(start, start + 5000.0))
    fast = Curve.through([1, 2, 4, 8], [203_333.3, 391_111.1, 700_000.7, 1_234_567.8])
    trainers = [trainer(f"t{i}", 1e6 / 3, submit=start + i / 7, up=1.7, curve=fast) for i in range(40)]
    result = replay(trace, trainers)
    assert result.finished
    assert result.outcome == pytest.approx(40e6 / 3)
    assert measure(result, trainers, Policy()).efficiency > 0
