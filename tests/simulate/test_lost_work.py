"""Work since the last snapshot is lost when all nodes of a trainer go; what the efficiency U compares with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.cli.main import run as command
from bftrainer.core.curve import Curve
from bftrainer.core.objective import find_objective
from bftrainer.core.pool import Fragment
from bftrainer.core.trace import Trace, Window
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError
from bftrainer.scheduler import Policy
from bftrainer.simulate.metrics import measure, static_time
from bftrainer.simulate.replay import Replay, ReplaySettings, replay
from bftrainer.simulate.study import Study, rigid_baseline
from support.examples import examples

LINE = Curve.through([0, 8], [0.0, 80.0])


def machine(*fragments: tuple[str, float, float], end: float = 1000.0) -> Trace:
    rows = [Fragment(node, a, b, open=b == end) for node, a, b in fragments]
    return Trace.from_fragments(rows, [f"n{i}" for i in range(8)], Window(0.0, end))


def run(trace: Trace, *trainers: Trainer, every_s: float, accounting: str = "stall") -> Replay:
    return replay(trace, trainers, ReplaySettings(Policy(), accounting, "all", every_s))  # type: ignore[arg-type]


def trainer(name: str = "a", work: float = 1e6, *, least: int = 1, up: float = 0.0, down: float = 0.0) -> Trainer:
    return Trainer(name, LINE, least, 8, up, down, work, model="m")


@pytest.mark.parametrize("accounting", ["stall", "paper"])
def test_work_since_the_last_snapshot_is_lost_when_all_nodes_go(accounting: str) -> None:
    trace = machine(("n0", 0, 100), ("n1", 0, 100), ("n0", 200, 1000))
    none, some = (run(trace, trainer(), every_s=s, accounting=accounting) for s in (0.0, 30.0))
    assert none.outcome == 20.0 * 100 + 10.0 * 800
    assert some.outcome == none.outcome - 20.0 * 10  # three snapshots in 100 s
    assert some.lost["preemption"] == none.lost["preemption"] + 200.0
    assert some.trainers[0].samples == some.outcome


def test_no_work_is_lost_while_a_node_has_the_state() -> None:
    trace = machine(("n0", 0, 1000), ("n1", 0, 100))
    assert run(trace, trainer(), every_s=30.0).lost["preemption"] == 0
    # Below its minimum a trainer stops, but the node that is left saves the state.
    assert run(trace, trainer(least=2), every_s=30.0).outcome == 20.0 * 100


def test_only_time_in_which_a_trainer_produces_counts_towards_the_next_snapshot() -> None:
    trace = machine(("n0", 0, 100))
    assert run(trace, trainer(up=18.0), every_s=30.0).outcome == 10.0 * 60  # 82 s of production


def test_a_change_of_size_does_not_put_off_the_next_snapshot() -> None:
    trace = machine(("n0", 0, 35), ("n1", 20, 35))
    assert run(trace, trainer(), every_s=30.0).lost["preemption"] == pytest.approx(20.0 * 5)
    assert run(trace, trainer(), every_s=40.0).lost["preemption"] == pytest.approx(10.0 * 20 + 20.0 * 15)


def test_a_trainer_that_is_stopped_by_a_decision_loses_nothing() -> None:
    fast = Trainer("fast", LINE.scaled(9), 1, 8, work=9 * 80 * 50.0, submit=95.0, model="m")
    trace = machine(*((f"n{i}", 0, 1000) for i in range(8)))
    both = run(trace, trainer(work=80 * 500.0), fast, every_s=30.0)
    assert both.finished
    assert (both.end, both.lost["preemption"]) == (550.0, 0)


def test_a_trainer_that_is_done_has_nothing_to_lose() -> None:
    at_once = machine(("n0", 0, 100), ("n0", 200, 1000))
    assert run(at_once, trainer(work=1000.0), every_s=30.0).end == 100.0
    settings = ReplaySettings(Policy(), "stall", "pool", 30.0)
    unnoticed = replay(machine(("n0", 0, 110), ("n0", 200, 1000)), [trainer(work=1000.0)], settings)
    assert (unnoticed.end, unnoticed.lost["preemption"]) == (110.0, 0)


def test_the_rigid_baseline_loses_as_much() -> None:
    trace = machine(("n0", 0, 100), ("n0", 200, 1000))
    for every_s, lost in ((0.0, 0.0), (30.0, 100.0), (70.0, 300.0)):
        study = Study(snapshot_every_s=every_s)
        rigid = rigid_baseline(trace, [trainer()], study, 1, None, ())
        assert rigid.lost_samples == lost
        assert rigid.outcome_samples == run(trace, trainer(), every_s=every_s).outcome
    assert rigid_baseline(trace, [trainer()], Study(), 1, 40.0, ()).lost_samples == 200.0


def test_a_negative_time_between_snapshots_is_refused() -> None:
    for wrong in (-1.0, float("nan")):
        with pytest.raises(InputError, match="time between snapshots must be 0 seconds or more"):
            Study(snapshot_every_s=wrong).settings()


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 900), st.integers(1, 99)), min_size=1, max_size=12),
    st.floats(1, 500),
    st.sampled_from(["stall", "paper"]),
)
def test_books_balance_with_lost_work(rows: list[tuple[int, int, int]], every_s: float, accounting: str) -> None:
    until: dict[int, int] = {}
    fragments = []
    for node, start, length in sorted(rows, key=lambda row: row[1]):
        if start > until.get(node, -1):
            fragments.append((f"n{node}", float(start), float(start + length)))
            until[node] = start + length
    trace, trainers = machine(*fragments), [trainer("a", 2000.0, up=3.0, down=2.0), trainer("b", least=2)]
    result = run(trace, *trainers, every_s=every_s, accounting=accounting)
    assert result.outcome == pytest.approx(sum(row.samples for row in result.trainers))
    metrics = measure(result, trainers, Policy())
    parts = metrics.breakdown
    total = parts.allocation + parts.preemption + parts.rescale + parts.waiting
    assert total == pytest.approx(metrics.bound - metrics.efficiency, abs=1e-9)
    assert result.outcome <= run(trace, *trainers, every_s=0.0, accounting=accounting).outcome + 1e-6 or result.finished


def test_the_command_charges_lost_work_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    size = ["--nodes", "48", "--hours", "12", "--seed", "1"]
    assert command(["trace", "synth", "--profile", "summit", *size, "-o", "t.parquet"]) == 0
    Path("w.yaml").write_text(
        "curves: {m: {nodes: [1, 4], samples_per_s: [100, 350]}}\n"
        "trainers: [{hpo: 40, model: m, samples: 1e7, min_nodes: 1, max_nodes: 4, scale_up_s: 5, scale_down_s: 5}]\n"
    )

    def lost(*options: str) -> float:
        capsys.readouterr()
        assert command(["simulate", "--trace", "t.parquet", "--workload", "w.yaml", "--json", *options]) == 0
        return float(json.loads(capsys.readouterr().out)["preemption_cost_samples"])

    none, usual, seldom = (lost("--snapshot-every", every) for every in ("0", "30", "600"))
    assert none < usual < seldom
    assert lost() == usual
    assert command(["simulate", "--trace", "t.parquet", "--workload", "w.yaml", "--snapshot-every", "-1"]) != 0
    assert "time between snapshots must be 0 seconds or more" in capsys.readouterr().err


# What U compares with.


@pytest.mark.parametrize("objective", ["throughput", "efficiency", "weighted", "weighted-efficiency"])
def test_trainers_with_one_curve_give_the_same_efficiency_as_trainers_with_equal_curves(objective: str) -> None:
    def curve() -> Curve:
        return Curve.through([1, 2, 4, 8], [100.0, 150.0, 200.0, 220.0])

    def workload(curves: list[Curve]) -> list[Trainer]:
        return [
            Trainer(f"t{i}", one, 1, 8, 2.0, 1.0, 5e4 if i % 2 else 1e4, weight=100.0 if i % 3 == 0 else 1.0, model="m")
            for i, one in enumerate(curves)
        ]

    shared, equal = workload([curve()] * 24), workload([curve() for _ in range(24)])
    trace = machine(*((f"n{i}", 10.0 * i, 3000.0) for i in range(8)), end=3000.0)
    policy = Policy(objective=find_objective(objective), max_parallel=3)
    one, other = (measure(replay(trace, each, ReplaySettings(policy)), each, policy) for each in (shared, equal))
    assert (one.efficiency, one.bound, one.breakdown) == (other.efficiency, other.bound, other.breakdown)


def test_the_static_pool_is_not_stopped_by_trainers_that_cannot_run_on_it() -> None:
    trainers = [*(trainer(f"big{i}", 100.0, least=8) for i in range(10)), trainer("small", 1000.0)]
    assert static_time(trainers, Policy(), 4.0, 0.0, 1000.0) == pytest.approx(25.0)
