"""Agents that the cluster does not know, where agents have owners: nothing they send changes anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.launchers.base import StateLayout
from bftrainer.cluster.owners.join_secrets import JoinRight
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.wire import codec
from bftrainer.cluster.wire.messages import (
    Beat,
    Ended,
    FromAgent,
    Going,
    Heard,
    Join,
    Log,
    RankStatus,
    Started,
    WorkerStatus,
)
from bftrainer.elastic import protocol
from support.cluster.in_memory import Wire, play
from support.users.directory import known_accounts
from support.waiting import until

ABSURD = "t999999999999999999"
TEXT = "forged\n"
EVERYTHING: tuple[FromAgent, ...] = (
    Beat({"t1-1": {"generation": 1, "samples": 10**6}}),
    Heard("t1-1", protocol.as_json(protocol.Follow("evil:1", "secret"))),
    Heard("t1-1", protocol.as_json(protocol.Failed("a lie", ""))),
    Started("t1-1", 666, "a lie", (RankStatus(666),)),
    Log("t1-1", 0, TEXT, len(TEXT)),
    Log("t1-777", 0, TEXT, len(TEXT)),
    Log(f"{ABSURD}-1", 0, TEXT, len(TEXT)),
    Ended("t1-1", -9, "a lie", "a lie"),
    Going("a lie"),
)


@pytest.fixture(autouse=True)
def _accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    known_accounts(monkeypatch, ann=2001, bob=2002)


def invite(controller: Controller, node: str, owner: str) -> JoinRight:
    """What the secret of an agent that a pool starts is good for."""
    invitations, now = controller.agents.invitations, time.time()
    assert invitations is not None
    with controller.cluster.store.transaction():
        right = invitations.right(invitations.invite(node, owner, now), now)
    assert right is not None
    return right


def knock(controller: Controller, right: JoinRight, *frames: FromAgent, agent: str = "") -> Wire:
    """The agent of an invitation joins, and sends frames at once."""
    wire = Wire()
    wire.serve(controller, right)
    workers = (WorkerStatus("t1-1", "t1", failed="a lie", over=True),)
    for message in (Join(right.node, right.node, agent or f"agent of {right.node}", workers), *frames):
        wire.to_controller.put_nowait(codec.encode(message))
    return wire


async def train_anns(controller: Controller) -> Wire:
    """Ann trains on `n1`."""
    spec = TrainerSpec.model_validate({"script": "/train.py", "nodes": "1-1", "signature": "v1:x"})
    assert controller.submit(spec, "ann") == "t1"
    wire = Wire()
    wire.serve(controller, right := invite(controller, "n1", "ann"))
    wire.to_controller.put_nowait(codec.encode(Join("n1", "n1", "agent of n1", knows_ranks=True)))
    await until(lambda: wire.of_kind("start"))
    assert right.owner == "ann"
    return wire


def facts(controller: Controller) -> object:
    """What is known of ann's trainer."""
    live = controller.cluster.trainers["t1"]
    return repr(live.job.__dict__), live.job.outcome, live.job.progress.samples


async def ended(wire: Wire) -> None:
    assert wire.serving is not None
    await asyncio.wait_for(wire.serving, 10)


async def settled(controller: Controller) -> None:
    """What was said is handled."""
    await until(lambda: not controller.agents.busy)
    for _ in range(3):
        await asyncio.sleep(0)


def no_log(folder: Path) -> bool:
    return not [path for path in folder.glob("t*/log") if TEXT.strip() in path.read_text()]


def test_an_agent_that_comes_during_a_pause_is_refused_for_good(tmp_path: Path) -> None:
    async def scene(controller: Controller) -> None:
        anns = await train_anns(controller)
        before = facts(controller)
        invited_before = invite(controller, "n2", "bob")
        late = invite(controller, "n4", "bob")
        controller.cluster.paused = True  # ann's node stays, so that there is something to attack
        right = invite(controller, "n3", "bob")
        for each in (invited_before, right):
            wire = knock(controller, each, *EVERYTHING)
            await ended(wire)
            assert wire.received == ["bye"]
            assert "paused" in wire.of_kind("bye")[0]["reason"]
        await settled(controller)
        assert facts(controller) == before
        assert controller.agents.nodes == {"n1"}, "for its pool it is not connected"
        await controller.pause()
        await controller.resume()
        for each in (invited_before, right, late):
            wire = knock(controller, each, *EVERYTHING)
            await ended(wire)
            assert wire.received == ["bye"]
            assert "is good no more" in wire.of_kind("bye")[0]["reason"]
        await settled(controller)
        live = controller.cluster.trainers["t1"]
        assert (live.job.outcome, live.job.progress.samples) == (None, 0)
        assert set(controller.cluster.nodes) == {"n1"}
        assert not anns.of_kind("forget")

    play(tmp_path, scene, own_users=True)
    assert no_log(tmp_path)
    assert not (tmp_path / ABSURD).exists()


