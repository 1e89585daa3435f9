"""Replays in which curves and costs are hidden from the scheduler."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from bftrainer.cli.main import run as command
from bftrainer.core.curve import Curve
from bftrainer.core.models import PAPER_CURVES
from bftrainer.core.pool import Fragment
from bftrainer.core.trace import Trace, Window
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError
from bftrainer.scheduler import Policy
from bftrainer.simulate.knowledge import LearnedTruth, Noise
from bftrainer.simulate.replay import Replay, ReplaySettings, replay
from bftrainer.simulate.study import Study, simulate
from bftrainer.traces.synthetic.synth import synthesise
from support.benchmarks import load_benchmark

LINE = Curve.through([0, 8], [0.0, 80.0])


@cache
def machine() -> Trace:
    return synthesise("summit", nodes=200, hours=3.0, seed=5)


def trials(count: int = 12, start_s: float = 15.0) -> list[Trainer]:
    curve, first = PAPER_CURVES["ShuffleNet"], machine().window.start
    return [Trainer(f"t{i}", curve, 1, 16, 0.5, 0.3, 4e6, first, model="m", start_s=start_s) for i in range(count)]


def learned(noise: Noise, **changed: object) -> Replay:
    trainers = [replace(trainer, **changed) for trainer in trials()]  # type: ignore[arg-type]
    settings = ReplaySettings(Policy(max_parallel=4))
    return replay(machine(), trainers, settings, knowledge=LearnedTruth(noise))


def test_a_learned_replay_is_the_same_with_the_same_seed_only() -> None:
    one, again, other = (learned(Noise(0.1, seed)).end for seed in (1, 1, 2))
    assert one == again != other


def test_learning_comes_near_to_knowing_and_above_equal_shares() -> None:
    known, found = (simulate(machine(), trials(), Study(max_parallel=4, curves=c)).replay for c in ("known", "learned"))  # type: ignore[arg-type]
    equal = simulate(machine(), trials(), Study("equal", max_parallel=4)).replay
    assert found.value / found.best_value > known.value / known.best_value - 0.02
    assert found.value / found.best_value > equal.value / equal.best_value


def test_a_learned_replay_makes_no_more_than_the_true_curves_allow() -> None:
    found = learned(Noise(0.3, 3))
    assert found.value <= found.best_value
    assert max(row.samples for row in found.trainers) <= 4e6 * (1 + 1e-9)


def test_the_scheduler_is_told_what_was_learned_and_never_the_truth() -> None:
    told: list[Trainer] = []
    trace = Trace.from_fragments([Fragment(f"n{i}", 0.0, 500.0, open=True) for i in range(8)], None, Window(0.0, 500.0))
    truth = Trainer("a", LINE, 1, 8, 7.0, 5.0, 1e9, model="m", start_s=20.0)
    knowledge = LearnedTruth(Noise(0.0))
    replay(trace, [truth], None, lambda now, plan, state: told.extend(plan.considered), knowledge=knowledge)
    first, last = told[0], told[-1]
    assert (first.curve.rate(8), first.start_s) == (pytest.approx(2 * 8**0.5), 0.0)
    assert last.curve.rate(8) == pytest.approx(80.0, rel=1e-3)
    assert last.curve.rate(4) != truth.curve.rate(4)
    assert (last.start_s, last.up_s) == (20.0, 1.0)  # it never grew, so that pause is assumed


def test_curves_cannot_be_learned_where_only_changes_of_the_pool_count() -> None:
    with pytest.raises(InputError, match="decide on all"):
        simulate(machine(), trials(), Study(decide_on="pool", curves="learned"))


def test_the_command_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, workload = tmp_path / "t.csv", tmp_path / "w.csv"
    assert command(["trace", "synth", "--profile", "summit", "--nodes", "200", "--hours", "2", "-o", str(trace)]) == 0
    rows = [f"t{i},ShuffleNet,+0,1,16,0.5,0.3,4e6" for i in range(8)]
    workload.write_text("name,model,submit,min_nodes,max_nodes,scale_up_s,scale_down_s,samples\n" + "\n".join(rows))
    capsys.readouterr()
    common = ["simulate", "--trace", str(trace), "--workload", str(workload), "--start-s", "15", "--json"]
    outcomes = []
    for more in (["--curves-known"], ["--curves-learned", "--rate-noise", "0.1", "--seed", "3", "--snapshot-s", "10"]):
        assert command([*common, *more]) == 0
        outcomes.append(json.loads(capsys.readouterr().out)["efficiency"])
    assert 0 < outcomes[1] < outcomes[0] * 1.02
    assert command([*common, "--curves-learned", "--rigid", "2"]) != 0
    assert "leave out --curves-learned" in capsys.readouterr().err


def test_the_benchmark_has_a_row_for_each_case_and_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = load_benchmark("learning", monkeypatch)
    monkeypatch.setattr(benchmark, "COSTS", ((0.5, 0.3),))
    monkeypatch.setattr(benchmark, "STARTS", (15.0,))
    workloads = {"hpo": trials(6), "diverse": trials(6)}
    rows = list(benchmark.rows_of(machine(), workloads, seed=1))
    assert len(rows) == 2 * 2 * len(benchmark.RULES)
    assert all(0 < row.efficiency < 1.05 and 0 < row.q <= 1 for row in rows)
    assert len(benchmark.goals(rows)) == 7
