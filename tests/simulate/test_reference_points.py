"""The reference points on the authors' data: first 1024 nodes of Summit, from the start of the paper's window."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from bftrainer.core.trace import Trace, Window
from bftrainer.core.trainer import Trainer
from bftrainer.simulate.metrics import Metrics
from bftrainer.simulate.study import Study, simulate
from bftrainer.simulate.workload import load_workload
from bftrainer.traces.files import load_trace
from bftrainer.traces.times import Clock


@cache
def summit(folder: Path) -> Trace:
    whole = load_trace(folder / "fragments.parquet")
    return whole.select(whole.nodes[:1024]).clip(Window(Clock()("2021-02-10T20:21:15"), whole.window.end))


def trials(folder: Path) -> tuple[Trainer, ...]:
    return load_workload(folder / "hpo-shufflenet-1000.csv").trainers


def hpo(shared_data: Path, study: Study) -> Metrics:
    folder = shared_data / "summit"
    return simulate(summit(folder), trials(folder), study).metrics


def test_the_authors_way_gives_their_efficiency_and_hours(shared_data: Path) -> None:
    metrics = hpo(shared_data, Study(accounting="paper", decide_on="pool"))
    assert metrics.completed == 1000
    assert metrics.efficiency == pytest.approx(0.837, abs=0.010)
    assert metrics.hours == pytest.approx(203.5, abs=2.0)
    assert metrics.bound == pytest.approx(0.927, abs=0.004)


def test_the_baseline_is_where_the_paper_has_it(shared_data: Path) -> None:
    metrics = hpo(shared_data, Study(allocator="equal", accounting="paper", decide_on="pool"))
    assert 0.75 <= metrics.efficiency <= 0.77


def test_deciding_at_completions_too_is_worth_several_points(shared_data: Path) -> None:
    metrics = hpo(shared_data, Study(accounting="paper", decide_on="all"))
    assert metrics.efficiency == pytest.approx(0.893, abs=0.006)
    assert metrics.bound == pytest.approx(0.927, abs=0.004)


def test_real_stalls_cost_a_little_more_than_the_authors_rule(shared_data: Path) -> None:
    assert hpo(shared_data, Study()).efficiency == pytest.approx(0.880, abs=0.006)


def test_a_cheap_rescale_is_worth_more_than_any_cleverness(shared_data: Path) -> None:
    folder = shared_data / "summit"
    cheap = [replace(trainer, up_s=1.0, down_s=1.0) for trainer in trials(folder)]
    metrics = simulate(summit(folder), cheap, Study()).metrics
    assert metrics.efficiency == pytest.approx(0.922, abs=0.004)


def test_more_parallel_trainers_run_longer_on_fewer_node_hours(shared_data: Path) -> None:
    folder = shared_data / "summit"
    trainers = load_workload(folder / "diverse-1001.csv").trainers
    few, many = (
        simulate(summit(folder), trainers, Study("exact", "efficiency", 120.0, p, "paper", "pool")).metrics
        for p in (5, 35)
    )
    assert few.mean_run_hours is not None
    assert many.mean_run_hours is not None
    assert many.mean_run_hours / few.mean_run_hours - 1 == pytest.approx(4.45, abs=0.20)
    drop = many.resource_integral_node_hours / few.resource_integral_node_hours - 1
    assert drop == pytest.approx(-0.24, abs=0.03)
