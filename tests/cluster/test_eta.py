"""Finishing times in the live system: the budget, beliefs, the past from the log, and the process that predicts."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.cluster.config.keys import Config, EtaSettings, PolicySettings
from bftrainer.cluster.eta.beliefs import (
    GIVEN,
    HARDLY_MEASURED,
    MEASURED,
    NO_RATE,
    NO_TOTAL,
    OTHER_RUN,
    STILL_MEASURED,
    ScriptRun,
    believe,
)
from bftrainer.cluster.eta.budget import MOST_DEBT_S, MOST_SAVED_S, CpuBudget
from bftrainer.cluster.eta.question import AskedTrainer, PredictorSettings, Question
from bftrainer.cluster.eta.records import PoolLog, has_ended, read_trainers
from bftrainer.cluster.eta.service import EtaService, NoPredictionError, Predictions
from bftrainer.cluster.eta.worker import Predictor
from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.events import NodeJoined, NodeLeaving, NodeLeft, ServeStarted
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.core.pool import Pool
from bftrainer.learning.rates import Stay
from bftrainer.learning.trials import ScriptBelief
from bftrainer.scheduler import Scheduler, State
from support.cluster.api import SPEC, by, play
from support.cluster.bench import Bench
from support.waiting import wait_until

NOW = 1_800_000_000.0
SCRIPT = ("/home/ann/train.py", "/usr/bin/python3")


def asked(id_: str = "t1", **more: Any) -> AskedTrainer:
    return replace(AskedTrainer(id_, "ann", "", SCRIPT, (), 1, 4, 1.0, NOW - 60), **more)


def measured(trainer: str = "t1", windows: int = 9, rate: float = 10.0) -> ScriptBelief:
    """What is known of a script of which one trainer has measured its speed on one node."""
    script = ScriptBelief()
    script.rates.observe(trainer, 1, Stay(1, windows, math.log(rate)))
    return script


def question(*trainers: AskedTrainer, nodes: int = 2, **more: Any) -> Question:
    pool = {f"n{i}": NOW - 500 for i in range(nodes)}
    held = {trainers[0].id: tuple(pool)} if trainers else {}
    sets = {one.id: (one.id,) for one in trainers}
    return replace(Question(NOW, pool, trainers, tuple(held), held, sets=sets, futures=9), **more)


def made_store(folder: Path) -> Path:
    """A controller's database that knows how fast `SCRIPT` is."""
    with Store.open(folder / FILE) as store, store.transaction():
        store.log(NOW - 5000, ServeStarted("local"))
        store.beliefs.put(asked().belief, measured().as_json(), NOW)
    return folder / FILE


# The budget.


@given(st.lists(st.tuples(st.floats(0.0, 50.0), st.floats(0.0, 30.0)), max_size=30), st.floats(0.01, 1.0))
def test_predictions_never_use_more_than_their_share_and_a_constant(
    runs: list[tuple[float, float]], share: float
) -> None:
    budget, now, longest = CpuBudget(share, 0.0, 0.0), 0.0, 0.0
    for passed, cpu_s in runs:
        now += passed
        budget = budget.later(now)
        if budget.wait_s() == 0:
            budget, longest = budget.spend(cpu_s), max(longest, cpu_s)
        assert budget.spent_s <= share * now + longest + 1e-6


def test_saved_time_is_limited_and_debts_are_paid_first() -> None:
    budget = CpuBudget(0.1, 0.0, 0.0).later(1e6)
    assert budget.saved_s == MOST_SAVED_S
    budget = budget.spend(MOST_SAVED_S + 5.0)
    assert budget.wait_s() == pytest.approx(50.0)
    assert budget.wait_s(MOST_DEBT_S) == 0.0
    assert budget.later(1e6 + 50.0).wait_s() == pytest.approx(0.0, abs=1e-6)


def test_without_a_share_nothing_is_ever_computed() -> None:
    assert CpuBudget(0.0, -1.0, 0.0).later(1e9).wait_s() == float("inf")


# Beliefs.


def test_a_measured_trainer_is_believed_most() -> None:
    belief = believe(asked(total=1000, samples=400), measured(), (), NOW)
    assert (belief.why, belief.sigma, belief.trainer.work) == ("", MEASURED, 600.0)
    assert belief.trainer.curve.rate(1) == pytest.approx(10.0, rel=1e-3)
    assert believe(asked(total=1000), measured(windows=2), (), NOW).sigma == HARDLY_MEASURED


