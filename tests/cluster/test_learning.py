"""What is learned of a trainer, how trainers of a script share it, and whether the scheduler decides well with it."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest

from bftrainer.cluster.config.keys import UNMEASURED_S
from bftrainer.cluster.jobs.learning import Learned, Prior, stay_of
from bftrainer.core.curve import Curve
from bftrainer.core.pool import Event
from bftrainer.core.trainer import Trainer
from bftrainer.learning.rates import Stay
from bftrainer.learning.trials import ScriptBelief
from bftrainer.scheduler import Policy, Scheduler, State


def report(learned: Learned, generation: int, size: int, rate: float, windows: int = 9) -> bool:
    return learned.reported(generation, {size: rate}, stay_of(size, windows, rate, 0.0))


def test_a_worker_that_has_measured_nothing_in_this_generation_is_no_news() -> None:
    assert stay_of(2, 0, 0.0, 0.0) is None
    for nodes, rate in ((0, 7.0), (2, math.nan), (2, -1.0), (1 << 40, 7.0)):
        assert stay_of(nodes, 3, rate, 0.0) is None
    learned = Learned()
    assert not learned.reported(1, {2: 100.0, 4: math.nan, 0: 3.0}, None)
    assert learned.measured == {2: 100.0}
    assert learned.estimate(1, 8) is None


def test_a_worker_of_an_earlier_version_counts_with_the_usual_noise() -> None:
    stay = stay_of(4, 500, 100.0, None)
    assert stay is not None
    assert stay.windows == 61
    assert stay.scatter > 0


def test_trainers_of_a_script_share_rates_and_costs_but_not_their_own_figures() -> None:
    script = ScriptBelief()
    first, second = (Learned(None, name=name, script=script) for name in ("t1", "t2"))
    assert report(first, 1, 4, 400.0)
    first.rescaled("up", 0.3, 0.2, 0.1)
    first.started(7.0)
    assert second.curve(1, 8, 1.0).rate(4) == pytest.approx(400, rel=0.01)
    assert (second.up_s, second.down_s, second.start_s) == (0.3, UNMEASURED_S, 7.0)
    assert (second.measured, second.pauses()["count"]) == ({}, 0)
    assert (first.measured, first.pauses()["count"]) == ({4: 400.0}, 1)


def test_the_scheduler_is_told_only_what_makes_a_difference() -> None:
    script = ScriptBelief()
    first, second = (Learned(None, name=name, script=script) for name in ("t1", "t2"))
    report(first, 1, 4, 400.0)
    told = Trainer("t2", second.curve(1, 8, 1.0), 1, 8, second.up_s, second.down_s, start_s=second.start_s)
    assert not second.has_news(told)
    report(first, 2, 4, 400.01)
    assert not second.has_news(told)
    report(first, 3, 8, 400.0)
    assert second.has_news(told)


def test_costs_are_defaults_or_priors_until_they_are_measured() -> None:
    assert (Learned().up_s, Learned().down_s) == (UNMEASURED_S, UNMEASURED_S)
    assert (Learned(None, 3.0, 4.0).up_s, Learned(None, 3.0, 4.0).down_s) == (3.0, 4.0)
    learned = Learned(Prior(up_s=18.0, down_s=12.0))
    learned.rescaled("up", 0.3, 0.2, 0.1)
    assert (learned.up_s, learned.down_s) == (0.3, 12.0)


def test_a_users_curve_is_that_of_the_script() -> None:
    script, prior = ScriptBelief(), Curve.through([1, 8], [10, 20])
    Learned(Prior(prior), script=script)
    assert Learned(None, name="t2", script=script).curve(1, 8, 1.0).rate(8) == pytest.approx(20)


def test_all_of_it_survives_a_restart() -> None:
    learned = Learned(Prior(Curve.through([1, 8], [10, 20])), 10.0, 11.0, name="t1")
    report(learned, 1, 1, 100.0)
    report(learned, 2, 4, 300.0)
    learned.rescaled("up", 0.3, 0.2, 0.1)
    learned.first_step({"imports": 2.0})
    text = json.dumps(learned.as_json())
    again = Learned.from_json(json.loads(text), learned.prior, name="t1", script=learned.script)
    assert json.dumps(again.as_json()) == text
    assert again.curve(1, 8, 1.0) == learned.curve(1, 8, 1.0)
    assert (again.measured, again.pauses(), again.start_parts()) == (
        learned.measured,
        learned.pauses(),
        learned.start_parts(),
    )
    assert again.down_s == 11.0


def test_a_trainer_whose_script_was_forgotten_has_what_it_measured_itself() -> None:
    stored = {"in_use": {"2": 200.0, "4": 390.0}, "reports": {"4": [390.0] * 31}, "starts": [3.0]}
    learned = Learned.from_json(stored, Prior(up_s=3.0), name="t1")
    assert learned.curve(1, 8, 1.0).rate(4) == pytest.approx(390, rel=0.02)
    assert (learned.up_s, learned.down_s, learned.start_s) == (3.0, UNMEASURED_S, 3.0)
    assert Learned.from_json({}).measured == {}


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


def an_hour(names: tuple[str, ...], cost_s: float, seed: int) -> Hour:
    """Scripts of which nothing is known, on a pool that loses a node now and then, with a noisy window each second."""
    rng, scheduler = random.Random(seed), Scheduler(Policy(horizon_s=120.0))
    books = {f"{name}-{number}": Learned(name=f"{name}-{number}") for number, name in enumerate(names)}
    truth = {key: TRUTH[key.split("-")[0]] for key in books}
    stays: dict[str, tuple[int, int, Stay | None]] = dict.fromkeys(books, (0, 0, None))
    state, _ = State().pool_changed(Event(0.0, tuple(f"n{i}" for i in range(POOL))))

    def trainers() -> dict[str, Trainer]:
        usual = max((book.script.best_rate_per_node for book in books.values()), default=0.0) or 1.0
        return {
            key: Trainer(key, book.curve(1, 8, usual), 1, 8, book.up_s, book.down_s, submit=float(number))
            for number, (key, book) in enumerate(books.items())
        }

    state = state.submitted(*trainers().values())
    news, changes = True, 0
    for second in range(3600):
        if second % 300 == 299:  # a node goes for half a minute
            state, _ = state.pool_changed(Event(float(second), left=("n0",)))
            news = True
        if second >= 300 and second % 300 == 29:
            state, _ = state.pool_changed(Event(float(second), joined=("n0",)))
            news = True
        for key, book in books.items():
            generation, since, stay = stays[key]
            size = len(state.assigned.get(key, ()))
            if size and second - since >= 5:
                rate = truth[key](size) * rng.uniform(0.95, 1.05)
                stay = stay.then(rate) if stay is not None and stay.size == size else Stay.first(size, rate)
                stays[key] = generation, since, stay
                news |= book.reported(generation, {size: rate}, stay)
        if not news:
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
            stays[change.trainer] = stays[change.trainer][0] + 1, second, None
            if change.before and change.after:
                kind = "up" if change.after > change.before else "down"
                books[change.trainer].rescaled(kind, cost_s, cost_s / 2, cost_s / 4)  # type: ignore[arg-type]

    def total(counts: tuple[int, ...]) -> float:
        return sum(truth[key](n) if n else 0.0 for key, n in zip(books, counts, strict=True))

    every = itertools.product(range(9), repeat=len(names))
    best = max(total(counts) for counts in every if sum(counts) <= len(state.pool))
    return Hour(changes, total(tuple(len(state.assigned.get(key, ())) for key in books)) / best)


@pytest.mark.parametrize("cost_s", [0.2, 2.0])
@pytest.mark.parametrize(
    "names",
    [names for count in (2, 3) for names in itertools.combinations_with_replacement(TRUTH, count)],
    ids="+".join,
)
def test_scripts_of_which_nothing_is_known_end_up_well_allocated(names: tuple[str, ...], cost_s: float) -> None:
    hour = an_hour(names, cost_s, 1)
    assert hour.share > 0.88
    assert hour.changes <= 11 * 2 + 4 * len(names) + 4  # a node that goes and comes, and the beginning


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
