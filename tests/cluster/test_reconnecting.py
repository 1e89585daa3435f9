"""Connections that break: an agent that comes back within seconds keeps its workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bftrainer.cluster.controller.active import ControllerSettings
from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.pools.script.pool import ScriptPool, ScriptSettings
from bftrainer.cluster.wire import codec
from bftrainer.cluster.wire.messages import Join
from bftrainer.elastic.protocol import Broken
from support.cluster.api import NoPool
from support.cluster.bench import Bench
from support.cluster.in_memory import Wire, play
from support.waiting import until

RECONNECT_S = ControllerSettings().reconnect_s


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.store.close()


def counts(bench: Bench, trainer: str) -> tuple[str, int, int, int]:
    row = bench.store.trainer(trainer)
    assert row is not None
    return row.state, row.rescales, row.preemptions, row.failures


@pytest.mark.parametrize("launcher", ["elastic", "torchrun"])
def test_a_connection_that_breaks_for_seconds_costs_a_node_nothing(bench: Bench, launcher: str) -> None:
    trainer = bench.submit("1-2", launcher=launcher)
    bench.join("n1", "n2")
    before, members, started = counts(bench, trainer), bench.members(trainer), len(bench.started)
    assert before[0] == "running"
    bench.disconnect("n1", "n2")
    bench.pass_time(RECONNECT_S - 1)
    bench.reconnect("n1", "n2")
    for _ in range(20):
        bench.pass_time(1.0)
    assert (counts(bench, trainer), bench.members(trainer), len(bench.started)) == (before, members, started)
    assert [event.kind for event in bench.store.events(kind="node.left", limit=10)] == []


def test_an_agent_that_does_not_come_back_is_lost_and_its_worker_ended_when_it_does(bench: Bench) -> None:
    trainer = bench.submit("1-2")
    bench.join("n1", "n2")
    worker = next(w.id for w in bench.workers.values() if w.node == "n1")
    bench.disconnect("n1")
    bench.pass_time(RECONNECT_S + 1)
    assert bench.nodes_of(trainer) == {"n2"}
    bench.reconnect("n1")
    assert worker not in bench.workers
    assert bench.nodes_of(trainer) == {"n1", "n2"}


def test_peers_that_lost_a_disconnected_worker_do_not_wait_for_it(bench: Bench) -> None:
    trainer = bench.submit("1-3")
    bench.join("n1", "n2", "n3")
    other = next(w for w in bench.workers.values() if w.node == "n2")
    bench.disconnect("n1")
    bench.say(other.id, Broken(other.formed, "connection reset"))
    bench.settle()
    assert bench.nodes_of(trainer) == {"n2", "n3"}
    bench.disconnect("n2")
    assert "n2" in bench.cluster.nodes, "the present group is whole"


def test_a_peer_may_lose_a_worker_before_the_controller_does(bench: Bench) -> None:
    trainer = bench.submit("1-3")
    bench.join("n1", "n2", "n3")
    first, other = (next(w for w in bench.workers.values() if w.node == node) for node in ("n1", "n2"))
    first.hangs = True  # it is dead, and its connection not closed yet
    bench.say(other.id, Broken(other.formed, "connection reset"))
    bench.settle()
    bench.disconnect("n1")
    assert bench.nodes_of(trainer) == {"n2", "n3"}


def test_an_order_that_was_lost_with_the_connection_is_given_again(bench: Bench) -> None:
    trainer = bench.submit("1-2")
    bench.join("n1")
    bench.disconnect("n1")
    bench.join("n2")
    bench.reconnect("n1")
    for _ in range(5):
        bench.pass_time(0.5)
    assert bench.nodes_of(trainer) == {"n1", "n2"}
    assert bench.state(trainer) == "running"
    bench.disconnect("n2")
    with bench.store.transaction():
        bench.act(bench.cluster.cancel(trainer, "", bench.now))
    bench.settle()
    bench.reconnect("n2")
    assert bench.workers == {}
    assert bench.state(trainer) == "cancelled"


def test_an_agent_that_comes_again_before_its_connection_is_missed_keeps_its_node(tmp_path: Path) -> None:
    async def scene(controller: Controller) -> None:
        first, again = Wire(), Wire()
        for wire in (first, again):
            wire.serve(controller)
            wire.to_controller.put_nowait(codec.encode(Join("n1", "n1", "a")))
            await until(lambda wire=wire: wire.of_kind("welcome"))
        assert first.serving is not None
        first.to_controller.put_nowait(None)
        await first.serving
        joined = [event for event in controller.cluster.store.events(limit=100) if event.kind.startswith("node.")]
        assert [event.kind for event in joined] == ["node.joined"]
        assert controller.cluster.nodes["n1"].here
        again.to_controller.put_nowait(None)
        await until(lambda: not controller.cluster.nodes["n1"].here)
        assert controller.agents.nodes == {"n1"}, "its pool must not start another agent there"

    play(tmp_path, scene)


def test_a_pool_may_end_agents_without_a_controller_sooner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ScriptPool(ScriptSettings(("nodes",)), tmp_path)
    monkeypatch.setattr(NoPool, "give_up_s", pool.give_up_s, raising=False)

    async def scene(controller: Controller) -> None:
        wire = Wire()
        wire.serve(controller)
        wire.to_controller.put_nowait(codec.encode(Join("n1", "n1", "a")))
        await until(lambda: wire.of_kind("welcome"))
        assert wire.of_kind("welcome")[0]["give_up_s"] == 60.0

    play(tmp_path, scene)