def test_a_new_trainer_takes_speed_and_samples_from_earlier_runs_of_its_script() -> None:
    other = ScriptRun(("/elsewhere.py", ""), (), "", 7)
    run = ScriptRun(SCRIPT, (), "", 500)
    belief = believe(asked("t9"), measured(rate=20.0), (other, run), NOW)
    assert (belief.why, belief.sigma, belief.trainer.work) == ("", OTHER_RUN, 500.0)
    assert belief.trainer.curve.rate(1) == pytest.approx(20.0, rel=1e-3)


def test_the_samples_are_those_of_the_same_group_first() -> None:
    runs = [ScriptRun(SCRIPT, ("--epochs", "9"), group, total) for group, total in (("", 9), ("lr", 5))]
    assert believe(asked(group="lr"), measured(), runs, NOW).trainer.work == 5.0
    assert believe(asked(args=("--epochs", "9")), measured(), runs[:1], NOW).trainer.work == 9.0


def test_a_curve_of_the_user_is_enough() -> None:
    given = asked(curve={"nodes": [1, 4], "rates": [5.0, 18.0]}, total=100)
    belief = believe(given, ScriptBelief(), (), NOW)
    assert (belief.why, belief.sigma) == ("", GIVEN)
    assert believe(given, measured("t9"), (), NOW).sigma == OTHER_RUN


def test_without_a_speed_or_without_a_total_it_says_so() -> None:
    assert believe(asked(total=100), ScriptBelief(), (), NOW).why == NO_RATE
    assert believe(asked(total=100, samples=10), ScriptBelief(), (), NOW).why == STILL_MEASURED
    assert believe(asked(), measured(), (), NOW).why == NO_TOTAL


def test_costs_are_those_of_the_script_before_those_of_the_user() -> None:
    script = measured()
    script.costs.rescaled("up", 0.3)
    script.costs.started(7.0)
    trainer = believe(asked(total=9, up_s=5.0, down_s=6.0), script, (), NOW).trainer
    assert (trainer.up_s, trainer.down_s, trainer.start_s) == (0.3, 6.0, 7.0)


# The log.


def test_the_past_of_the_pool_is_read_from_the_log_and_later_only_what_is_new(tmp_path: Path) -> None:
    path = made_store(tmp_path)
    log = PoolLog()
    with Store.open(path) as store:
        for node in ("a", "b"):
            store.log(NOW - 1000, NodeJoined(node, "host", "x"))
        store.log(NOW - 400, NodeLeaving("a", 5.0))
        store.log(NOW - 395, NodeLeft("a", "taken"))
        db = Database.open(path, read_only=True)
        first = log.trace(db, NOW)
        assert first is not None
        assert [(one.node, one.end - NOW, one.open) for one in first.fragments()] == [
            ("a", -400, False),
            ("b", 0, True),
        ]
        assert first.window.start == NOW - 1000 + 60
        store.log(NOW + 50, NodeLeft("b", "lost"))
        second = log.trace(db, NOW + 100)
        db.close()
    assert second is not None
    assert {(one.node, one.end - NOW) for one in second.fragments()} == {("a", -400), ("b", 50)}


def test_earlier_trainers_are_read_with_their_samples(tmp_path: Path) -> None:
    path = made_store(tmp_path)
    with Store.open(path) as store:
        spec = {"script": "/home/ann/train.py", "python": "/usr/bin/python3", "cwd": "/home/ann"}
        row = store.add_trainer(name="a", owner="ann", spec=spec, time=NOW - 900, staged=None)
        assert not has_ended(path)
        store.update_trainer(row.id, state="done", samples=77, ended=NOW - 10)
    db = Database.open(path, read_only=True)
    found = read_trainers(db, NOW)
    db.close()
    assert has_ended(path)
    assert [(run.script, run.total) for run in found.runs] == [(SCRIPT, 77)]
    assert found.since == NOW - 5000


# The process.


def predictor(path: Path, profile: str = "steady") -> Predictor:
    return Predictor(path, PredictorSettings(PolicySettings(), 30.0, profile))


