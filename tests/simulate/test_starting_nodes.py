"""Nodes that are given to a trainer compute nothing until they have started; the others go on meanwhile."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.cli.main import run as command
from bftrainer.core.curve import Curve
from bftrainer.core.pool import Fragment
from bftrainer.core.trace import Trace, Window
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError
from bftrainer.scheduler import Policy, Scheduler, State
from bftrainer.simulate.accounting import Books, SimulatedTrainer
from bftrainer.simulate.replay import Replay, ReplaySettings, replay
from bftrainer.traces.synthetic.synth import synthesise
from support.examples import examples

LINE = Curve.through([0, 8], [0.0, 80.0])


def machine(*fragments: tuple[str, float, float], end: float = 1000.0) -> Trace:
    rows = [Fragment(node, a, b, open=b == end) for node, a, b in fragments]
    return Trace.from_fragments(rows, [f"n{i}" for i in range(8)], Window(0.0, end))


def trainer(work: float = 1e9, *, least: int = 1, up: float = 0.0, down: float = 0.0, start: float = 15.0) -> Trainer:
    return Trainer("a", LINE, least, 8, up, down, work, model="m", start_s=start)


def run(trace: Trace, *trainers: Trainer, accounting: str = "stall", every_s: float = 0.0) -> Replay:
    return replay(trace, trainers, ReplaySettings(Policy(), accounting, "all", every_s))  # type: ignore[arg-type]


@pytest.mark.parametrize("accounting", ["stall", "paper"])
def test_the_others_go_on_while_a_node_starts(accounting: str) -> None:
    trace = machine(("n0", 0, 1000), ("n1", 500, 1000))
    found = run(trace, trainer(), accounting=accounting)
    assert found.outcome == 10.0 * (500 - 15) + 10.0 * 15 + 20.0 * (500 - 15)
    assert found.lost["waiting"] == pytest.approx(10.0 * 15 + 10.0 * 15)
    assert found.used_node_seconds == 1500  # a node that starts is held


def test_the_pause_comes_when_the_node_is_ready() -> None:
    trace = machine(("n0", 0, 1000), ("n1", 500, 1000))
    found = run(trace, trainer(up=4.0))
    assert found.outcome == 10.0 * (500 - 19) + 10.0 * 15 + 20.0 * (500 - 19)
    assert found.lost["rescale"] == 20.0 * 4
    assert found.lost["waiting"] == pytest.approx(10.0 * 19 + 10.0 * 15)


def test_a_node_that_goes_while_it_starts_costs_no_pause_and_no_work() -> None:
    trace = machine(("n0", 0, 1000), ("n1", 500, 510))
    found = run(trace, trainer(up=4.0, down=7.0), every_s=30.0)
    assert found.outcome == 10.0 * (1000 - 19)
    assert found.lost["preemption"] == 0
    assert found.lost["rescale"] == 0


def test_work_is_lost_with_the_last_node_that_computed_although_another_one_starts() -> None:
    trace = machine(("n0", 0, 505), ("n1", 500, 1000))
    kept, lost = (run(trace, trainer(), every_s=s) for s in (0.0, 1000.0))
    assert kept.outcome == 10.0 * (505 - 15) + 10.0 * (1000 - 515)
    assert lost.outcome == 10.0 * (1000 - 515)
    assert lost.lost["preemption"] == 10.0 * (505 - 15)


def test_a_trainer_below_its_minimum_computes_nothing_while_the_missing_nodes_start() -> None:
    trace = machine(("n0", 0, 1000), ("n1", 0, 500), ("n2", 500, 1000))
    found = run(trace, trainer(least=2))
    # It stops at 500 with one node, and begins again at once on two, of which both have to start.
    assert found.outcome == 20.0 * (500 - 15) + 20.0 * (500 - 15)


def test_a_trainer_ends_when_its_work_is_done_also_while_nodes_start() -> None:
    trace = machine(("n0", 0, 1000), ("n1", 100, 1000))
    early, late = (run(trace, trainer(work), accounting="stall").trainers[0].end for work in (900.0, 2000.0))
    assert early == pytest.approx(15 + 90)
    assert late == pytest.approx(115 + (2000 - 10.0 * 100) / 20.0)


def test_the_time_of_the_end_is_foretold() -> None:
    job = SimulatedTrainer(trainer(2000.0, up=4.0), LINE, 0.0)
    books = Books("stall")
    books.rescaled(job, 0.0, ["n0"])
    books.progress(job, 0.0, 100.0)
    books.rescaled(job, 100.0, ["n0", "n1"])
    end = job.finish_time(100.0)
    books.progress(job, 100.0, end)
    assert job.is_done()
    assert books.outcome == pytest.approx(2000.0)
    assert end == pytest.approx(119 + (2000 - 10.0 * (100 - 19) - 10.0 * 15) / 20.0)


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 1000),
    start_s=st.sampled_from([1.0, 15.0, 90.0, 1000.0]),
    up_s=st.sampled_from([0.0, 5.0]),
    work=st.sampled_from([2e4, math.inf]),
    every_s=st.sampled_from([0.0, 30.0]),
)
def test_what_is_made_and_what_is_lost_add_up(
    seed: int, start_s: float, up_s: float, work: float, every_s: float
) -> None:
    trace = synthesise("summit", nodes=24, hours=4, seed=seed)
    begin = trace.window.start
    some = [
        Trainer(f"t{i}", LINE, 1 + i % 3, 8, up_s, 3.0, work, begin + 60.0 * i, model="m", start_s=start_s)
        for i in range(6)
    ]
    found = run(trace, *some, every_s=every_s)
    line = found.timeline
    if_nothing_were_lost = float((line.value[:-1] * (line.time[1:] - line.time[:-1])).sum())
    # Work that is lost with all nodes was made before, and is subtracted from the outcome: it is in both sums.
    assert found.value + sum(found.lost_value.values()) == pytest.approx(if_nothing_were_lost, rel=1e-9, abs=1e-6)
    assert all(lost >= -1e-6 for lost in found.lost_value.values())
    assert found.outcome >= -1e-6


def test_a_decision_looks_ahead_for_twice_the_longest_start() -> None:
    scheduler = Scheduler(Policy(horizon_s=20.0))
    state = State().submitted(trainer(start=0.0))
    assert scheduler.decide(state).horizon_s == 20.0
    assert scheduler.decide(State().submitted(trainer(start=8.0))).horizon_s == 20.0
    assert scheduler.decide(State().submitted(trainer(start=30.0))).horizon_s == 60.0


def test_simulate_takes_the_start_from_the_workload_or_from_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        command(
            [
                "trace",
                "synth",
                "--profile",
                "summit",
                "--nodes",
                "16",
                "--hours",
                "12",
                "--seed",
                "1",
                "-o",
                "t.parquet",
            ]
        )
        == 0
    )
    one = "{name: x, model: resnet18, min_nodes: 1, max_nodes: 8, scale_up_s: 1, scale_down_s: 1, samples: 1e12%s}"
    Path("w.yaml").write_text(f"trainers: [{one % ''}]\n")
    Path("own.yaml").write_text(f"trainers: [{one % ', start_s: 15'}]\n")
    capsys.readouterr()

    def waited(workload: str, *options: str) -> float:
        assert command(["simulate", "--trace", "t.parquet", "--workload", workload, *options, "--json"]) == 0
        return float(json.loads(capsys.readouterr().out)["waiting_cost_samples"])

    none, given_15, own_15, own = (
        waited("w.yaml"),
        waited("w.yaml", "--start-s", "15"),
        waited("own.yaml"),
        waited("own.yaml", "--start-s", "99"),
    )
    assert none < given_15 == own_15 == own
    assert command(["simulate", "--trace", "t.parquet", "--workload", "w.yaml", "--start-s", "-1"]) == 2


def test_a_start_must_be_a_time() -> None:
    with pytest.raises(InputError, match="start_s must be a number of seconds, 0 or more, but got -1"):
        trainer(start=-1)


def test_a_trainer_without_an_end_trains_as_long_as_there_are_nodes() -> None:
    found = run(machine(("n0", 0, 1000)), trainer(math.inf, start=0.0))
    assert (found.outcome, found.finished) == (10.0 * 1000, False)
