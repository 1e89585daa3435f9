"""The controller's side of connections: agents that fall silent, speak nonsense or come twice."""

from __future__ import annotations

import asyncio
import gc
import time
import warnings
from functools import partial
from pathlib import Path

import pytest

from bftrainer.cluster.controller import agents
from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.controller.nodes.read_budget import ReadBudget
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.wire import codec, messages
from bftrainer.cluster.wire.messages import Join
from support.cluster.in_memory import Wire, play
from support.waiting import until


def test_an_agent_that_was_taken_for_lost_is_cut_off_so_that_it_comes_again(tmp_path: Path) -> None:
    async def scene(controller: Controller) -> None:
        agent = Wire()
        serving = asyncio.create_task(controller.agents.serve(agent.frames(), agent.send))
        agent.to_controller.put_nowait(codec.encode(Join("n1", "n1", "a")))
        await until(lambda: "n1" in controller.agents.nodes)
        controller.cluster.nodes["n1"].heard = time.time() - 60  # it was stopped, or its network was
        await until(lambda: "n1" not in controller.cluster.nodes)
        agent.to_controller.put_nowait(codec.encode(messages.Beat()))  # it is alive after all
        await asyncio.wait_for(serving, 10)
        assert "n1" not in controller.agents.nodes
        again = Wire()
        serving = asyncio.create_task(controller.agents.serve(again.frames(), again.send))
        again.to_controller.put_nowait(codec.encode(Join("n1", "n1", "a")))
        await until(lambda: "n1" in controller.cluster.nodes)
        again.to_controller.put_nowait(codec.encode(messages.Going("taken")))
        await asyncio.wait_for(serving, 10)
        await until(lambda: "n1" not in controller.cluster.nodes)

    play(tmp_path, scene)


def test_an_agent_that_is_stopped_is_cut_off_though_it_neither_reads_nor_sends(tmp_path: Path) -> None:
    class Stopped(Wire):
        async def send(self, frame: str) -> None:
            await super().send(frame)
            await asyncio.Event().wait()

    async def scene(controller: Controller) -> None:
        agent = Stopped()
        serving = asyncio.create_task(controller.agents.serve(agent.frames(), agent.send))
        agent.to_controller.put_nowait(codec.encode(Join("n1", "n1", "a")))
        await until(lambda: "n1" in controller.cluster.nodes and agent.received)
        controller.cluster.nodes["n1"].heard = time.time() - 600
        await asyncio.wait_for(serving, 10)
        assert "n1" not in controller.cluster.nodes
        assert "n1" not in controller.agents.nodes  # so its pool kills the agent and starts another one

    play(tmp_path, scene)


def test_nonsense_from_an_agent_ends_its_connection_and_nothing_else(tmp_path: Path) -> None:
    async def scene(controller: Controller) -> None:
        for frame in ("{", "[]", '{"type": "beat"}', '{"type": "join", "node": 7, "host": "x", "agent": "y"}'):
            agent = Wire()
            agent.to_controller.put_nowait(frame)
            await asyncio.wait_for(controller.agents.serve(agent.frames(), agent.send), 10)
        for frame in (
            '{"type": "ended", "worker": [], "status": 0}',
            '{"type": "log", "worker": "../../x-1", "offset": 0, "text": "x", "size": 1}',
            '{"type": "beat", "reports": {"t1-1": 5}}',
        ):
            agent = Wire()
            agent.to_controller.put_nowait(codec.encode(Join("n1", "n1", "a")))
            agent.to_controller.put_nowait(frame)
            await asyncio.wait_for(controller.agents.serve(agent.frames(), agent.send), 10)
            assert controller.agents.nodes == frozenset()
        assert not controller.failed.done()
        assert not Path(tmp_path.parent.parent, "x").exists()

    play(tmp_path, scene)


