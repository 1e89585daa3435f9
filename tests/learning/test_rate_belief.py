"""What is believed of a script's rates, from the stays of its trainers."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.core.curve import Curve
from bftrainer.learning.points import MOST_POINTS, curve_sizes
from bftrainer.learning.rates import (
    BEND_OCTAVES,
    BEND_SD,
    LEVEL_SD,
    MOST_STAYS,
    MOST_TRIALS,
    NOISE,
    SLOPE,
    SLOPE_SD,
    RateBelief,
    Stay,
)
from support.examples import examples


def amdahl(size: int) -> float:
    return 1 / (0.0005 + 0.01 / size)


def stay(size: int, rate: float, windows: int = 20, noise: float = NOISE) -> Stay:
    return Stay(size, windows, math.log(rate / size), noise**2 * (windows - 1))


def belief_of(*stays: tuple[str, int, float], prior: Curve | None = None) -> RateBelief:
    belief = RateBelief(prior)
    for number, (trial, size, rate) in enumerate(stays):
        belief.observe(trial, number, stay(size, rate))
    return belief


def test_a_stay_is_the_mean_and_the_scatter_of_its_windows() -> None:
    rates = [90.0, 100.0, 120.0]
    found = Stay.first(4, rates[0]).then(rates[1]).then(rates[2])
    logs = np.log(np.array(rates) / 4)
    assert (found.size, found.windows) == (4, 3)
    assert found.log_rate == pytest.approx(logs.mean())
    assert found.scatter == pytest.approx(((logs - logs.mean()) ** 2).sum())
    assert found.rate == pytest.approx(4 * math.exp(logs.mean()))


def test_the_posterior_is_that_of_the_gaussian_process() -> None:
    sizes, rates = [1, 4, 16], [100.0, 350.0, 1100.0]
    belief = belief_of(*(("a", size, rate) for size, rate in zip(sizes, rates, strict=True)))
    variance = belief.noise**2
    x, y = np.log2(sizes), np.log(np.array(rates) / sizes)
    every = np.log2(np.arange(1, 33))

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        apart = a[:, None] - b
        return LEVEL_SD**2 + SLOPE_SD**2 * a[:, None] * b + BEND_SD**2 * np.exp(-0.5 * (apart / BEND_OCTAVES) ** 2)

    noise = variance * (1 + 1 / 20)
    base = np.mean(y - SLOPE * x)
    gain = kernel(every, x) @ np.linalg.inv(kernel(x, x) + noise * np.eye(3))
    mean = base + SLOPE * every + gain @ (y - base - SLOPE * x)
    spread = np.diag(kernel(every, every) - gain @ kernel(x, every))
    found = belief.estimate(tuple(range(1, 33)))
    assert found.log_rates == pytest.approx(mean + every * math.log(2))
    own = 0.01**2  # how much trials differ at least
    assert found.log_sds**2 == pytest.approx(spread + own)
    assert belief.rates(tuple(range(1, 33))) == pytest.approx(found.rates())


def test_it_is_sure_of_what_it_has_seen_and_unsure_far_from_it() -> None:
    found = belief_of(("a", 2, 200.0), ("b", 4, 380.0)).estimate((2, 4, 64))
    assert found.rates()[:2] == pytest.approx([200, 380], rel=0.02)
    assert found.log_sds[2] > 3 * found.log_sds[0]
    assert found.rates(-1.28)[2] < found.rates()[2] < found.rates(1.28)[2]


def test_noise_averages_out_over_the_stays_of_all_trials() -> None:
    belief, rng = RateBelief(), random.Random(1)
    for number in range(300):
        size = rng.choice([1, 2, 3, 4, 6, 8, 12, 16])
        lasting = rng.gauss(0, 0.07)
        windows = [amdahl(size) * math.exp(lasting + rng.gauss(0, 0.07)) for _ in range(9)]
        found = Stay.first(size, windows[0])
        for rate in windows[1:]:
            found = found.then(rate)
        belief.observe(f"t{number // 3}", number, found)
    sizes = tuple(range(1, 17))
    assert belief.rates(sizes) == pytest.approx([amdahl(size) for size in sizes], rel=0.03)
    assert belief.noise == pytest.approx(0.07, rel=0.1)


def test_what_is_kept_is_bounded_whatever_was_measured() -> None:
    belief = RateBelief()
    for number in range(3000):
        belief.observe(f"t{number % 700}", number, stay(1 + number % 500, 100.0))
    text = json.dumps(belief.as_json())
    assert len(belief.stays()) <= MOST_STAYS + MOST_TRIALS
    assert len(text) < 100_000
    assert len(belief.rates(curve_sizes(1, 4096))) <= MOST_POINTS + 1


def test_a_change_of_the_script_is_followed_in_time() -> None:
    belief = belief_of(*((f"t{number // 5}", 4, 400.0) for number in range(300)))
    for number in range(300, 450):
        belief.observe(f"t{number // 5}", number, stay(4, 200.0))
    assert belief.rates((4,), "t89")[0] == pytest.approx(200, rel=0.02)
    assert belief.rates((4,))[0] == pytest.approx(200, rel=0.05)


def test_trials_that_are_alike_are_taken_as_one() -> None:
    belief = belief_of(*((f"t{i}", size, 100.0 * size) for i in range(6) for size in (1, 2, 4)))
    belief.observe("new", 99, stay(4, 420.0, windows=3))
    assert belief.rates((4,), "new")[0] < 410


def test_trials_that_differ_have_their_own_level_and_a_common_shape() -> None:
    rows = [(f"t{i}", size, 50.0 * 2**i * size**0.9) for i in range(5) for size in ((1, 2, 4), (2, 8, 16))[i % 2]]
    belief = belief_of(*rows)
    for trial in range(5):
        expected = [50.0 * 2**trial * size**0.9 for size in (1, 4, 16)]
        assert belief.rates((1, 4, 16), f"t{trial}") == pytest.approx(expected, rel=0.1)
    of_a_new_one = belief.estimate((4,))
    assert of_a_new_one.log_sds[0] > 0.5


def test_a_users_curve_is_believed_until_it_is_measured_and_its_shape_then() -> None:
    prior = Curve.through([1, 2, 4, 8], [10, 19, 30, 20])
    belief = RateBelief(prior)
    assert belief.is_known
    assert belief.rates((1, 2, 4, 8)) == pytest.approx([10, 19, 30, 20])
    belief.observe("a", 1, stay(2, 190.0))
    assert belief.rates((1, 2, 4, 8)) == pytest.approx([100, 190, 300, 200], rel=0.01)
    belief.observe("a", 2, stay(8, 400.0))
    assert belief.rates((8,))[0] == pytest.approx(400, rel=0.05)


def test_a_users_curve_that_says_nothing_is_passed_over() -> None:
    assert not RateBelief(Curve.through([1, 8], [0, 0])).is_known


def test_reports_between_two_numbers_of_windows_change_nothing() -> None:
    belief = RateBelief()
    versions = []
    for windows in range(1, 25):
        belief.observe("a", 1, stay(4, 100.0 + windows, windows))
        versions.append(belief.version)
    assert len(set(versions)) == 4


def test_all_of_it_survives_a_restart() -> None:
    belief, rng = RateBelief(Curve.amdahl(0.9, 5.0, 64)), random.Random(2)
    for number in range(200):
        size = rng.randint(1, 40)
        belief.observe(f"t{number // 5}", number, stay(size, amdahl(size) * rng.uniform(0.8, 1.2)))
    text = json.dumps(belief.as_json())
    again = RateBelief.from_json(json.loads(text))
    sizes = curve_sizes(1, 40)
    assert json.dumps(again.as_json()) == text
    assert again.rates(sizes, "t39") == pytest.approx(belief.rates(sizes, "t39"))
    assert list(again.measured().items()) == list(belief.measured().items())
    assert not RateBelief.from_json({}).is_known


@settings(max_examples=examples(200, 25))
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 100_000), st.floats(1e-6, 1e9), st.integers(1, 70)),
        min_size=1,
        max_size=90,
    )
)
def test_whatever_was_measured_gives_a_curve(rows: list[tuple[str, int, float, int]]) -> None:
    belief = RateBelief()
    for number, (trial, size, rate, windows) in enumerate(rows):
        belief.observe(trial, number, stay(size, rate, windows))
    for trial in ("a", None):
        found = belief.estimate(curve_sizes(1, 100_000), trial)
        assert np.isfinite(found.log_rates).all()
        assert (found.log_sds > 0).all()


@given(st.integers(1, 3000), st.integers(0, 1_000_000))
def test_the_sizes_of_a_curve_are_few_and_reach_from_end_to_end(least: int, more: int) -> None:
    sizes = curve_sizes(least, least + more)
    assert (sizes[0], sizes[-1]) == (least, least + more)
    assert len(sizes) <= MOST_POINTS + 1
    assert list(sizes) == sorted(set(sizes))
