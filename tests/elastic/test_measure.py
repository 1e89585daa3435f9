from __future__ import annotations

import time

import pytest

from bftrainer.elastic.torch import rates
from bftrainer.elastic.torch.rates import Meter
from support.clocks import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rates, "time", clock)
    return clock


def train(meter: Meter, clock: Clock, steps: int, step_s: float, samples: int = 10, look_every_s: float = 1.0) -> None:
    look_at = clock.now + look_every_s
    for _ in range(steps):
        clock.now += step_s
        meter.stepped(samples)
        while clock.now >= look_at:
            meter.look()
            look_at += look_every_s


def test_the_rate_is_that_of_the_world_it_was_measured_in(clock: Clock) -> None:
    meter = Meter()
    meter.formed(1, 2)
    train(meter, clock, 100, 0.1)
    meter.formed(2, 3)
    train(meter, clock, 100, 0.05)
    assert meter.rates() == {2: pytest.approx(100.0), 3: pytest.approx(200.0)}


def test_the_first_steps_after_a_change_do_not_count(clock: Clock) -> None:
    meter = Meter()
    meter.formed(1, 2)
    train(meter, clock, rates.WARM_UP_STEPS, 5.0)  # compiling, tuning
    train(meter, clock, 60, 0.1)
    assert meter.rates() == {2: pytest.approx(100.0)}


def test_a_window_with_a_pause_in_it_does_not_spoil_the_rate(clock: Clock) -> None:
    meter = Meter()
    meter.formed(1, 4)
    train(meter, clock, 50, 0.1)
    clock.now += 30.0  # an evaluation
    train(meter, clock, 50, 0.1)
    assert meter.rates() == {4: pytest.approx(100.0, rel=0.02)}


def test_the_small_batch_at_the_end_of_an_epoch_counts(clock: Clock) -> None:
    for step_s in (0.1, 0.3):
        meter = Meter()
        meter.formed(1, 2)
        for _ in range(8):  # 600 samples in batches of 48
            train(meter, clock, 12, step_s, samples=48)
            train(meter, clock, 1, step_s, samples=24)
        assert meter.rates() == {2: pytest.approx(600 / (13 * step_s), rel=0.01)}
        assert meter.stay()[1] == meter.rates()[2]


def test_slow_steps_are_measured_over_several_of_them(clock: Clock) -> None:
    meter = Meter()
    meter.formed(1, 2)
    train(meter, clock, 20, 7.0)
    assert meter.rates() == {2: pytest.approx(10 / 7)}


def test_no_window_spans_a_change(clock: Clock) -> None:
    meter = Meter()
    for generation in range(1, 20):
        meter.formed(generation, 1 + generation % 2)
        train(meter, clock, 3, 0.3)
    assert meter.rates() == {}


def test_a_mark_costs_little() -> None:
    meter = Meter()
    began = time.perf_counter()
    for _ in range(100_000):
        meter.stepped(32)
    # A microsecond a step is the aim and a fraction of it what it takes; a hundred would be a blunder.
    assert (time.perf_counter() - began) / 100_000 < 100e-6
    assert (meter.steps, meter.samples) == (100_000, 3_200_000)
