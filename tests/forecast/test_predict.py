"""Finishing times from replays in futures of the pool."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.core.curve import Curve
from bftrainer.core.trace import Trace
from bftrainer.core.trainer import Trainer
from bftrainer.forecast.estimate import FinishEstimate
from bftrainer.forecast.past import DAY_S, PoolPast, steady
from bftrainer.forecast.predict import LATER, Prediction, Situation, evenly, later_arrivals, predict
from bftrainer.scheduler import Policy
from bftrainer.simulate.replay import Present, ReplaySettings, replay

NOW = 20 * DAY_S
LINE = Curve.through([1, 8], [10.0, 80.0])
SETTINGS = ReplaySettings(policy=Policy(max_parallel=2))


def trainer(name: str, work: float, most: int = 8, **more: float) -> Trainer:
    return Trainer(name, LINE, 1, most, work=work, submit=NOW - 10, **more)  # type: ignore[arg-type]


def situation(*trainers: Trainer, nodes: int = 4, assigned: dict[str, tuple[str, ...]] | None = None) -> Situation:
    held = assigned or {}
    pool = {f"n{i}": NOW - 100.0 for i in range(nodes)}
    return Situation.of(NOW, pool, trainers, held, tuple(held), SETTINGS)


def ask(question: Situation, futures: int = 3, **more: object) -> Prediction:
    past = PoolPast(steady(tuple(question.pool), NOW))
    return predict(question, past, futures, 1, **more)  # type: ignore[arg-type]


def test_in_a_pool_that_stays_the_time_is_work_over_rate() -> None:
    question = situation(trainer("a", 4000.0), assigned={"a": ("n0", "n1", "n2", "n3")})
    assert ask(question).times["a"].tolist() == pytest.approx([NOW + 100.0] * 3)


def test_a_trainer_on_its_nodes_does_not_start_again() -> None:
    slow_start = trainer("a", 4000.0, start_s=500.0, up_s=50.0)
    running = situation(slow_start, assigned={"a": ("n0", "n1", "n2", "n3")})
    assert ask(running).times["a"][0] == pytest.approx(NOW + 100.0)
    assert ask(situation(slow_start)).times["a"][0] > NOW + 500.0


def test_trainers_that_wait_come_after_those_before_them() -> None:
    question = situation(*(trainer(name, 4000.0, most=2) for name in ("a", "b", "c")))
    found = ask(question).times
    assert found["c"][0] > found["a"][0]
    assert found["c"][0] == pytest.approx(NOW + 300.0, rel=0.05)


def test_a_group_is_done_when_its_last_trainer_is() -> None:
    found = ask(situation(trainer("a", 100.0, most=1), trainer("b", 900.0, most=1)))
    assert found.of(["a", "b"]).tolist() == found.times["b"].tolist()


def test_a_trainer_of_unknown_work_has_no_time_but_takes_nodes() -> None:
    endless = replace(trainer("endless", math.inf, most=2), curve=LINE.scaled(2.0))
    found = ask(situation(trainer("a", 4000.0), endless))
    assert list(found.times) == ["a"]
    assert found.times["a"][0] == pytest.approx(NOW + 200.0)


def test_uncertain_speeds_widen_the_interval() -> None:
    question = situation(trainer("a", 4000.0), assigned={"a": ("n0", "n1", "n2", "n3")})
    certain = FinishEstimate.of(ask(question, 30).times["a"], NOW)
    uncertain = FinishEstimate.of(ask(replace(question, rate_sigma={"a": 0.3}), 30).times["a"], NOW)
    assert certain is not None
    assert uncertain is not None
    assert certain.high_s - certain.low_s < 1 < uncertain.high_s - uncertain.low_s


def test_a_trainer_that_needs_more_nodes_than_there_are_is_never_done() -> None:
    big = replace(trainer("big", 100.0, most=40), min_nodes=30)
    assert ask(situation(big)).times["big"].tolist() == [math.inf] * 3


def test_futures_end_when_there_are_enough() -> None:
    assert len(ask(situation(trainer("a", 100.0)), 9, enough=lambda: True).times["a"]) == 1


def test_later_submissions_are_like_those_of_the_last_days() -> None:
    earlier = tuple(replace(trainer(f"e{i}", 10.0), submit=NOW - 2 * DAY_S + i * 3600.0) for i in range(48))
    question = replace(situation(), arrivals=earlier, arrivals_since=NOW - 2 * DAY_S)
    later = later_arrivals(question, DAY_S, np.random.Generator(np.random.PCG64(1)))
    assert all(NOW <= one.submit < NOW + DAY_S and one.name.startswith(LATER) for one in later)
    assert len(later) == pytest.approx(24, abs=2)


def test_without_a_day_of_submissions_nothing_else_is_submitted() -> None:
    sweep = tuple(replace(trainer(f"e{i}", 10.0), submit=NOW - 60.0) for i in range(50))
    question = replace(situation(), arrivals=sweep, arrivals_since=NOW - 600.0)
    assert later_arrivals(question, DAY_S, np.random.Generator(np.random.PCG64(1))) == []


def test_an_estimate_has_the_median_and_holds_80_percent() -> None:
    estimate = FinishEstimate.of(NOW + np.arange(1.0, 100.0), NOW, spread=1.0)
    assert estimate is not None
    assert (estimate.low_s, estimate.point_s, estimate.high_s) == pytest.approx((10.0, 50.0, 90.0))
    assert estimate.within(25.0) == pytest.approx(25 / 99)


@given(st.lists(st.one_of(st.floats(0.0, 1e7), st.just(math.inf)), min_size=1, max_size=60), st.floats(0.5, 2.0))
def test_the_point_is_in_the_interval(times: list[float], spread: float) -> None:
    estimate = FinishEstimate.of(np.array(times), 0.0, spread)
    assert estimate is not None
    assert estimate.low_s <= estimate.point_s <= estimate.high_s


def test_any_first_part_of_the_futures_is_spread_evenly() -> None:
    for count in (2, 8, 16, 64):
        assert sorted(int(evenly(place) * count) for place in range(count)) == list(range(count))


def test_a_larger_spread_widens_the_interval_around_the_same_point() -> None:
    times = NOW + np.arange(1.0, 100.0)
    narrow, wide = (FinishEstimate.of(times, NOW, spread) for spread in (1.0, 1.5))
    assert narrow is not None
    assert wide is not None
    assert wide.point_s == narrow.point_s
    assert wide.low_s < narrow.low_s < narrow.high_s < wide.high_s


def test_where_most_futures_are_too_short_there_is_no_upper_end() -> None:
    estimate = FinishEstimate.of(np.array([NOW + 5.0, *[math.inf] * 9]), NOW)
    assert estimate is not None
    assert estimate.point_s == estimate.high_s == math.inf
    assert FinishEstimate.of(np.zeros(0), NOW) is None


def test_a_replay_that_goes_on_from_a_present_ends_as_the_whole_one() -> None:
    trace = Trace.build(
        ("a", "b", "c"), [0, 1, 2, 0], [0.0, 0.0, 40.0, 90.0], [60.0, 300.0, 200.0, 300.0], [0, 1, 0, 1]
    )
    trainers = [
        Trainer("x", LINE, 1, 4, 3.0, 2.0, 1500.0, 0.0, start_s=10.0),
        Trainer("y", LINE, 1, 4, 3.0, 2.0, 1000.0, 20.0, start_s=10.0),
    ]
    settings = ReplaySettings(policy=Policy(max_parallel=4), snapshot_every_s=30.0)
    seen: list[tuple[float, Present]] = []
    whole = replay(trace, trainers, settings, look=lambda now, copy: seen.append((now, copy())))
    ends = {row.name: row.end for row in whole.trainers}
    assert whole.finished
    checked = 0
    for now, present in seen:
        if not present.jobs or now == 0:
            continue
        rest = trace.clip(type(trace.window)(now, trace.window.end))
        waiting = [one for one in trainers if one.submit > now]
        again = replay(rest, waiting, settings, present=present)
        assert {row.name: row.end for row in again.trainers if row.end} == pytest.approx(
            {name: end for name, end in ends.items() if name in present.jobs or (end and end > now)}
        )
        checked += 1
    assert checked >= 3
