"""Who is slow is waited for; a group that can never work is not tried for ever. In virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from bftrainer.cluster.controller.active import ControllerSettings
from bftrainer.cluster.jobs.worker import JobSettings
from bftrainer.elastic.protocol import Broken
from support.cluster.bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def on(bench: Bench, *nodes: str) -> list[str]:
    """The workers on nodes that run."""
    return [w.id for node in nodes for w in bench.workers.values() if w.node == node and w.status is None]


def pass_time(bench: Bench, seconds: float) -> None:
    """In steps that agents' heartbeats allow."""
    for _ in range(round(seconds / 9.0)):
        bench.pass_time(9.0)


@pytest.mark.parametrize("seconds", [6 * 60, 3 * 3600])
def test_who_evaluates_for_long_while_two_nodes_join_is_not_killed_and_they_join_afterwards(
    bench: Bench, seconds: float
) -> None:
    trainer = bench.submit()
    bench.join("n1", "n2")
    before = on(bench, "n1", "n2")
    for worker in before:  # rank 0 evaluates, and the other one waits for it in the next step
        bench.workers[worker].hangs = True
    bench.join("n3")
    pass_time(bench, 18)
    bench.join("n4")
    pass_time(bench, seconds - 18)
    assert on(bench, "n1", "n2") == before
    assert bench.nodes_of(trainer) == {"n1", "n2"}
    for worker in before:
        bench.wake(worker)
    assert bench.state(trainer) == "running"
    assert bench.nodes_of(trainer) == {"n1", "n2", "n3", "n4"}
    assert set(before) <= set(bench.members(trainer))


def test_a_survivor_that_evaluates_when_a_peer_is_lost_is_waited_for(bench: Bench) -> None:
    trainer = bench.submit()
    bench.join("n1", "n2", "n3")
    (evaluating,) = on(bench, "n1")
    bench.workers[evaluating].hangs = True
    bench.take("n3")
    pass_time(bench, 3600)
    assert on(bench, "n1") == [evaluating]
    bench.wake(evaluating)
    assert bench.nodes_of(trainer) == {"n1", "n2"}


def test_where_the_limit_is_set_a_survivor_that_does_not_come_after_a_loss_is_replaced(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ControllerSettings(job=JobSettings(stuck_after_s=600.0)))
    trainer = bench.submit()
    bench.join("n1", "n2", "n3")
    (stuck,) = on(bench, "n1")
    bench.workers[stuck].hangs = True
    bench.take("n3")
    pass_time(bench, 590)
    assert on(bench, "n1") == [stuck]
    pass_time(bench, 30)
    assert bench.nodes_of(trainer) == {"n1", "n2"}
    assert stuck not in bench.members(trainer)


def test_the_limit_does_not_hold_for_a_join(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ControllerSettings(job=JobSettings(stuck_after_s=600.0)))
    bench.submit()
    bench.join("n1")
    (evaluating,) = on(bench, "n1")
    bench.workers[evaluating].hangs = True
    bench.join("n2")
    pass_time(bench, 3600)
    assert on(bench, "n1") == [evaluating]


def break_group(bench: Bench, trainer: str, reason: str = "connection refused by 127.0.1.1") -> None:
    """All members say that their group is broken, a second later."""
    bench.pass_time(1.0)
    going = bench.cluster.trainers[trainer].job.roster.going
    for worker in going.members:
        bench.say(worker, Broken(going.id, reason))
    bench.settle()


def test_a_group_that_never_forms_fails_the_trainer_with_the_reason(bench: Bench) -> None:
    bench.forms = lambda nodes: False
    trainer = bench.submit("2-2")
    bench.join("n1", "n2")
    tries = 0
    while bench.state(trainer) != "failed":
        tries += 1
        assert tries < 10
        break_group(bench, trainer)
    assert tries >= 3
    row = bench.store.trainer(trainer)
    assert row is not None
    assert "connection refused by 127.0.1.1" in row.error
    assert f"broke {tries} times in a row (last in generation {tries})" in row.error


def test_a_group_that_breaks_now_and_then_between_steps_goes_on(bench: Bench) -> None:
    trainer = bench.submit("2-2")
    bench.join("n1", "n2")
    for step in range(20):
        break_group(bench, trainer)
        bench.report(trainer, step=step + 1, samples=step + 1)
    assert bench.state(trainer) == "running"


def test_survivors_that_say_broken_before_their_peer_is_known_to_be_dead_never_fail_the_trainer(bench: Bench) -> None:
    """Each loss is known only after the survivors have told of the broken group."""
    trainer = bench.submit("1-4")
    bench.join("n1", "n2")
    for number in range(3, 20):
        bench.join(f"n{number}")
        break_group(bench, trainer)
        bench.take(f"n{number}")
    assert bench.state(trainer) == "running"


def test_breaks_before_and_after_a_loss_are_not_one_row(bench: Bench) -> None:
    bench.forms = lambda nodes: False
    trainer = bench.submit("2-3")
    bench.join("n1", "n2", "n3")
    for _ in range(2):
        break_group(bench, trainer)
    pass_time(bench, 9)
    bench.take("n3")
    break_group(bench, trainer)
    assert bench.state(trainer) != "failed"
    for _ in range(5):
        if bench.state(trainer) != "failed":
            break_group(bench, trainer)
    assert bench.state(trainer) == "failed"


def test_one_newcomer_with_which_the_group_breaks_is_left_out_and_the_others_go_on(bench: Bench) -> None:
    trainer = bench.submit("1-4")
    bench.join("n1", "n2")
    bench.forms = lambda nodes: "n3" not in nodes
    bench.join("n3")
    while on(bench, "n3"):
        assert bench.now < 1060
        break_group(bench, trainer, "no route to n3")
    assert bench.state(trainer) == "running"
    assert bench.nodes_of(trainer) == {"n1", "n2"}
    (failed,) = bench.store.events(kind="worker.failed")
    assert failed.node == "n3"
    assert "no route to n3" in failed.data["reason"]
    bench.forms = lambda nodes: True
    bench.pass_time(2.0)
    assert bench.nodes_of(trainer) == {"n1", "n2", "n3"}  # it is tried again


def test_of_several_newcomers_the_one_with_which_the_group_breaks_is_found(bench: Bench) -> None:
    trainer = bench.submit("1-4")
    bench.join("n1", "n2")
    bench.forms = lambda nodes: "n4" not in nodes
    bench.slow = True
    bench.join("n3", "n4")
    for worker in on(bench, "n3", "n4"):
        bench.make_ready(worker)
    bench.slow = False
    bench.settle()
    while bench.nodes_of(trainer) != {"n1", "n2", "n3"}:
        assert bench.now < 1060
        break_group(bench, trainer, "no route to n4")
    assert bench.state(trainer) in ("running", "rescaling")


def test_a_trainer_that_can_be_alone_only_fails_once_two_nodes_have_shown_it(bench: Bench) -> None:
    trainer = bench.submit("1-4")
    bench.join("n1")
    bench.forms = lambda nodes: len(nodes) == 1
    bench.join("n2")
    while not bench.store.events(kind="worker.failed"):
        assert bench.now < 1060
        break_group(bench, trainer, "int16 cannot be sent")
    assert bench.nodes_of(trainer) == {"n1"}
    bench.take("n2")
    bench.join("n3")
    while bench.state(trainer) != "failed":
        assert bench.now < 1060
        break_group(bench, trainer, "int16 cannot be sent")
    row = bench.store.trainer(trainer)
    assert row is not None
    assert "int16 cannot be sent" in row.error
