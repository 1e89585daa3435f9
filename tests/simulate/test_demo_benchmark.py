"""benchmarks/demo.py: the demo in simulation, as a whole and in its parts."""

from __future__ import annotations

from statistics import fmean

import pytest

import demo
from bftrainer.cluster.demo import PARTS
from bftrainer.simulate.knowledge import Noise


def test_learned_curves_are_better_than_equal_shares_and_known_ones_are_best() -> None:
    trainers = demo.demo_trainers(0.1, 0.05, 1.5)
    rows = [demo.shares(demo.demo_trace(seed, 60.0), trainers, Noise(0.05, seed)) for seed in range(4)]
    equal, learned, known = (fmean(row[name] for row in rows) for name in ("equal", "learned", "known"))
    assert equal < learned < known < 1


def test_a_seed_always_gives_the_same_nodes_and_figures() -> None:
    traces = [demo.demo_trace(seed, 30.0) for seed in (3, 3, 4)]
    ends = [[(one.node, one.start, one.end) for one in trace.fragments()] for trace in traces]
    assert ends[0] == ends[1] != ends[2]
    trainers = demo.demo_trainers(0.1, 0.05, 1.5)
    assert demo.shares(traces[0], trainers, Noise(0.05, 3)) == demo.shares(traces[1], trainers, Noise(0.05, 3))


def test_the_curves_are_those_of_the_demo() -> None:
    curves = {trainer.name: trainer.curve for trainer in demo.demo_trainers(0.1, 0.05, 1.5)}
    assert list(curves) == [part.name for part in PARTS]
    assert curves["digits"].rate(1) == pytest.approx(32 / 0.2)
    assert curves["chars"].rate(8) == pytest.approx(64 / 0.32)


def test_of_a_live_run_the_work_done_counts_and_the_makespan_is_told_beside_it() -> None:
    summary = {
        "busy": {"live": 0.91234, "simulated": 0.92, "equal": 0.85},
        "busy_s": 80.0,
        "judgement": {"efficiency": 0.8, "equal": 0.82, "bound": 0.97, "seconds": 120.0, "start_s": 1.5},
    }
    found = demo.live_figures(summary)
    assert (found["ours"], found["equal"], found["bound"]) == (0.9123, 0.85, 1.0)
    assert (found["ours_makespan"], found["equal_makespan"], found["bound_makespan"]) == (0.8, 0.82, 0.97)
