"""What is learned of a trainer, and whether the scheduler decides well with it."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.cluster.config.keys import UNMEASURED_S
from bftrainer.cluster.jobs.curve_fit import BONUS, MOST_POINTS
from bftrainer.cluster.jobs.learning import ENOUGH, REPORTS, Learned, Prior
from bftrainer.core.curve import Curve
from bftrainer.core.pool import Event
from bftrainer.core.trainer import Trainer
from bftrainer.scheduler import Policy, Scheduler, State


def known(measured: Mapping[int, float], prior: Curve | None = None, reports: int = 1) -> Learned:
    learned = Learned(Prior(prior))
    for number in range(reports):
        learned.rates({size: rate * (1 + 1e-9 * number) for size, rate in measured.items()})
    return learned


def rates(learned: Learned, least: int = 1, most: int = 8) -> dict[int, float]:
    curve = learned.curve(least, most, 10.0)
    return {n: curve.rate(n) for n in range(least, most + 1)}


def amdahl(serial: float, parallel: float) -> Callable[[int], float]:
    return lambda n: 1 / (serial + parallel / n)


# Rates.


def test_a_size_counts_from_its_first_report() -> None:
    learned = Learned()
    assert learned.rates({2: 100.0})
    assert learned.measured == {2: 100.0}


def test_what_was_said_before_is_no_news() -> None:
    learned = Learned()
    learned.rates({2: 100.0})
    assert not any(learned.rates({2: 100.0}) for _ in range(200))
    assert learned.rates({2: 100.0, 4: 180.0})


def test_noise_is_no_news_once_a_size_is_known() -> None:
    learned, rng = Learned(), random.Random(1)
    news = [learned.rates({4: 100 * rng.uniform(0.95, 1.05)}) for _ in range(3600)]
    assert sum(news) <= 3
    assert learned.measured[4] == pytest.approx(100, rel=0.02)


def test_a_rate_that_drifts_is_followed() -> None:
    learned, rng = Learned(), random.Random(1)
    for second in range(600):
        learned.rates({4: (100 + second / 10) * rng.uniform(0.98, 1.02)})
    assert learned.measured[4] == pytest.approx(160, rel=0.1)


def test_a_first_report_that_was_off_does_not_stay() -> None:
    learned = Learned()
    learned.rates({4: 30.0})
    for number in range(ENOUGH):
        learned.rates({4: 100 + 0.01 * number})
    assert learned.measured[4] == pytest.approx(100, rel=0.01)


def test_a_single_outlier_changes_nothing() -> None:
    learned = known({4: 100.0}, reports=REPORTS)
    assert not learned.rates({4: 5.0})
    assert learned.measured[4] == pytest.approx(100)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_rates_that_are_none_are_ignored(rate: float) -> None:
    learned = Learned()
    assert not learned.rates({2: rate, 0: 7.0})
    assert learned.measured == {}


# Curves.


def test_with_nothing_known_more_nodes_are_better_and_worth_less_each() -> None:
    found = rates(Learned(), least=2)
    steps = [b - a for a, b in itertools.pairwise(found.values())]
    assert all(step > 0 for step in steps)
    assert steps == sorted(steps, reverse=True)


def test_one_measured_size_is_taken_to_scale_to_its_double() -> None:
    assert rates(known({2: 100.0}))[4] == pytest.approx(200)


def test_measured_sizes_are_as_measured() -> None:
    measured = {1: 100.0, 3: 240.0, 4: 300.0, 8: 200.0}
    found = rates(known(measured, reports=ENOUGH))
    assert {n: found[n] for n in measured} == pytest.approx(measured)


def test_sizes_between_follow_the_law_of_amdahl() -> None:
    true = amdahl(0.002, 0.01)
    found = rates(known({1: true(1), 4: true(4)}))
    assert [found[n] for n in (2, 3)] == pytest.approx([true(2), true(3)])
    assert found[8] == pytest.approx(true(8) * BONUS)
    assert found[5] == pytest.approx(true(5))


def test_the_fit_bears_noise() -> None:
    true, rng = amdahl(0.001, 0.01), random.Random(3)
    measured = {n: true(n) * rng.uniform(0.97, 1.03) for n in (1, 2, 4, 8, 16)}
    assert rates(known(measured), most=32)[32] == pytest.approx(true(32) * BONUS, rel=0.1)


def test_the_bonus_is_gone_when_the_size_is_measured() -> None:
    true = amdahl(0.002, 0.01)
    assert rates(known({n: true(n) for n in (1, 4, 8)}))[8] == pytest.approx(true(8))


def test_a_fall_that_was_measured_is_believed() -> None:
    found = rates(known({2: 185.0, 4: 300.0, 6: 260.0}))
    assert found[5] == pytest.approx(280)
    assert found[7] == found[8] == pytest.approx(260)


def test_faster_than_linear_is_not_taken_for_a_law() -> None:
    assert rates(known({1: 100.0, 2: 260.0}))[4] <= 4 * 130 * BONUS


def test_where_the_peak_may_lie_elsewhere_a_size_is_tried() -> None:
    found = rates(known({8: 200.0}, reports=ENOUGH))
    assert found[4] == pytest.approx(200 * BONUS)
    found = rates(known({1: 100.0, 8: 200.0}, reports=ENOUGH))
    assert found[3] == pytest.approx(200 * BONUS)
    assert max(found.values()) == found[3]


def test_a_trainer_that_scales_well_is_left_in_peace() -> None:
    found = rates(known({4: 390.0, 8: 760.0}, reports=ENOUGH))
    assert max(found, key=lambda n: found[n]) == 8


def test_a_prior_is_brought_to_the_height_of_what_was_measured() -> None:
    prior = Curve.through([1, 2, 4, 8], [10, 19, 30, 20])
    assert rates(Learned(Prior(prior)))[8] == 20
    found = rates(known({2: 190.0}, prior))
    assert [found[n] for n in (1, 2, 4, 8)] == pytest.approx([100, 190, 300, 200])
    found = rates(known({2: 190.0, 8: 400.0}, prior))
    assert [found[n] for n in (1, 2, 8)] == pytest.approx([100, 190, 400])


def test_a_prior_that_says_nothing_is_passed_over() -> None:
    nothing = Curve.through([1, 8], [0, 0])
    assert rates(known({2: 100.0}, nothing)) == rates(known({2: 100.0}))


def test_a_curve_of_many_sizes_has_few_points() -> None:
    learned = known({n: 100.0 * n**0.9 for n in range(3, 900, 7)}, reports=ENOUGH)
    curve = learned.curve(2, 1024, 1.0)
    assert len(curve.nodes) <= MOST_POINTS + 1  # and the one at 0
    assert (curve.nodes[1], curve.nodes[-1]) == (2, 1024)
    assert curve.rate(899) == pytest.approx(learned.measured[899])
    assert curve.rate(500) == pytest.approx(100 * 500**0.9, rel=0.02)


@given(
    st.dictionaries(st.integers(1, 300), st.floats(1e-6, 1e9), max_size=40),
    st.integers(1, 20),
    st.integers(0, 280),
    st.integers(1, ENOUGH),
    st.booleans(),
)
def test_whatever_was_measured_gives_a_curve(
    measured: dict[int, float], least: int, more: int, reports: int, has_prior: bool
) -> None:
    learned = known(measured, Curve.amdahl(0.9, 5.0, 64) if has_prior else None, reports)
    curve = learned.curve(least, least + more, 1.0)
    assert len(curve.nodes) <= MOST_POINTS + 1
    assert (curve.nodes[1], curve.nodes[-1]) == (least, least + more)
    assert all(math.isfinite(rate) and rate > 0 for rate in curve.rates[1:])
    for size in set(curve.nodes) & set(learned.measured):
        assert curve.rate(size) == pytest.approx(learned.measured[size])


# Costs.


def test_costs_are_defaults_or_priors_until_they_are_measured() -> None:
    assert (Learned().up_s, Learned().down_s) == (UNMEASURED_S, UNMEASURED_S)
    assert (Learned(None, 3.0, 4.0).up_s, Learned(None, 3.0, 4.0).down_s) == (3.0, 4.0)
    learned = Learned(Prior(up_s=18.0, down_s=12.0))
    learned.rescaled("up", 0.3, 0.2, 0.1)
    assert (learned.up_s, learned.down_s) == (0.3, 12.0)


def test_a_cost_is_the_median_of_the_last_pauses() -> None:
    learned = Learned()
    for pause_s in (*[5.0] * 20, 0.1, 0.2, 0.3, 0.4, 30.0, 0.2, 0.2, 0.2, 0.2):
        learned.rescaled("down", pause_s, pause_s / 2, pause_s / 4)
    assert learned.down_s == 0.2
    assert learned.pauses() == {"count": 29, "median_s": 0.2, "pause_s": 0.2, "form_s": 0.1, "sync_s": 0.05}
    assert Learned().pauses()["median_s"] is None


def test_all_of_it_survives_a_restart() -> None:
    learned = known({1: 100.0, 4: 300.0}, Curve.through([1, 8], [10, 20]), reports=REPORTS + 3)
    learned.rescaled("up", 0.3, 0.2, 0.1)
    text = json.dumps(learned.as_json())
    again = Learned.from_json(json.loads(text), learned.prior)
    assert json.dumps(again.as_json()) == text
    assert again.curve(1, 8, 1.0) == learned.curve(1, 8, 1.0)
    assert (again.up_s, again.down_s, again.pauses()) == (learned.up_s, learned.down_s, learned.pauses())
    assert not again.rates({1: 101.0})
    assert Learned.from_json({}).measured == {}


def test_costs_that_were_never_measured_are_read_back_as_the_scheduler_used_them() -> None:
    opaque = Learned(None, 10.0, 10.0)
    again = Learned.from_json(json.loads(json.dumps(opaque.as_json())))
    assert (again.up_s, again.down_s) == (10.0, 10.0)
    told = Learned.from_json(opaque.as_json(), Prior(up_s=3.0))
    assert (told.up_s, told.down_s) == (3.0, 10.0)
    changed = Learned.from_json(opaque.as_json(), None, 4.0, 5.0)
    assert (changed.up_s, changed.down_s) == (4.0, 5.0)


# Decisions.

TRUTH: Mapping[str, Callable[[int], float]] = {
    "amdahl": lambda n: 100 / (0.03 + 0.97 / n),
    "saturating": lambda n: 300 * (1 - math.exp(-n / 2)),
    "peaked": lambda n: {1: 100.0, 2: 185.0, 3: 255.0, 4: 300.0, 5: 285.0, 6: 260.0, 7: 230.0, 8: 200.0}[n],
}
POOL = 8


@dataclass(frozen=True)
class Hour:
    changes: int
    share: float
    """Of the best possible rate, at the end."""


def an_hour(names: tuple[str, ...], cost_s: float, seed: int, always: bool = False) -> Hour:
    """Trainers of which nothing is known on a pool that stays as it is, a noisy report a second from each.

    A decision comes when there is news, or `always`, as in a pool where something happens all the time.
    """
    rng, scheduler = random.Random(seed), Scheduler(Policy(horizon_s=120.0))
    books = {f"{name}-{number}": Learned() for number, name in enumerate(names)}
    truth = {key: TRUTH[key.split("-")[0]] for key in books}
    last_change = dict.fromkeys(books, 0)
    state, _ = State().pool_changed(Event(0.0, tuple(f"n{i}" for i in range(POOL))))

    def trainers() -> dict[str, Trainer]:
        usual = max((rate / n for book in books.values() for n, rate in book.measured.items()), default=1.0)
        return {
            key: Trainer(key, book.curve(1, 8, usual), 1, 8, book.up_s, book.down_s, submit=float(number))
            for number, (key, book) in enumerate(books.items())
        }

    state = state.submitted(*trainers().values())
    news, changes = True, 0
    for second in range(3600):
        for key, book in books.items():
            size = len(state.assigned.get(key, ()))
            if size and second - last_change[key] >= 5:
                news |= book.rates({size: truth[key](size) * rng.uniform(0.95, 1.05)})
        if not (news or (always and second % 10 == 0)):
            continue
        news, now = False, trainers()
        state = replace(
            state,
            admitted=tuple(now[trainer.name] for trainer in state.admitted),
            waiting=tuple(now[trainer.name] for trainer in state.waiting),
        )
        plan = scheduler.decide(state)
        state = state.after(plan)
        moved = [change for change in plan.changes if change.after != change.before]
        changes += bool(moved)
        for change in moved:
            last_change[change.trainer] = second
            if change.before and change.after:
                kind = "up" if change.after > change.before else "down"
                books[change.trainer].rescaled(kind, cost_s, cost_s / 2, cost_s / 4)  # type: ignore[arg-type]

    def total(counts: tuple[int, ...]) -> float:
        return sum(truth[key](n) if n else 0.0 for key, n in zip(books, counts, strict=True))

    every = itertools.product(range(9), repeat=len(names))
    best = max(total(counts) for counts in every if sum(counts) <= POOL)
    return Hour(changes, total(tuple(len(state.assigned.get(key, ())) for key in books)) / best)


@pytest.mark.parametrize("cost_s", [0.2, 2.0])
@pytest.mark.parametrize(
    "names",
    [names for count in (1, 2, 3) for names in itertools.combinations_with_replacement(TRUTH, count)],
    ids="+".join,
)
def test_trainers_of_which_nothing_is_known_end_up_well_allocated(names: tuple[str, ...], cost_s: float) -> None:
    hours = [an_hour(names, cost_s, seed) for seed in range(3)]
    assert min(hour.share for hour in hours) > 0.97
    assert max(hour.changes for hour in hours) <= 4 * len(names) + 2  # the tries, and no more
    assert sum(hour.changes for hour in hours) / len(hours) <= 2 * len(names) + 3


def test_decisions_at_any_time_do_not_flap_either() -> None:
    hour = an_hour(("amdahl", "saturating", "peaked"), 0.2, 1, always=True)
    assert hour.share > 0.97
    assert hour.changes <= 10


def test_the_parts_of_pauses_are_medians_and_survive_a_restart() -> None:
    learned = Learned()
    learned.rescaled("up", 0.5, 0.2, 0.3)  # a worker of an older version
    assert learned.pause_parts() == {}
    for send_s in (0.5, 0.1, 0.2):
        learned.rescaled("up", 1.0, 0.2, 0.6, {"wait": 0.2, "form": 0.2, "send": send_s, "unknown": 9.0})
    restored = Learned.from_json(json.loads(json.dumps(learned.as_json())))
    parts = {"wait": 0.2, "form": 0.2, "catch_up": 0.0, "copy": 0.0, "send": 0.2}
    assert restored.pause_parts() == learned.pause_parts() == parts
    assert restored.pauses() == learned.pauses()
    former = Learned.from_json({"pauses": {"up": [[0.5, 0.2, 0.3]], "down": []}})
    assert (former.up_s, former.pause_parts()) == (0.5, {})


def test_the_parts_of_starts_are_medians_and_survive_a_restart() -> None:
    learned = Learned()
    assert learned.start_parts() == {}
    for imports_s in (9.0, 1.0, 2.0):
        learned.first_step({"imports": imports_s, "first_step": 0.5, "unknown": 7.0})
    restored = Learned.from_json(json.loads(json.dumps(learned.as_json())))
    parts = restored.start_parts()
    assert (parts["imports"], parts["first_step"], parts["build"]) == (2.0, 0.5, 0.0)
    assert "unknown" not in parts
    assert Learned.from_json({"starts": [1.0]}).start_parts() == {}
