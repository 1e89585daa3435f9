"""Beliefs of scripts in the live system: shared by trainers, stored, taken up from earlier versions, forgotten."""

from __future__ import annotations

import math
from pathlib import Path

import httpx
import pytest

from bftrainer.cluster.http import views
from bftrainer.cluster.jobs.beliefs import belief_key
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.scripts.beliefs import MOST_BELIEFS, BeliefKey
from bftrainer.cluster.store.store import Store
from bftrainer.core.curve import Curve
from bftrainer.elastic.torch.rates import Meter
from bftrainer.learning.rates import RateBelief, Stay
from bftrainer.learning.trials import ScriptBelief
from support.cluster.api import by, play
from support.cluster.bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


KEY = BeliefKey("someone", "/train.py", "python3", "")


def measure(bench: Bench, trainer: str, rate_per_node: float = 100.0) -> None:
    """Let a trainer report, as the workers of this version do."""
    bench.now += 5
    nodes = len(bench.members(trainer))
    stay = {"stay_windows": 9, "stay_rate": nodes * rate_per_node, "stay_scatter": 0.001}
    bench.report(trainer, samples=int(bench.now), world=nodes, rates={str(nodes): nodes * rate_per_node}, **stay)
    bench.settle()


def rate_of(bench: Bench, trainer: str, nodes: int = 4) -> float:
    """What the scheduler was told of a trainer's rate."""
    known = bench.cluster.trainers[trainer].known
    assert known is not None
    return known.curve.rate(nodes)


def test_a_later_trainer_of_a_script_begins_with_what_was_learned(bench: Bench) -> None:
    first = bench.submit("1-8")
    bench.join("n1", "n2", "n3", "n4")
    measure(bench, first)
    bench.finish(first)
    bench.settle()
    later, other = bench.submit("1-8"), bench.submit("1-8", script="/other.py")
    assert rate_of(bench, later) == pytest.approx(400, rel=0.05)
    assert 100 < rate_of(bench, later, 1) < 200  # fewer nodes are expected to be faster each
    assert rate_of(bench, other, 1) == pytest.approx(200)  # guessed: twice as fast as the others


def test_trials_that_run_at_the_same_time_learn_from_each_other(bench: Bench) -> None:
    first, second = bench.submit("1-8"), bench.submit("1-8")
    bench.join("n1", "n2", "n3", "n4")
    measure(bench, first)
    bench.decide()
    at = len(bench.members(first))
    assert rate_of(bench, second, at) == pytest.approx(100 * at, rel=0.05)
    assert bench.cluster.trainers[second].learned.measured == {}


def test_models_and_owners_have_beliefs_of_their_own() -> None:
    plain = TrainerSpec.model_validate({"script": "/train.py", "nodes": "1-8"})
    named = TrainerSpec.model_validate({"script": "/train.py", "nodes": "1-8", "model": "large"})
    assert len({belief_key("a", plain), belief_key("b", plain), belief_key("a", named)}) == 3


def test_a_belief_survives_a_restart_of_the_controller(bench: Bench) -> None:
    trainer = bench.submit("1-8")
    bench.join("n1", "n2")
    measure(bench, trainer, 100.0)
    before = rate_of(bench, trainer)
    bench.now += 10
    bench.finish(trainer)
    bench.settle()
    bench.restart("n1", "n2")
    again = bench.submit("1-8")
    assert rate_of(bench, again) == pytest.approx(before, rel=0.05)


def test_what_trainers_of_an_earlier_version_measured_becomes_part_of_the_beliefs(bench: Bench) -> None:
    done = bench.submit("1-8")
    bench.join("n1")
    bench.finish(done)
    bench.settle()
    # What version 0.1.0 stored, in a state without beliefs.
    old = {"in_use": {"1": 100.0, "4": 380.0}, "reports": {"4": [380.0] * 31}, "starts": [9.0, 11.0]}
    bench.store.update_trainer(done, learned=old)
    bench.store._db.run("DELETE FROM beliefs")
    bench.store.forget("beliefs.taken_up")
    bench.restart("n1")
    trainer = bench.submit("1-8")
    known = bench.cluster.trainers[trainer].known
    assert known is not None
    assert known.curve.rate(4) == pytest.approx(380, rel=0.03)
    assert known.start_s == 10.0
    bench.restart("n1")
    learned = bench.cluster.trainers[trainer].learned
    assert len(learned.script.rates.stays()) == 2  # they are taken up once