@pytest.mark.parametrize(
    "lose",
    [
        lambda controller: controller.agents.gone("n2", "its pilot has ended"),
        lambda controller: controller.cluster.nodes.pop("n2"),
    ],
    ids=["gone", "forgotten"],
)
def test_an_agent_whose_node_has_left_is_heard_no_more(tmp_path: Path, lose: Callable[[Controller], object]) -> None:
    async def scene(controller: Controller) -> None:
        await train_anns(controller)
        wire = knock(controller, invite(controller, "n2", "bob"))
        await until(lambda: "n2" in controller.agents.nodes and wire.received)
        before = facts(controller)
        lose(controller)
        for message in EVERYTHING:
            wire.to_controller.put_nowait(codec.encode(message))
        await ended(wire)
        await settled(controller)
        assert facts(controller) == before
        assert controller.agents.nodes == {"n1"}

    play(tmp_path, scene, own_users=True)
    assert no_log(tmp_path)
    assert not (tmp_path / ABSURD).exists()


def test_an_agent_whose_node_goes_to_another_owner_is_heard_no_more(tmp_path: Path) -> None:
    async def scene(controller: Controller) -> None:
        right = invite(controller, "n1", "bob")
        wire = knock(controller, right)
        await until(lambda: wire.received)
        spec = TrainerSpec.model_validate({"script": "/train.py", "nodes": "1-1", "signature": "v1:x"})
        controller.submit(spec, "ann")
        await until(lambda: wire.of_kind("bye"))
        assert wire.of_kind("bye")[0]["reason"] == "the node goes to another owner"
        before = facts(controller)
        for message in EVERYTHING:
            wire.to_controller.put_nowait(codec.encode(message))
        await ended(wire)
        await settled(controller)
        assert facts(controller) == before
        again = knock(controller, right, *EVERYTHING)
        await ended(again)
        assert again.received == ["bye"]
        assert facts(controller) == before
        assert controller.agents.nodes == frozenset()

    play(tmp_path, scene, own_users=True)
    assert no_log(tmp_path)
    assert not (tmp_path / ABSURD).exists()


def test_an_agent_that_goes_or_is_gone_cannot_come_back_but_one_that_fell_silent_can(tmp_path: Path) -> None:
    async def scene(controller: Controller) -> None:
        rights = {node: invite(controller, node, "bob") for node in ("n1", "n2", "n3")}
        wires = {node: knock(controller, right) for node, right in rights.items()}
        await until(lambda: controller.agents.nodes == set(rights))
        wires["n1"].to_controller.put_nowait(codec.encode(Going("taken")))
        controller.agents.gone("n2", "its pilot has ended")
        controller.cluster.nodes["n3"].heard = time.time() - 600
        await until(lambda: not controller.cluster.nodes)
        again = {node: knock(controller, right) for node, right in rights.items()}
        await until(lambda: all(wire.received for wire in again.values()))
        assert {node: wire.received[0] for node, wire in again.items()} == {"n1": "bye", "n2": "bye", "n3": "welcome"}
        newer = knock(controller, invite(controller, "n1", "ann"), agent="another")
        await until(lambda: newer.received)
        assert newer.received[0] == "welcome"

    play(tmp_path, scene, own_users=True)


def test_a_known_agent_speaks_for_its_own_workers_only(tmp_path: Path) -> None:
    async def scene(controller: Controller) -> None:
        await train_anns(controller)
        before = facts(controller)
        anns = knock(controller, invite(controller, "n3", "ann"), *EVERYTHING[:-1])
        bobs = knock(controller, invite(controller, "n2", "bob"), *EVERYTHING[:-1])
        await until(lambda: len(anns.of_kind("logged")) == len(bobs.of_kind("logged")) == 3)
        await settled(controller)
        assert facts(controller) == before

    play(tmp_path, scene, own_users=True)
    assert no_log(tmp_path)
    assert not (tmp_path / ABSURD).exists()


def test_a_node_takes_output_of_the_worker_that_runs_there(tmp_path: Path) -> None:
    async def scene(controller: Controller) -> None:
        anns = await train_anns(controller)
        anns.to_controller.put_nowait(codec.encode(Log("t1-1", 0, "mine\n", 5)))
        await until(lambda: anns.of_kind("logged"))

    play(tmp_path, scene, own_users=True)
    assert "mine" in (tmp_path / "t1" / "log").read_text()


def test_a_folder_with_an_absurd_number_does_not_use_up_the_numbers_of_trainers(tmp_path: Path) -> None:
    for name in (ABSURD, "t7"):
        (tmp_path / "trainers" / name).mkdir(parents=True)
    assert StateLayout(tmp_path, "x").last_number() == 7
    with Store.open(tmp_path / "db") as store:
        store.number_after(StateLayout(tmp_path, "x").last_number())
        with store.transaction():
            assert store.add_trainer(name="x", owner="ann", spec={}, time=1.0).id == "t8"