def test_an_answer_has_a_time_an_interval_and_the_probability_of_the_deadline(tmp_path: Path) -> None:
    soon = asked(total=2000, min_nodes=2, deadline=NOW + 500)
    late = replace(soon, id="t2", deadline=NOW + 5.0)
    answer = predictor(made_store(tmp_path)).answer(question(soon, late))
    first, second = answer["sets"]["t1"], answer["sets"]["t2"]
    assert NOW < first["low"] <= first["point"] <= first["high"] < NOW + 300
    assert (first["likely"], second["likely"]) == (1.0, 0.0)
    assert answer["futures"] == 9
    assert "if nothing else is submitted" in answer["basis"]


def test_a_question_survives_its_line_of_json(tmp_path: Path) -> None:
    before = question(asked(total=2000, args=("--lr", "1")))
    after = Question.from_line(before.as_line())
    assert after.trainers == before.trainers
    assert predictor(made_store(tmp_path)).answer(after)["sets"]["t1"]["why"] == ""


def test_a_group_with_one_unknown_trainer_says_why_it_has_no_time(tmp_path: Path) -> None:
    both = question(asked(total=2000), asked("t2", script=("/x.py", "")), sets={"lr": ("t1", "t2")})
    assert NO_RATE in predictor(made_store(tmp_path)).answer(both)["sets"]["lr"]["why"]


def test_a_trainer_whose_owner_may_not_have_the_nodes_it_needs_has_no_time(tmp_path: Path) -> None:
    held, waiting = asked(total=2000), replace(asked("t2", total=2000, min_nodes=2), owner="bob")
    script = replace(waiting, owner="bob").belief
    with Store.open(made_store(tmp_path)) as store, store.transaction():
        store.beliefs.put(script, measured("t2").as_json(), NOW)
    for most, why in ((0, "0 nodes at present, and it needs at least 2"), (1, "1 node at present"), (2, "")):
        both = question(held, waiting, quotas={"bob": {"max_nodes": most}})
        sets = predictor(tmp_path / FILE).answer(both)["sets"]
        assert sets["t1"]["why"] == ""
        assert why in sets["t2"]["why"]
        assert bool(sets["t2"].get("point")) == (not why)


def test_a_short_past_is_replaced_by_a_profile(tmp_path: Path) -> None:
    one = question(asked(total=100))
    answer = predictor(made_store(tmp_path), "summit").answer(replace(one, futures=2))
    assert "like summit" in answer["basis"]
    assert answer["sets"]["t1"]["low"] > NOW


def test_a_short_past_in_which_nodes_left_is_used_in_place_of_a_steady_pool(tmp_path: Path) -> None:
    path = made_store(tmp_path)
    with Store.open(path) as store:
        for i in range(8):
            store.log(NOW - 900 + 100 * i, NodeJoined("n0", "host", "x"))
            store.log(NOW - 850 + 100 * i, NodeLeft("n0", "taken"))
        store.log(NOW - 60, NodeJoined("n0", "host", "x"))
    answer = predictor(path).answer(question(asked(total=2000), nodes=1))
    assert answer["basis"].startswith("as in the last 14 minutes of this pool")
    assert answer["sets"]["t1"]["high"] > answer["sets"]["t1"]["low"] + 50


def test_with_other_sizes_a_trainer_keeps_only_nodes_that_it_may_have() -> None:
    before = question(asked())
    assert before.with_sizes(["t1"], 1, 1).assigned == {"t1": ("n0",)}
    assert before.with_sizes(["t1"], 3, 9).assigned == {}


# The service.


def cluster(*trainers: Any) -> Any:
    live = {one.id: one for one in trainers}
    planner = SimpleNamespace(state=State(Pool({"n0": NOW - 50})), scheduler=Scheduler())
    return SimpleNamespace(planner=planner, paused=False, trainers=live)


@pytest.mark.waits
def test_the_service_answers_survives_the_death_of_its_process_and_counts_its_time(tmp_path: Path) -> None:
    path = made_store(tmp_path)
    one = question(asked(total=2000))

    async def scenario() -> None:
        service = EtaService(path, Config(), cluster())
        try:
            assert (await service.ask(one)).sets["t1"]["why"] == ""
            assert service.budget.spent_s > 0
            process = service._process
            assert process is not None
            assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            assert (await service.ask(one)).sets["t1"]["why"] == ""
            assert service._process is not None
            assert service._process.pid != process.pid
        finally:
            await service._end()

    asyncio.run(scenario())