def test_only_the_newest_beliefs_are_kept(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s.db") as store, store.transaction():
        for number in range(MOST_BELIEFS + 5):
            store.beliefs.put(KEY._replace(script=f"/{number}.py"), {}, float(number))
        kept = store.beliefs.all()
    assert len(kept) == MOST_BELIEFS
    assert kept[0].key.script == f"/{MOST_BELIEFS + 4}.py"


def test_a_worker_says_what_it_measured_in_its_present_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter()
    clock = iter(range(10_000))
    monkeypatch.setattr("bftrainer.elastic.torch.rates.time.perf_counter", lambda: float(next(clock)))
    meter.formed(1, 2)
    assert meter.stay() == (0, 0.0, 0.0)
    for _ in range(40):
        meter.stepped(10)
        meter.look()
    windows, rate, scatter = meter.stay()
    assert windows > 3
    assert rate == pytest.approx(10)
    assert scatter == pytest.approx(0)
    meter.formed(2, 4)
    assert meter.stay() == (0, 0.0, 0.0)


def test_a_trainer_is_shown_with_the_band_of_its_curve_and_the_stays_of_its_script(bench: Bench) -> None:
    first, second = bench.submit("1-8"), bench.submit("1-8")
    bench.join("n1", "n2", "n3", "n4")
    measure(bench, first)
    row = bench.store.trainer(second)
    assert row is not None
    curve = views.trainer_in_detail(row, bench.cluster.trainers[second], bench.now, [])["curve"]
    assert len(curve["low"]) == len(curve["high"]) == len(curve["nodes"])
    ends = zip(curve["low"], curve["rates"], curve["high"], strict=True)
    assert all(low < rate < high for low, rate, high in list(ends)[1:])
    assert list(curve["stays"]) == [str(len(bench.members(first)))]


def test_users_see_and_forget_what_was_learned_of_their_own_scripts_and_admins_of_all(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        script = ScriptBelief(RateBelief(Curve.through([1, 8], [100, 700])))
        script.rates.observe("t1", 1, Stay(4, 9, math.log(95.0), 0.001))
        script.costs.rescaled("up", 0.25)
        with bench.store.transaction():
            for owner in ("ann", "bob"):
                bench.store.beliefs.put(KEY._replace(owner=owner), script.as_json(), 5.0)

        async def seen(name: str) -> list[str]:
            answer = await client.get("/v1/curves", headers=by(tokens, name))
            return [f"{row['id']} {row['owner']}" for row in answer.json()["curves"]]

        assert [await seen(name) for name in ("ann", "bob", "root")] == [["c1 ann"], ["c2 bob"], ["c2 bob", "c1 ann"]]
        found = (await client.get("/v1/curves/c1", headers=by(tokens, "ann"))).json()
        assert (found["script"], found["sizes"], found["is_given"], found["up_s"]) == ("/train.py", [4], True, 0.25)
        curve = found["curve"]
        assert curve["nodes"] == list(range(9))
        assert curve["low"][4] < curve["rates"][4] < curve["high"][4]
        assert curve["rates"][4] == pytest.approx(380, rel=0.01)
        for method, name, ref, status in (
            ("GET", "bob", "c1", 404),
            ("DELETE", "bob", "c1", 404),
            ("GET", "ann", "c9", 404),
            ("GET", "ann", "t1", 422),
            ("DELETE", "ann", "c1", 200),
            ("DELETE", "root", "c2", 200),
            ("DELETE", "root", "c2", 404),
        ):
            answer = await client.request(method, f"/v1/curves/{ref}", headers=by(tokens, name))
            assert answer.status_code == status, (method, name, ref)
        assert await seen("root") == []

    play(tmp_path, scene)


def test_a_forgotten_script_is_measured_anew_by_the_trainers_that_run(bench: Bench) -> None:
    trainer = bench.submit("1-8")
    bench.join("n1", "n2")
    measure(bench, trainer, 100.0)
    live = bench.cluster.trainers[trainer]
    key = belief_key(live.owner, live.spec)
    with bench.store.transaction():
        bench.cluster.planner.beliefs.forget(key)
    assert bench.store.beliefs.all() == []
    bench.decide()
    assert not live.learned.script.rates.is_known
    measure(bench, trainer, 50.0)
    bench.decide()
    assert rate_of(bench, trainer, 2) == pytest.approx(100, rel=0.05)
    bench.now += 20
    measure(bench, trainer, 50.0)
    assert [row.key for row in bench.store.beliefs.all()] == [key]
