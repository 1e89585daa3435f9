"""What a trainer reports, when that is worth a decision, and what it gets from its script's belief."""

from __future__ import annotations

import json

import pytest

from bftrainer.core.curve import Curve
from bftrainer.learning.costs import MeasuredCosts
from bftrainer.learning.rates import Stay
from bftrainer.learning.trials import AssumedCosts, ScriptBelief, TrialLearning


def trial(name: str = "a", script: ScriptBelief | None = None) -> TrialLearning:
    return TrialLearning(name, script or ScriptBelief(), AssumedCosts(1.0, 2.0))


def report(of: TrialLearning, number: int, size: int, rate: float, windows: int) -> list[bool]:
    found, wanted = Stay.first(size, rate), []
    for _ in range(windows):
        wanted.append(of.reported(number, found))
        found = found.then(rate)
    return wanted


def test_the_first_report_and_the_third_of_each_stay_are_worth_a_decision() -> None:
    first = trial()
    assert report(first, 1, 4, 100.0, 5) == [True, False, True, False, False]
    assert report(first, 2, 8, 190.0, 5) == [False, False, True, False, False]
    assert report(first, 3, 4, 100.0, 2) == [False, False]


def test_what_was_said_before_and_what_is_late_is_no_news() -> None:
    first = trial()
    assert first.reported(2, Stay(4, 3, 1.0))
    assert not first.reported(2, Stay(4, 3, 1.0))
    assert not first.reported(1, Stay(8, 9, 1.0))
    assert list(first.script.rates.measured()) == [4]


def test_with_nothing_known_of_its_script_a_trainer_is_guessed_above_the_others() -> None:
    curve = trial().curve(2, 8, 10.0)
    assert curve.rate(2) == pytest.approx(2 * 10 * 2)
    assert curve.rate(8) == pytest.approx(2 * curve.rate(2))


def test_trials_of_a_script_know_what_the_others_have_measured() -> None:
    script = ScriptBelief()
    first, second = trial("a", script), trial("b", script)
    report(first, 1, 4, 400.0, 3)
    first.rescaled("up", 0.3)
    first.started(12.0)
    first.ended()
    assert second.curve(1, 8, 1.0).rate(4) == pytest.approx(400, rel=0.01)
    assert (second.up_s, second.down_s, second.start_s) == (0.3, 2.0, 12.0)


def test_a_curve_is_the_same_object_until_something_is_learned() -> None:
    first = trial()
    report(first, 1, 4, 400.0, 3)
    curve = first.curve(1, 64, 1.0)
    assert first.curve(1, 64, 1.0) is curve
    report(first, 2, 8, 700.0, 1)
    assert first.curve(1, 64, 1.0) is not curve


def test_the_best_rate_per_node_is_what_newcomers_are_compared_with() -> None:
    script = ScriptBelief()
    assert script.best_rate_per_node == 0
    report(trial("a", script), 1, 4, 400.0, 3)
    assert script.best_rate_per_node == pytest.approx(100)


def test_costs_are_medians_of_the_last_and_survive_a_restart() -> None:
    costs = MeasuredCosts()
    assert (costs.pause_s("up"), costs.start_s, costs.pauses()["median_s"]) == (None, None, None)
    for pause_s in (*[5.0] * 20, 0.1, 0.2, 0.3, 0.4, 30.0, 0.2, 0.2, 0.2, 0.2):
        costs.rescaled("down", pause_s, pause_s / 2, pause_s / 4)
    costs.rescaled("up", float("nan"))
    costs.first_step({"imports": 2.0, "unknown": 7.0})
    costs.started(3.0)
    again = MeasuredCosts.from_json(json.loads(json.dumps(costs.as_json())))
    assert (again.pause_s("down"), again.pause_s("up"), again.start_s) == (0.2, None, 3.0)
    assert again.pauses() == {"count": 30, "median_s": 0.2, "pause_s": 0.2, "form_s": 0.1, "sync_s": 0.05}
    assert again.start_parts()["imports"] == 2.0
    assert "unknown" not in again.start_parts()


def test_a_belief_survives_a_restart() -> None:
    script = ScriptBelief()
    script.rates.take_prior(Curve.amdahl(0.99, 10.0, 16))
    first = trial("a", script)
    report(first, 1, 4, 400.0, 3)
    first.rescaled("down", 0.7)
    again = ScriptBelief.from_json(json.loads(json.dumps(script.as_json())))
    assert trial("a", again).curve(1, 16, 1.0) == first.curve(1, 16, 1.0)
    assert again.costs.pause_s("down") == 0.7