def test_a_budget_that_is_used_up_is_told_and_nothing_is_started(tmp_path: Path) -> None:
    async def scenario() -> None:
        service = EtaService(made_store(tmp_path), Config(), cluster())
        service.budget = service.budget.spend(1000.0)
        with pytest.raises(NoPredictionError, match="share of a core .* again in"):
            await service.ask(question(asked()))
        off = EtaService(tmp_path / FILE, Config(eta=EtaSettings(cpu_share=0.0)), cluster())
        with pytest.raises(NoPredictionError, match="switched off"):
            await off.ask(question(asked()))
        await off.keep()  # it ends at once
        assert service._process is None
        assert off._process is None

    asyncio.run(scenario())


def test_a_new_controller_needs_no_process_to_say_that_nothing_is_known(tmp_path: Path) -> None:
    from bftrainer.cluster.spec.trainer import TrainerSpec

    async def scenario() -> None:
        service = EtaService(made_store(tmp_path), Config(), cluster())
        found = await service.what_if([], [TrainerSpec(script="train.py", name="a")], None, "ann")
        assert found["eta"]["why"] == NO_RATE
        assert list(found["trainers"]) == ["a"]
        assert service._process is None

    asyncio.run(scenario())


@pytest.mark.waits
def test_the_process_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    path = made_store(tmp_path)
    code = (
        "import asyncio\nfrom types import SimpleNamespace\nfrom pathlib import Path\n"
        "from bftrainer.cluster.config.keys import Config\nfrom bftrainer.cluster.eta.service import EtaService\n"
        "async def main():\n"
        f"    service = EtaService(Path({str(path)!r}), Config(), SimpleNamespace(trainers={{}}))\n"
        "    process = await service._started()\n"
        "    print(process.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    stat = Path(f"/proc/{child}/stat")
    wait_until(lambda: not stat.exists() or stat.read_text().split()[2] == "Z")


# The API.


def test_the_api_says_when_trainers_are_done_or_why_that_is_not_known(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        mine = by(tokens, "ann")
        made = await client.post("/v1/trainers", json={**SPEC, "name": "a", "deadline": NOW}, headers=mine)
        assert (made.json()["deadline"], made.json()["eta"]) == (NOW, None)
        answer = await client.post("/v1/eta", json={"trainers": ["a"]}, headers=mine)
        assert answer.status_code == 200
        assert (answer.json()["eta"]["why"], answer.json()["eta"]["deadline"]) == (NO_RATE, NOW)
        what_if = await client.post("/v1/eta", json={"specs": [{**SPEC, "name": "b"}], "nodes": "1-2"}, headers=mine)
        assert list(what_if.json()["trainers"]) == ["b"]
        assert [row["name"] for row in (await client.get("/v1/trainers", headers=mine)).json()["trainers"]] == ["a"]
        refused = [
            ({"trainers": ["a"]}, "bob", 404, "no trainer"),
            ({"trainers": ["a"], "nodes": "8-1"}, "ann", 422, "nodes must be"),
            ({"specs": [{"nodes": 1}]}, "ann", 422, "script"),
            ({"group": "lr"}, "ann", 409, "unfinished"),
            ({"trainer": ["a"]}, "ann", 422, "trainer"),
        ]
        for body, owner, status, words in refused:
            answer = await client.post("/v1/eta", json=body, headers=by(tokens, owner))
            assert (answer.status_code, words in answer.json()["error"]) == (status, True), answer.json()

    play(tmp_path, scene)


def test_the_status_has_the_newest_prediction_of_trainers_and_groups(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        mine = by(tokens, "ann")
        await client.post("/v1/trainers", json={**SPEC, "name": "a", "group": "lr"}, headers=mine)
        service = client._transport.app.state.api.controller.eta  # type: ignore[attr-defined]
        found = {"point": NOW, "low": NOW - 1, "high": NOW + 1, "why": "", "likely": None}
        service.newest = Predictions(NOW, "as ever", 9, {"t1": found, "ann/lr": found})
        status = (await client.get("/v1/status", headers=mine)).json()
        assert status["trainers"][0]["eta"]["high"] == NOW + 1
        assert [(one["group"], one["eta"]["futures"]) for one in status["groups"]] == [("lr", 9)]
        assert (await client.get("/v1/status", headers=by(tokens, "bob"))).json()["groups"] == []
        await client.post("/v1/trainers/a/cancel", headers=mine)
        assert (await client.get("/v1/trainers/a", headers=mine)).json()["eta"] is None

    play(tmp_path, scene)
