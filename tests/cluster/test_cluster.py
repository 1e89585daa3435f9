"""What the controller makes of nodes that come and go, trainers and its own death, without processes or sockets."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.cluster.controller.active import ControllerSettings
from bftrainer.cluster.jobs.worker import JobSettings
from bftrainer.cluster.report.rerun import KINDS, check
from bftrainer.cluster.wire.messages import Heard
from bftrainer.elastic.protocol import Broken, Done, Failed, Formed, Leaving
from bftrainer.errors import InputError
from support.cluster.bench import Bench
from support.examples import examples


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_trainer_starts_when_a_node_joins_and_grows_with_the_pool(bench: Bench) -> None:
    trainer = bench.submit()
    assert bench.state(trainer) == "queued"
    bench.join("n1")
    assert bench.state(trainer) == "running"
    assert bench.nodes_of(trainer) == {"n1"}
    bench.join("n2", "n3")
    assert bench.nodes_of(trainer) == {"n1", "n2", "n3"}


def test_a_lost_node_costs_a_new_generation_of_the_others_and_no_failure(bench: Bench) -> None:
    trainer = bench.submit()
    bench.join("n1", "n2", "n3")
    bench.take("n2")
    assert bench.state(trainer) == "running"
    assert bench.nodes_of(trainer) == {"n1", "n3"}
    row = bench.store.trainer(trainer)
    assert row is not None
    assert (row.preemptions, row.failures) == (1, 0)
    assert [e.data["why"] for e in bench.store.events(kind="rescale")][-1] == "preempt"


def test_a_trainer_without_nodes_waits_and_goes_on_later(bench: Bench) -> None:
    trainer = bench.submit()
    bench.join("n1")
    bench.take("n1")
    assert bench.state(trainer) == "waiting"
    bench.join("n4")
    assert bench.state(trainer) == "running"


def test_below_its_minimum_a_trainer_stops_until_there_are_enough(bench: Bench) -> None:
    trainer = bench.submit("2-4")
    bench.join("n1", "n2")
    assert bench.state(trainer) == "running"
    bench.take("n2")
    assert bench.state(trainer) == "waiting"
    bench.join("n3")
    assert bench.nodes_of(trainer) == {"n1", "n3"}


def test_when_all_are_done_the_trainer_is_and_its_nodes_serve_the_next(bench: Bench) -> None:
    first, second = bench.submit("2-2"), bench.submit("2-2")
    bench.join("n1", "n2")
    assert (bench.state(first), bench.state(second)) == ("running", "queued")
    bench.finish(first)
    assert (bench.state(first), bench.state(second)) == ("done", "running")


def test_done_is_only_what_a_clean_end_follows(bench: Bench) -> None:
    """The node is taken while the script says its last words: they are said again."""
    trainer = bench.submit("1-1")
    bench.join("n1")
    bench.say(bench.members(trainer)[0], Done(7))
    bench.take("n1")
    assert bench.state(trainer) == "waiting"
    bench.join("n2")
    bench.finish(trainer)
    assert bench.state(trainer) == "done"


def test_a_script_that_fails_after_training_has_failed(bench: Bench) -> None:
    trainer = bench.submit("1-1")
    bench.join("n1")
    worker = bench.members(trainer)[0]
    bench.say(worker, Done(7))
    bench.end(worker, 1, "cannot save the model")
    assert bench.state(trainer) == "failed"
    row = bench.store.trainer(trainer)
    assert row is not None
    assert "cannot save the model" in row.reason


def test_an_exception_of_the_script_is_the_trainers_failure_with_its_traceback(bench: Bench) -> None:
    trainer = bench.submit()
    bench.join("n1", "n2")
    bench.say(bench.members(trainer)[0], Failed("ValueError: no", "Traceback …"))
    bench.settle()
    row = bench.store.trainer(trainer)
    assert row is not None
    assert (row.state, row.traceback) == ("failed", "Traceback …")
    assert "ValueError: no" in row.error
    assert not [w for w in bench.workers.values() if w.status is None]


def test_a_script_that_ends_at_once_is_tried_again_with_back_off_then_fails_with_its_last_line(bench: Bench) -> None:
    bench.slow = True
    trainer = bench.submit("1-1", max_restarts=2)
    bench.join("n1")
    waits = []
    while bench.state(trainer) != "failed":
        (worker,) = [w.id for w in bench.workers.values() if w.status is None]
        bench.end(worker, 2, f"at {bench.now}\nerror at {bench.now}: unrecognised argument --foo")
        waited = 0
        while bench.state(trainer) != "failed" and not [w for w in bench.workers.values() if w.status is None]:
            bench.pass_time(0.5)
            waited += 1
        waits.append(waited)
    assert len(waits) == 3
    assert waits[1] > waits[0] > 0
    row = bench.store.trainer(trainer)
    assert row is not None
    assert "unrecognised argument --foo" in row.reason


@pytest.mark.parametrize(("others", "most"), [(False, 3), (True, 2)])
def test_a_script_that_ends_alike_before_it_joins_is_not_tried_for_long(bench: Bench, others: bool, most: int) -> None:
    bench.slow = True
    trainer = bench.submit("1-1", max_restarts=5)
    bench.join("n1")
    tries = 0
    while bench.state(trainer) != "failed" and tries < 6:
        (worker,) = [w.id for w in bench.workers.values() if w.status is None]
        bench.end(worker, 1, f"pid {tries}\nModuleNotFoundError: No module named 'numpyy'")
        tries += 1
        if others:  # on the next node it is the same
            bench.take(f"n{tries}")
            bench.join(f"n{tries + 1}")
        for _ in range(100):
            if bench.state(trainer) == "failed" or [w for w in bench.workers.values() if w.status is None]:
                break
            bench.pass_time(0.5)
    row = bench.store.trainer(trainer)
    assert row is not None
    assert (tries, row.failures) == (most, most)
    assert f"ModuleNotFoundError: No module named 'numpyy' ({most} times, before" in row.reason


def test_a_newcomer_that_ends_alike_does_not_end_those_who_train(bench: Bench) -> None:
    trainer = bench.submit("1-2")
    bench.join("n1")
    bench.slow = True
    bench.join("n2")
    for _ in range(3):
        for _ in range(100):
            if newcomers := [w.id for w in bench.workers.values() if w.status is None and not w.ready]:
                break
            bench.pass_time(0.5)
        bench.end(newcomers[0], 1, "OSError: no such disk")
        assert bench.state(trainer) in ("running", "rescaling")


def test_a_killed_worker_is_started_again_at_once_and_is_no_failure(bench: Bench) -> None:
    trainer = bench.submit("1-2")
    bench.join("n1", "n2")
    bench.end(bench.members(trainer)[0], -9)
    assert len(bench.members(trainer)) == 2
    row = bench.store.trainer(trainer)
    assert row is not None
    assert row.failures == 0


def test_a_cancelled_trainer_frees_its_nodes(bench: Bench) -> None:
    first = bench.submit()
    bench.join("n1", "n2")
    second = bench.submit("2-2", weight=0.1)
    with bench.store.transaction():
        bench.act(bench.cluster.cancel(first, "cancelled by me", bench.now))
    bench.settle()
    assert (bench.state(first), bench.state(second)) == ("cancelled", "running")


def test_newcomers_start_while_the_others_train_and_join_when_ready(bench: Bench) -> None:
    trainer = bench.submit()
    bench.join("n1")
    bench.slow = True
    bench.join("n2")
    assert bench.nodes_of(trainer) == {"n1"}
    assert bench.state(trainer) == "running"
    assert bench.started[-1].background
    bench.make_ready(bench.started[-1].worker)
    bench.settle()
    assert bench.nodes_of(trainer) == {"n1", "n2"}


def test_newcomers_that_are_ready_at_about_the_same_time_join_together(bench: Bench) -> None:
    trainer = bench.submit()
    bench.join("n1")
    bench.slow = True
    bench.join("n2", "n3", "n4")
    two, three, four = (start.worker for start in bench.started[-3:])
    bench.make_ready(two)
    bench.settle()
    assert bench.nodes_of(trainer) == {"n1"}
    bench.make_ready(three)
    bench.pass_time(0.2)  # the fourth is slow: nobody waits for it any longer
    assert bench.nodes_of(trainer) == {"n1", "n2", "n3"}
    bench.make_ready(four)
    bench.settle()
    assert bench.nodes_of(trainer) == {"n1", "n2", "n3", "n4"}
    assert [event.data["world"] for event in bench.store.events(kind="rescale")] == [1, 3, 4]


def test_a_node_that_goes_with_notice_is_left_at_a_step_boundary_and_dismissed(bench: Bench) -> None:
    trainer = bench.submit()
    bench.join("n1", "n2")
    with bench.store.transaction():
        bench.act(bench.cluster.leaving("n1", 5.0, bench.now))
    bench.settle()
    assert bench.dismissed == ["n1"]
    assert bench.nodes_of(trainer) == {"n2"}
    rescale = bench.store.events(kind="rescale")[-1].data
    assert (rescale["why"], rescale["world_before"], rescale["world"]) == ("shrink", 2, 1)


def test_a_worker_asked_to_end_from_outside_leaves_and_is_replaced(bench: Bench) -> None:
    trainer = bench.submit()
    bench.join("n1", "n2")
    worker = bench.members(trainer)[0]
    bench.say(worker, Leaving())
    bench.settle()
    assert worker not in bench.members(trainer)
    assert bench.nodes_of(trainer) == {"n1", "n2"}


def test_pausing_gives_all_nodes_back_and_resuming_takes_them_again(bench: Bench) -> None:
    trainer = bench.submit()
    bench.join("n1", "n2")
    with bench.store.transaction():
        bench.act(bench.cluster.pause(1.0, bench.now))
    bench.settle()
    assert sorted(bench.dismissed) == ["n1", "n2"]
    assert bench.state(trainer) == "waiting"
    bench.join("n3")
    assert "n3" in bench.dismissed
    with bench.store.transaction():
        bench.act(bench.cluster.resume(bench.now))
    bench.join("n1")
    assert bench.state(trainer) == "running"


def test_a_silent_agent_is_lost(bench: Bench) -> None:
    trainer = bench.submit()
    bench.join("n1", "n2")
    silent = bench.agents.pop("n2")
    for _ in range(12):
        bench.pass_time(1.0)
    assert bench.nodes_of(trainer) == {"n1"}
    bench.agents["n2"] = silent
    bench.rejoin("n2")  # it was only slow: its worker is ended, its node is welcome
    bench.settle()
    assert bench.nodes_of(trainer) == {"n1", "n2"}


def test_a_controller_that_was_away_itself_takes_nobody_for_silent(bench: Bench) -> None:
    bench.submit()
    bench.join("n1")
    bench.now += 60
    bench.cluster.was_away(60, bench.now)
    with bench.store.transaction():
        bench.act(bench.cluster.tick(bench.now))
    assert set(bench.cluster.nodes) == {"n1"}


def test_after_a_restart_training_goes_on_untouched(bench: Bench) -> None:
    trainer = bench.submit()
    bench.join("n1", "n2", "n3")
    members = bench.members(trainer)
    formed = {worker: bench.workers[worker].formed for worker in members}
    bench.restart()
    assert bench.members(trainer) == members
    assert {worker: bench.workers[worker].formed for worker in members} == formed
    assert bench.state(trainer) == "running"
    bench.take("n1")
    assert bench.nodes_of(trainer) == {"n2", "n3"}


def test_after_a_restart_an_agent_that_does_not_come_back_is_given_up(bench: Bench) -> None:
    trainer = bench.submit()
    bench.join("n1", "n2")
    bench.restart("n1")
    del bench.agents["n2"]
    assert bench.cluster.trainers[trainer].job.state == "running"  # nobody knows better yet
    for _ in range(20):
        bench.pass_time(1.0)
    assert bench.nodes_of(trainer) == {"n1"}
    assert bench.state(trainer) == "running"


def test_what_ended_while_there_was_no_controller_is_known_after_it(bench: Bench) -> None:
    first, second = bench.submit("1-1"), bench.submit("1-1")
    bench.join("n1", "n2")
    (a,), (b,) = bench.members(first), bench.members(second)
    bench.crash()
    bench.workers[a].over = bench.workers[a].done = True
    bench.workers[a].status = 0
    bench.workers[b].status = -9
    bench.open()
    for node in list(bench.agents):
        bench.rejoin(node)
    bench.settle()
    assert (bench.state(first), bench.state(second)) == ("done", "running")


def test_a_generation_that_was_announced_and_not_heard_is_made_anew(bench: Bench) -> None:
    trainer = bench.submit()
    bench.join("n1", "n2")
    bench.agents["n3"] = "agent-x"
    bench.rejoin("n3")
    bench.decide()
    bench.restart()  # the order to start a worker on n3 is lost
    assert bench.nodes_of(trainer) == {"n1", "n2", "n3"}
    generations = [bench.workers[worker].formed for worker in bench.members(trainer)]
    assert len(set(generations)) == 1


def test_news_that_come_while_others_are_awaited_count(bench: Bench) -> None:
    trainer = bench.submit()
    bench.join("n1", "n2")
    bench.crash()
    bench.open()
    bench.rejoin("n1")
    worker = next(w for w in bench.workers.values() if w.node == "n1")
    before = worker.formed
    bench.say(worker.id, Broken(worker.formed))
    bench.rejoin("n2")
    bench.settle()
    assert bench.state(trainer) == "running"
    assert {w.formed for w in bench.workers.values()} == {worker.formed}
    assert worker.formed > before


def test_a_trainer_of_which_nothing_is_known_ends_up_well_allocated(bench: Bench) -> None:
    """It scales to two nodes and no further; the other one takes the rest, once a node that went has shown it."""
    good, poor = bench.submit("1-8"), bench.submit("1-8", script="/poor.py")
    bench.join(*(f"n{i}" for i in range(1, 9)))
    for turn in range(60):
        bench.now += 10
        if turn == 10:
            gone = next(iter(bench.nodes_of(poor)))
            bench.take(gone)
        if turn == 12:
            bench.join(gone)
        for trainer, rate in ((good, lambda n: 100.0 * n), (poor, lambda n: 10.0 * min(n, 2) + 0.01 * n)):
            world = len(bench.members(trainer))
            if world:
                bench.report(trainer, samples=int(bench.now), rates={str(world): rate(world)})
        bench.settle()
    assert len(bench.members(poor)) <= 2
    assert len(bench.members(good)) >= 6
    changed = [e for e in bench.store.events(kind="decision", limit=1000) if e.data["changes"] and e.time > 1300]
    assert changed == []  # after five minutes all that is to be known is known


def test_progress_that_falls_back_to_a_snapshot_is_counted_as_done_again(bench: Bench) -> None:
    trainer = bench.submit("1-1")
    bench.join("n1")
    bench.report(trainer, samples=500, total=1000)
    bench.take("n1")
    bench.join("n2")
    bench.report(trainer, samples=400, total=1000, redone=16)
    progress = bench.cluster.trainers[trainer].job.progress
    assert (progress.samples, progress.redone) == (400, 116)


def test_a_dry_run_decides_and_starts_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ControllerSettings(dry_run=True))
    trainer = bench.submit()
    with bench.store.transaction():
        bench.act(bench.cluster.available("n1", bench.now))
        bench.act(bench.cluster.available("n1", bench.now))
        bench.act(bench.cluster.available("n2", bench.now))
    bench.settle()
    assert bench.started == []
    assert bench.store.events(kind="decision")[-1].data["nodes"] == {trainer: ["n1", "n2"]}


def test_two_unfinished_trainers_cannot_have_one_name(bench: Bench) -> None:
    bench.submit(name="resnet")
    with pytest.raises(InputError, match="resnet"):
        bench.submit(name="resnet")


def test_a_trainer_without_a_name_gets_one_that_is_free(bench: Bench) -> None:
    names = {bench.cluster.trainers[bench.submit()].name for _ in range(3)}
    assert names == {"train", "train-2", "train-3"}


def test_a_formed_generation_that_is_old_news_changes_nothing(bench: Bench) -> None:
    trainer = bench.submit()
    bench.join("n1", "n2")
    before = bench.store.events(kind="rescale")
    bench.say(bench.members(trainer)[0], Formed(1, 1, 9.0, 9.0, 9.0))
    assert bench.store.events(kind="rescale") == before


def test_cancelling_while_agents_are_awaited_reaches_their_workers_when_they_come(bench: Bench) -> None:
    trainer = bench.submit()
    bench.join("n1", "n2")
    bench.crash()
    bench.open()
    with bench.store.transaction():
        bench.act(bench.cluster.cancel(trainer, "", bench.now))
    bench.effects.messages.clear()  # nobody is connected yet
    for node in list(bench.agents):
        bench.rejoin(node)
    bench.settle()
    assert not [w for w in bench.workers.values() if w.status is None]
    assert trainer not in bench.cluster.trainers


def test_a_trainer_whose_worker_ended_while_there_was_no_controller_is_started_again(bench: Bench) -> None:
    bench.slow = True
    trainer = bench.submit("1-1")
    bench.join("n1")
    (worker,) = bench.workers
    bench.end(worker, 2, "oh")  # it waits to be tried again
    bench.crash()
    bench.open()
    bench.decide()
    bench.rejoin("n1")
    bench.settle()
    bench.pass_time(5)
    assert [w.trainer for w in bench.workers.values() if w.status is None] == [trainer]


def test_a_trainer_is_not_done_while_rank_0_has_not_said_its_last_words(bench: Bench) -> None:
    trainer = bench.submit("1-2")
    bench.join("n1", "n2")
    first, second = bench.members(trainer)
    for worker in (first, second):
        bench.workers[worker].over = bench.workers[worker].done = True
        bench.say(worker, Done(7))
    bench.end(second, 0)
    bench.take(bench.workers[first].node)  # it was saving the model
    assert bench.state(trainer) != "done"
    bench.finish(trainer)
    assert bench.state(trainer) == "done"


def test_a_script_that_does_not_end_after_its_training_has_failed(bench: Bench) -> None:
    trainer = bench.submit("1-1")
    bench.join("n1")
    (worker,) = bench.members(trainer)
    bench.workers[worker].over = bench.workers[worker].done = True
    bench.say(worker, Done(7))
    for _ in range(70):
        bench.pass_time(9.0)
    row = bench.store.trainer(trainer)
    assert row is not None
    assert (row.state, "did not end" in row.reason) == ("failed", True)


@pytest.mark.parametrize("status", [-15, 128 + 15, 75])
def test_a_worker_that_a_signal_took_is_no_failure(bench: Bench, status: int) -> None:
    bench.slow = True
    trainer = bench.submit("1-1", max_restarts=0)
    bench.join("n1")
    for _ in range(3):
        (worker,) = [w.id for w in bench.workers.values() if w.status is None]
        bench.end(worker, status)
    assert bench.state(trainer) == "starting"


def test_a_node_that_leaves_while_others_are_awaited_is_left_at_a_step_boundary(bench: Bench) -> None:
    trainer = bench.submit()
    bench.join("n1", "n2")
    bench.crash()
    bench.open()
    bench.rejoin("n1")
    with bench.store.transaction():
        bench.act(bench.cluster.leaving("n1", 5.0, bench.now))
    bench.rejoin("n2")
    bench.settle()
    assert bench.nodes_of(trainer) == {"n2"}
    assert bench.store.events(kind="rescale")[-1].data["why"] == "shrink"


@pytest.mark.parametrize(
    "said",
    [
        {"type": "failed", "error": "x", "traceback": ["a", "b"]},
        {"type": "formed", "generation": 1, "world": 1, "pause_s": "much", "form_s": 0, "sync_s": 0},
        {"type": "arrived"},
    ],
)
def test_nonsense_of_a_script_is_its_own_failure(bench: Bench, said: dict[str, object]) -> None:
    trainer, other = bench.submit("1-1"), bench.submit("1-1")
    bench.join("n1", "n2")
    (worker,) = bench.members(trainer)
    bench.tell(bench.workers[worker].node, Heard(worker, said))
    bench.settle()
    assert (bench.state(trainer), bench.state(other)) == ("failed", "running")
    bench.report(other, samples=5)
    bench.report(other, samples=1.5)
    bench.settle()
    assert bench.state(other) == "failed"
    assert set(bench.cluster.nodes) == {"n1", "n2"}


@pytest.mark.parametrize("rate", [1e-300, 1e300])
def test_absurd_weights_and_rates_do_not_upset_decisions(tmp_path: Path, rate: float) -> None:
    bench = Bench(tmp_path, ControllerSettings(max_weight=math.inf))
    trainer = bench.submit("1-4", weight=1e308, curve={"nodes": [1, 2], "rates": [1e-300, 1e10]})
    bench.submit("1-4", weight=1e-308)
    bench.join("n1", "n2", "n3")
    bench.report(trainer, samples=5, rates={"1": rate, "2": rate})
    bench.restart()
    assert len(bench.cluster.planner.state.assigned) >= 1
    bench.store.close()


def test_when_the_clock_is_set_nobody_is_lost_and_nothing_is_late(bench: Bench) -> None:
    bench.slow = True
    trainer = bench.submit("1-1")
    bench.join("n1")
    bench.end(next(iter(bench.workers)), 2, "oh")
    bench.now -= 3600
    bench.cluster.was_away(-3600, bench.now)
    bench.pass_time(2)
    assert [w.trainer for w in bench.workers.values() if w.status is None] == [trainer]
    bench.now += 7200
    bench.cluster.was_away(7200, bench.now)
    with bench.store.transaction():
        bench.act(bench.cluster.tick(bench.now))
    assert set(bench.cluster.nodes) == {"n1"}


NODES = [f"n{i}" for i in range(6)]
STEPS = st.one_of(
    st.tuples(st.just("join"), st.sampled_from(NODES)),
    st.tuples(st.just("take"), st.sampled_from(NODES)),
    st.tuples(st.just("leave"), st.sampled_from(NODES)),
    st.tuples(st.just("kill"), st.integers(0, 5)),
    st.tuples(st.just("submit"), st.sampled_from(["1-1", "1-4", "2-3", "3-6"])),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
    st.tuples(st.just("finish"), st.integers(0, 5)),
    st.tuples(st.just("crash"), st.integers(0, 63)),
    st.tuples(st.just("time"), st.sampled_from([0.05, 0.2, 1, 5, 20])),
    st.tuples(st.just("slow"), st.booleans()),
    st.tuples(st.just("ready"), st.integers(0, 5)),
    st.tuples(st.just("cut"), st.sampled_from(NODES)),
    st.tuples(st.just("back"), st.sampled_from(NODES)),
)


@settings(max_examples=examples(150))
@given(st.lists(STEPS, max_size=40))
def test_whatever_happens_every_trainer_that_can_run_does_and_no_node_serves_two(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, object]]
) -> None:
    quick = JobSettings(restart_backoff_s=0.0)
    bench = Bench(tmp_path_factory.mktemp("cluster"), ControllerSettings(job=quick))
    finished: set[str] = set()
    for what, value in steps:
        _do(bench, what, value, finished)
    bench.slow = False
    bench.reconnect(*sorted(bench.cut))
    for worker in list(bench.workers.values()):
        if worker.status is None and not worker.ready:
            bench.make_ready(worker.id)
    for _ in range(90):
        bench.pass_time(1.0)
    nodes = set(bench.cluster.planner.state.pool)
    assert nodes == set(bench.agents)
    held: list[str] = []
    for trainer, live in bench.cluster.trainers.items():
        count = len(live.job.nodes)
        assert {bench.workers[w].node for w in live.job.trained_by} == set(live.job.nodes)
        assert live.job.state == bench.state(trainer) == ("running" if count else live.job.state)
        held += live.job.nodes
    assert len(held) == len(set(held))
    fits = [
        t
        for t in (*bench.cluster.planner.state.admitted, *bench.cluster.planner.state.waiting)
        if t.min_nodes <= len(nodes)
    ]
    assert bool(held) == bool(fits)
    running = {w.worker for w in bench.store.workers(running=True)}
    assert running == {w.id for w in bench.workers.values() if w.status is None}
    again = check(bench.store.all_events(KINDS), bench.policy)
    assert again.decisions == len(bench.store.events(kind="decision", limit=1000))
    assert again.mismatches == ()
    bench.store.close()


def _do(bench: Bench, what: str, value: object, finished: set[str]) -> None:
    trainers = list(bench.cluster.trainers)
    alive = [w.id for w in bench.workers.values() if w.status is None]
    if what == "join" and value not in bench.agents:
        bench.join(str(value))
    elif what == "take" and value in bench.agents:
        bench.take(str(value))
    elif what == "leave" and value in bench.cluster.nodes:
        with bench.store.transaction():
            bench.act(bench.cluster.leaving(str(value), 3.0, bench.now))
        bench.settle()
    elif what == "kill" and alive:
        bench.end(alive[int(str(value)) % len(alive)], -9)
    elif what == "submit" and len(trainers) < 5:
        bench.submit(str(value))
    elif what in ("cancel", "finish") and trainers:
        trainer = trainers[int(str(value)) % len(trainers)]
        if what == "cancel":
            with bench.store.transaction():
                bench.act(bench.cluster.cancel(trainer, "", bench.now))
            bench.settle()
        elif set(bench.members(trainer)) & set(bench.workers):
            bench.finish(trainer)
    elif what == "crash":
        mask = int(str(value))
        back = [node for node in bench.agents if mask >> NODES.index(node) & 1]
        for node in list(bench.agents):
            if node not in back:
                del bench.agents[node]
                bench.cut.discard(node)
                bench.workers = {w.id: w for w in bench.workers.values() if w.node != node}
        bench.crash()
        bench.open()
        for node in back:
            bench.rejoin(node)
        bench.settle()
    elif what == "cut" and value in bench.agents.keys() - bench.cut:
        bench.disconnect(str(value))
    elif what == "back" and value in bench.cut:
        bench.reconnect(str(value))
    elif what == "slow":
        bench.slow = bool(value)
    elif what == "ready":
        starting = [worker for worker in alive if not bench.workers[worker].ready]
        if starting:
            bench.make_ready(starting[int(str(value)) % len(starting)])
            bench.settle()
    elif what == "time":
        bench.pass_time(float(str(value)))