def test_a_connection_that_sends_no_join_ends_and_one_that_has_joined_may_be_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(controller: Controller) -> None:
        joined = Wire()
        joined.serve(controller)
        joined.to_controller.put_nowait(codec.encode(Join("n1", "n1", "a")))
        await until(lambda: "n1" in controller.agents.nodes)
        ends = controller.agents._connections["n1"].on_close
        assert isinstance(ends, partial)
        assert ends.args[0].when() is None, "no time limit any more"
        monkeypatch.setattr(agents, "JOIN_S", 0.0)
        silent = Wire()
        await asyncio.wait_for(silent.serve(controller), 10)
        assert silent.received == []
        assert controller.agents.nodes == {"n1"}

    play(tmp_path, scene)


def test_what_an_agent_may_send_is_limited_and_connecting_again_does_not_help(tmp_path: Path) -> None:
    budget, mb = ReadBudget(), "x" * (1 << 20)
    waits = [budget.spend("n1", mb, 1000.0) for _ in range(40)]
    assert waits[:30] == [0.0] * 30
    assert 0.0 < waits[35] < waits[39]
    assert budget.spend("n2", mb, 1000.0) == 0.0, "it is another node's"
    budget.forget_paid(1000.0)
    assert budget.spend("n1", mb, 1000.0) > waits[39]
    assert ReadBudget().spend("n1", "," * len(mb), 0.0) == 0.0
    assert budget.spend("n1", mb, 2000.0) == 0.0

    async def scene(controller: Controller) -> None:
        wires = [Wire(), Wire()]
        for name, wire in zip(("n1", "n2"), wires, strict=True):
            wire.serve(controller)
            wire.to_controller.put_nowait(codec.encode(Join(name, name, "a")))
        await until(lambda: controller.agents.nodes == {"n1", "n2"})
        controller.agents._read.spend("n1", "x" * (200 << 20), time.monotonic())
        times = {name: node.heard for name, node in controller.cluster.nodes.items()}
        for wire in wires:
            wire.to_controller.put_nowait(codec.encode(messages.Beat()))
        await until(lambda: controller.cluster.nodes["n2"].heard > times["n2"])
        assert controller.cluster.nodes["n1"].heard == times["n1"]

    play(tmp_path, scene)


def test_the_reports_of_a_node_between_two_ticks_are_of_a_thousand_workers_at_most(tmp_path: Path) -> None:
    async def scene(controller: Controller) -> None:
        wire = Wire()
        serving = wire.serve(controller)
        wire.to_controller.put_nowait(codec.encode(Join("n1", "n1", "a")))
        for beat in range(2):
            reports = {f"t1-{1000 * beat + i}": {} for i in range(1000)}
            wire.to_controller.put_nowait(codec.encode(messages.Beat(reports)))
        await asyncio.wait_for(serving, 10)
        await until(lambda: not controller.cluster.nodes)
        assert not controller.failed.done()

    play(tmp_path, scene)


def test_what_killed_writers_left_of_a_trainer_is_deleted_when_it_has_ended(tmp_path: Path) -> None:
    left = ".snapshot-000000000003.ab12.77-123@elsewhere.example.org.tmp"

    async def scene(controller: Controller) -> None:
        spec = TrainerSpec.model_validate({"script": "train.py", "cwd": str(tmp_path), "min_nodes": 1, "max_nodes": 2})
        trainers = [controller.submit(spec, "ann") for _ in range(2)]
        for trainer in trainers:
            (tmp_path / trainer / "snapshots").mkdir(parents=True)
            (tmp_path / trainer / "snapshots" / left).write_bytes(b"half")
            (tmp_path / trainer / "snapshots" / "snapshot-000000000001.bft").write_bytes(b"whole")
        controller.cancel(trainers[0], "ann")
        await until(lambda: not (tmp_path / trainers[0] / "snapshots" / left).exists())
        assert (tmp_path / trainers[0] / "snapshots" / "snapshot-000000000001.bft").exists()
        assert (tmp_path / trainers[1] / "snapshots" / left).exists(), "it may still be at work"

    play(tmp_path, scene)


def test_a_controller_that_is_stopped_as_soon_as_it_has_started_leaves_nothing_unawaited(tmp_path: Path) -> None:
    async def scene(controller: Controller) -> None:
        pass

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        play(tmp_path, scene)
        gc.collect()
    assert [str(warning.message) for warning in warned] == []
