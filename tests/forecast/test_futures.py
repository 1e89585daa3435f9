"""Futures drawn from a pool's past."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.core.pool import Fragment
from bftrainer.core.trace import Trace, Window
from bftrainer.forecast.futures import draw_future
from bftrainer.forecast.past import DAY_S, Draw, PoolMoment, PoolPast, block_of, from_profile, steady

HOUR = 3600.0
NOW = 20 * DAY_S


def every_hour(days: float = 4.0, nodes: int = 6, stay_s: float = 1800.0) -> PoolPast:
    """Half an hour of all nodes at every full hour."""
    start = NOW - days * DAY_S
    times = np.arange(start, NOW, HOUR)[1:]
    rows = [Fragment(f"n{i}", time, time + stay_s) for time in times for i in range(nodes)]
    return PoolPast(Trace.from_fragments(rows, [f"n{i}" for i in range(nodes)], Window(start, NOW)))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def test_a_future_goes_on_as_the_past_did() -> None:
    future = draw_future(every_hour(), {}, 2 * DAY_S, rng())
    assert future.window == Window(NOW, NOW + 2 * DAY_S)
    assert set(future.lengths.round().tolist()) <= {1800.0, *future.lengths[future.open].round().tolist()}
    hours = future.lengths.sum() / HOUR
    assert hours == pytest.approx(6 * 24, rel=0.1)


def test_a_future_begins_with_the_present_nodes_and_their_names() -> None:
    present = {"n2": NOW - 60.0, "n5": NOW - 60.0}
    future = draw_future(every_hour(), present, 6 * HOUR, rng())
    first = {fragment.node for fragment in future.fragments() if fragment.start == NOW}
    assert first >= {"n2", "n5"}


def test_present_nodes_stay_as_long_as_nodes_of_the_past_did_and_no_longer() -> None:
    past = every_hour()
    for seed in range(20):
        future = draw_future(past, {"n0": NOW - 600.0}, 6 * HOUR, rng(seed))
        end = next(fragment.end for fragment in future.fragments() if fragment.start == NOW)
        assert NOW < end <= NOW + 1800.0


def test_nodes_that_came_together_go_together() -> None:
    present = {f"n{i}": NOW - 300.0 for i in range(6)}
    for seed in range(10):
        future = draw_future(every_hour(), present, 6 * HOUR, rng(seed))
        assert len({fragment.end for fragment in future.fragments() if fragment.start == NOW}) == 1


def test_a_future_never_has_more_nodes_than_the_machine() -> None:
    past = every_hour(stay_s=3599.0)
    present = {f"n{i}": NOW - 10.0 for i in range(6)}
    future = draw_future(past, present, DAY_S, rng())
    size = 0
    for event in future.events():
        size += len(event.joined) - len(event.left)
        assert 0 <= size <= 6


def test_the_same_seed_gives_the_same_future() -> None:
    first, second = (draw_future(every_hour(), {"n1": NOW - 5.0}, DAY_S, rng(3)) for _ in range(2))
    assert np.array_equal(first.start, second.start)
    assert np.array_equal(first.end, second.end)


def test_on_a_grid_there_are_fewer_events_and_as_much_node_time() -> None:
    past = every_hour(stay_s=1234.0)
    fine, coarse = (draw_future(past, {"n1": NOW - 5.0}, DAY_S, rng(2), grid_s) for grid_s in (0.0, 300.0))
    assert ((coarse.start - NOW) % 300.0).tolist() == [0.0] * len(coarse)
    assert len(list(coarse.events())) <= len(list(fine.events()))
    assert coarse.lengths.sum() == pytest.approx(fine.lengths.sum(), rel=0.05)


def test_on_a_grid_there_are_fewer_events_the_later_it_is() -> None:
    future = draw_future(every_hour(stay_s=1234.0), {"n1": NOW - 5.0}, 2 * DAY_S, rng(2), 60.0)
    steps = np.unique(future.start - NOW)
    assert (steps % 60.0 == 0).all()
    assert (steps[steps > 24 * 60.0] % 120.0 == 0).all()
    assert (steps[steps > 96 * 60.0] % 480.0 == 0).all()


def test_in_a_steady_pool_the_present_nodes_stay_and_none_joins() -> None:
    future = draw_future(PoolPast(steady(("a", "b"), NOW)), {"a": NOW - 9.0, "b": NOW - 3.0}, HOUR, rng())
    assert [(one.node, one.start, one.end, one.open) for one in future.fragments()] == [
        ("a", NOW, NOW + HOUR, True),
        ("b", NOW, NOW + HOUR, True),
    ]


def test_nodes_that_are_there_when_the_past_begins_are_no_joins() -> None:
    rows = [Fragment("a", 0.0, 4000.0), Fragment("b", 500.0, 900.0)]
    past = PoolPast(Trace.from_fragments(rows, ["a", "b"], Window(0.0, 10_000.0)))
    assert block_of(past, 0.0, 1000.0).after_s.tolist() == [500.0]


def test_moments_of_the_same_time_of_day_and_size_are_preferred() -> None:
    start = NOW - 10 * DAY_S
    nights = [
        Fragment(f"n{i}", start + day * DAY_S, start + day * DAY_S + 6 * HOUR) for day in range(10) for i in range(4)
    ]
    past = PoolPast(Trace.from_fragments(nights, [f"n{i}" for i in range(4)], Window(start, NOW)))
    draw = rng()
    moment = PoolMoment(NOW + 2 * HOUR, 4, 0)
    hours = [(past.like(moment, HOUR, Draw(draw.random(), HOUR)) or 0.0) % DAY_S / HOUR for _ in range(200)]
    assert sum(hour < 6 for hour in hours) > 2 * 200 / 4  # twice as often as in a random draw


def test_moments_with_nodes_of_the_same_age_are_preferred() -> None:
    # By turns, four nodes stay for 18 hours, and four new ones come every hour.
    start = NOW - 10 * DAY_S
    rows = [
        Fragment(f"n{i}", start + day * DAY_S, start + day * DAY_S + 18 * HOUR) for day in range(10) for i in range(4)
    ]
    rows += [
        Fragment(f"n{i}", start + day * DAY_S + hour * HOUR, start + day * DAY_S + (hour + 1) * HOUR - 1)
        for day in range(10)
        for hour in range(18, 24)
        for i in range(4)
    ]
    past = PoolPast(Trace.from_fragments(rows, [f"n{i}" for i in range(4)], Window(start, NOW)))
    evenly = np.linspace(0, 1, 200, endpoint=False)

    def share_after_18(old: int) -> float:
        found = [past.like(PoolMoment(NOW + 12 * HOUR, 4, old), HOUR, Draw(share, HOUR)) or 0.0 for share in evenly]
        return float(np.mean([time % DAY_S >= 18 * HOUR for time in found]))

    assert share_after_18(old=0) > 2 * share_after_18(old=4)


def test_recent_moments_are_preferred() -> None:
    past = every_hour(days=16.0)
    moments = [past.like(PoolMoment(NOW, 6, 0), HOUR, Draw(share, HOUR)) or 0.0 for share in np.linspace(0, 0.999, 100)]
    assert np.median(moments) > NOW - 8 * DAY_S


@given(st.lists(st.floats(0.0, 0.999), min_size=2, max_size=8))
def test_a_larger_share_draws_a_moment_before_a_larger_pool(shares: list[float]) -> None:
    rows = [Fragment(f"n{i}", NOW - DAY_S + 1, NOW - DAY_S + 2 * HOUR * (i + 1)) for i in range(10)]
    past = PoolPast(Trace.from_fragments(rows, [f"n{i}" for i in range(10)], Window(NOW - DAY_S, NOW)))
    ahead_s = 4 * HOUR

    def after(moment: float) -> float:
        here = (past.moments >= moment) & (past.moments < moment + ahead_s)
        return float(past.sizes[here].mean())

    drawn = [past.like(PoolMoment(NOW, 5, 0), HOUR, Draw(share, ahead_s)) for share in sorted(shares)]
    sizes = [after(moment) for moment in drawn if moment is not None]
    assert len(sizes) == len(shares)
    assert sizes == sorted(sizes)


def test_a_future_can_go_on_like_the_last_hours() -> None:
    # The pool was empty but for the last six hours.
    rows = [Fragment(f"n{i}", NOW - 6 * HOUR, NOW, open=True) for i in range(4)]
    past = PoolPast(Trace.from_fragments(rows, [f"n{i}" for i in range(4)], Window(NOW - 3 * DAY_S, NOW)))
    largest = past.like(PoolMoment(NOW, 4, 4), 3 * HOUR, Draw(0.999, 3 * HOUR))
    assert largest is not None
    assert NOW - 6 * HOUR <= largest <= NOW - 3 * HOUR


def test_a_past_is_long_after_a_day_and_counts_its_departures() -> None:
    assert every_hour(days=2).is_long
    rows = [Fragment("a", 10.0, 600.0), Fragment("b", 10.0, 700.0, open=True)]
    short = PoolPast(Trace.from_fragments(rows, ["a", "b"], Window(0.0, 700.0)))
    assert (short.is_long, short.departures) == (False, 1)


def test_a_profile_gives_a_pool_of_the_wanted_size() -> None:
    past = PoolPast(from_profile("summit", 20, NOW, seed=1, days=3.0))
    assert past.now == pytest.approx(NOW)
    assert 10 < past.sizes.mean() < 40
