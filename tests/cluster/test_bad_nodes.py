"""One bad node does not fail a trainer that runs elsewhere. In virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from bftrainer.elastic.protocol import Failed
from support.cluster.bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def worker_on(bench: Bench, node: str) -> str:
    (found,) = [w.id for w in bench.workers.values() if w.node == node and w.status is None]
    return found


def runs_on(bench: Bench, node: str) -> bool:
    return any(w.node == node and w.status is None for w in bench.workers.values())


def fail_newcomer(bench: Bench, node: str, how: str) -> None:
    worker = worker_on(bench, node)
    if how == "exception":
        bench.say(worker, Failed("OSError: [Errno 116] Stale file handle: '/data'", "Traceback …"))
        bench.end(worker, 1)
    elif how == "status":
        bench.end(worker, 1, "OSError: [Errno 116] Stale file handle: '/data'")
    elif how == "no start":
        bench.fail_to_start(worker, "there is no folder /data: Stale file handle")
    else:
        bench.end(worker, 0, "Stale file handle", spoke=False)


@pytest.mark.parametrize("how", ["exception", "status", "no start", "at once done"])
def test_a_newcomer_that_fails_before_it_joins_does_not_fail_the_trainer(bench: Bench, how: str) -> None:
    trainer = bench.submit("1-4", max_restarts=0)
    bench.join("n1", "n2")
    bench.slow = True
    bench.join("n3")
    waits: list[int] = []
    for _ in range(14):
        fail_newcomer(bench, "n3", how)
        assert bench.state(trainer) == "running"
        assert bench.nodes_of(trainer) == {"n1", "n2"}
        waits.append(0)
        while not runs_on(bench, "n3"):
            bench.pass_time(1.0)
            waits[-1] += 1
    assert waits[:4] == [1, 2, 4, 8]
    assert waits[-1] == 600  # no longer than ten minutes: what was wrong may be mended
    events = bench.store.events(kind="worker.failed", limit=100)
    assert len(events) == 14
    assert {event.node for event in events} == {"n3"}
    row = bench.store.trainer(trainer)
    assert row is not None
    assert row.reason.startswith("continues without n3: ")
    assert ("elastic.init" if how == "at once done" else "Stale file handle") in row.reason
    bench.slow = False
    bench.make_ready(worker_on(bench, "n3"))
    bench.settle()
    assert bench.nodes_of(trainer) == {"n1", "n2", "n3"}
    row = bench.store.trainer(trainer)
    assert row is not None
    assert row.reason == ""


def test_a_newcomer_that_fails_while_its_group_forms_is_left_out_and_the_group_forms_without_it(bench: Bench) -> None:
    trainer = bench.submit("1-4")
    bench.join("n1", "n2")
    bench.forms = lambda nodes: "n3" not in nodes  # all were told to go, nobody has formed
    bench.join("n3")
    fail_newcomer(bench, "n3", "exception")
    assert bench.state(trainer) == "running"
    assert bench.nodes_of(trainer) == {"n1", "n2"}


def test_other_nodes_are_started_at_once_while_a_bad_one_waits(bench: Bench) -> None:
    trainer = bench.submit("1-4")
    bench.join("n1")
    bench.slow = True
    bench.join("n2")
    for _ in range(3):
        fail_newcomer(bench, "n2", "status")
        while not runs_on(bench, "n2"):
            bench.pass_time(1.0)
    fail_newcomer(bench, "n2", "status")
    bench.slow = False
    bench.join("n3")
    assert bench.nodes_of(trainer) == {"n1", "n3"}


def test_an_exception_of_one_that_trained_fails_the_trainer(bench: Bench) -> None:
    trainer = bench.submit("1-4")
    bench.join("n1", "n2")
    bench.say(worker_on(bench, "n2"), Failed("ValueError: no", "Traceback …"))
    bench.settle()
    assert bench.state(trainer) == "failed"


def test_an_exception_on_one_of_several_nodes_at_the_very_start_leaves_the_others_a_chance(bench: Bench) -> None:
    bench.slow = True
    trainer = bench.submit("1-4")
    bench.join("n1", "n2")
    fail_newcomer(bench, "n1", "exception")
    bench.make_ready(worker_on(bench, "n2"))
    bench.pass_time(0.2)
    assert bench.state(trainer) == "running"
    assert bench.nodes_of(trainer) == {"n2"}


def test_the_same_exception_on_two_nodes_at_the_very_start_is_the_scripts(bench: Bench) -> None:
    bench.slow = True
    trainer = bench.submit("1-4")
    bench.join("n1", "n2")
    fail_newcomer(bench, "n1", "exception")
    fail_newcomer(bench, "n2", "exception")
    row = bench.store.trainer(trainer)
    assert row is not None
    assert row.state == "failed"
    assert "Stale file handle" in row.error
    assert row.traceback == "Traceback …"


def test_an_exception_on_the_only_node_at_the_very_start_fails_the_trainer_at_once(bench: Bench) -> None:
    bench.slow = True
    trainer = bench.submit("1-4")
    bench.join("n1")
    fail_newcomer(bench, "n1", "exception")
    assert bench.state(trainer) == "failed"


def test_a_script_that_ends_well_without_a_word_has_failed_and_is_told_what_to_do(bench: Bench) -> None:
    bench.slow = True
    trainer = bench.submit("1-4")
    bench.join("n1")
    bench.end(worker_on(bench, "n1"), 0, "accuracy 0.9", spoke=False)
    row = bench.store.trainer(trainer)
    assert row is not None
    assert row.state == "failed"
    assert "bftrainer.elastic.init" in row.error
    assert "--launcher torchrun" in row.error


def test_a_newcomer_that_told_of_an_exception_and_does_not_end_is_ended(bench: Bench) -> None:
    """A thread of the script keeps its process alive."""
    trainer = bench.submit("1-4")
    bench.join("n1")
    bench.slow = True
    bench.join("n2")
    stuck = worker_on(bench, "n2")
    bench.say(stuck, Failed("OSError: [Errno 116] Stale file handle: '/data'", "Traceback …"))
    assert bench.state(trainer) == "running"
    for _ in range(12):
        bench.pass_time(1.0)
    assert worker_on(bench, "n2") != stuck  # it was tried again


def test_one_that_fails_right_after_it_took_over_the_state_is_its_nodes_failure_too(bench: Bench) -> None:
    trainer = bench.submit("1-4", max_restarts=0)
    bench.join("n1", "n2")
    bench.join("n3")
    assert bench.nodes_of(trainer) == {"n1", "n2", "n3"}
    worker = worker_on(bench, "n3")
    bench.say(worker, Failed("InputError: the ranks train on different data", "Traceback …", fresh=True))
    bench.end(worker, 1)
    bench.settle()
    assert bench.state(trainer) == "running"
    assert bench.nodes_of(trainer) == {"n1", "n2"}
    row = bench.store.trainer(trainer)
    assert row is not None
    assert "different data" in row.reason
    bench.pass_time(300.0)
    assert not runs_on(bench, "n3"), "each try costs the others a rescale, so it is not tried again soon"
    bench.pass_time(400.0)
    assert runs_on(bench, "n3")
