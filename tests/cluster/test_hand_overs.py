"""Nodes are handed over to several owners at once, and a lender that answers slowly holds up its own owner only."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bftrainer.cluster.owners.accounts import Accounts
from bftrainer.cluster.pools.base import PoolHostLink
from bftrainer.cluster.pools.keeper import Keeper, Timeouts
from bftrainer.cluster.pools.slurm import actions, decide
from bftrainer.cluster.pools.slurm.commands import Slurm
from bftrainer.cluster.pools.slurm.ledger import PilotLedger
from bftrainer.cluster.pools.slurm.owned import HandOver, PilotOwners
from bftrainer.cluster.pools.slurm.read import Pilot
from bftrainer.cluster.pools.slurm.runner import SlurmCommandError
from bftrainer.cluster.pools.slurm.settings import SlurmSettings
from bftrainer.cluster.pools.slurm.submit import lenders as module
from bftrainer.cluster.pools.slurm.submit.base import OwnedPilot
from bftrainer.cluster.pools.slurm.submit.job import PilotJob
from bftrainer.cluster.pools.slurm.submit.lenders import Lenders
from bftrainer.cluster.wire.lender_messages import Lent, Offer, encode_lending
from bftrainer.processes import variables
from support.slurm.owned_host import OwnedPoolHost
from support.waiting import until


class Requests:
    """Submitters that answer when the test says so: `gates` has an event for each owner that is slow."""

    def __init__(self) -> None:
        self.gates: dict[str, asyncio.Event] = {}
        self.submitted: list[OwnedPilot] = []
        self.cancelled: list[int] = []
        self.problem = ""

    def of(self, owner: str) -> Any:
        async def submit(pilot: OwnedPilot) -> int:
            self.submitted.append(pilot)
            number = 100 + len(self.submitted)
            if owner in self.gates:
                await self.gates[owner].wait()
            if self.problem:
                raise SlurmCommandError(self.problem)
            return number

        async def cancel(pilots: Sequence[Pilot], *, only_waiting: bool = False) -> None:
            self.cancelled += [pilot.job for pilot in pilots]

        return SimpleNamespace(submit=submit, cancel=cancel)


class Scene:
    """Two nodes with running pilots of Carl."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(actions, "_TOGETHER_S", 0.05)
        settings = SlurmSettings(partition="scavenger")
        self.host, link, self.requests = OwnedPoolHost({"ann": "ann", "bob": "bob"}), PoolHostLink(), Requests()
        link.open(self.host)
        keeper = Keeper(Timeouts(grace_s=9, overdue_s=9, silent_s=99, retry_s=9, longest_retry_s=9))
        self.ledger = PilotLedger(settings, keeper, link)
        self.former = {node: Pilot(job, node, "running", owner="carl", id="c") for job, node in ((1, "n1"), (2, "n2"))}
        for node, pilot in self.former.items():
            keeper.found(node, 0.0)
            self.ledger.pilots[node] = pilot
        slurm = Slurm(settings, tmp_path, "abc", "mark")
        limits: Any = SimpleNamespace(of=lambda user: SimpleNamespace(minutes=None, pilots=None))
        self.owners = PilotOwners(self.host, self.requests, limits)  # type: ignore[arg-type]
        self.actions = actions.PilotActions(settings, slurm, self.ledger, self.host, self.owners, lambda: False)

    async def hand_over(self, *changes: HandOver) -> None:
        for change in changes:
            self.actions.hand_over_soon(change)
        await self.actions.hand_over(self.owners.take_handing())

    def listed(self, *pilots: Pilot) -> list[int]:
        """Slurm lists these pilots. Returns the jobs that are cancelled for it."""
        chosen = decide.sort_pilots(pilots, "mark", self.ledger.successors)
        cancel = self.ledger.reconcile(pilots, chosen, {}, time.monotonic(), paused=False)
        return [each.pilot.job for each in cancel]

    def new(self, number: int, job: int, node: str, state: Any = "waiting") -> Pilot:
        return Pilot(job, node, state, mark="mark", owner="ann", id=self.requests.submitted[number].id)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scene:
    return Scene(monkeypatch, tmp_path)


def test_a_lender_that_does_not_answer_holds_up_no_hand_over_of_another_owner(scene: Scene) -> None:
    async def whole() -> None:
        scene.requests.gates["ann"] = asyncio.Event()
        async with asyncio.timeout(20):
            await scene.hand_over(HandOver("n1", "ann"), HandOver("n2", "bob"))
        assert scene.ledger.pilots["n2"].owner == "bob"
        assert scene.ledger.pilots["n1"].owner == "carl"
        # Meanwhile the former pilot ends, as its agent was dismissed, and the new one is listed before the answer.
        bobs = scene.ledger.pilots["n2"]
        assert scene.listed(scene.former["n1"], bobs) == []
        assert scene.listed(bobs) == []
        assert scene.listed(scene.new(0, 101, "n1"), bobs) == []
        scene.requests.gates["ann"].set()
        await until(lambda: scene.ledger.pilots["n1"].owner == "ann" and 1 in scene.requests.cancelled)
        assert scene.listed(scene.new(0, 101, "n1", "running"), bobs) == []
        assert scene.host.words("gone") == []

    asyncio.run(whole())


def test_a_list_from_before_the_submission_does_not_end_a_hand_over(scene: Scene) -> None:
    async def whole() -> None:
        await scene.hand_over(HandOver("n1", "ann"))
        scene.listed(*scene.former.values())
        scene.listed(scene.former["n2"], scene.new(0, 101, "n1"))
        assert scene.host.words("gone") == []
        scene.listed(scene.former["n2"])
        assert scene.host.words("gone") == ["n1"], "the new pilot was there, and has ended"

    asyncio.run(whole())


def test_of_two_hand_overs_of_a_node_the_later_one_counts(scene: Scene) -> None:
    async def whole() -> None:
        scene.requests.gates["ann"] = asyncio.Event()
        await scene.hand_over(HandOver("n1", "ann"))
        await scene.hand_over(HandOver("n1", "bob"))
        scene.requests.gates["ann"].set()
        await until(lambda: 101 in scene.requests.cancelled)
        assert scene.ledger.pilots["n1"].owner == "bob"
        assert scene.host.words("gone") == []

    asyncio.run(whole())


def test_a_node_that_cannot_be_handed_over_leaves_the_pool(scene: Scene) -> None:
    scene.requests.problem = "the lender of ann refuses: no"
    asyncio.run(scene.hand_over(HandOver("n1", "ann")))
    assert scene.host.words("gone") == ["n1"]
    scene.listed(scene.former["n2"])
    assert "n1" not in scene.ledger.pilots


def test_a_lender_whose_answers_take_long_together_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def whole() -> None:
        user = pwd.getpwuid(os.getuid())
        lenders = Lenders("bftrainer-x", Accounts({}, frozenset({user.pw_name})), 20.0)
        frames: asyncio.Queue[str] = asyncio.Queue()

        async def offered() -> AsyncIterator[str]:
            while True:
                yield await frames.get()

        async def send(text: str) -> None:
            message = json.loads(text)
            if message["type"] == "lendpilot":
                clock[0] += 8.0
                await frames.put(encode_lending(Lent(message["request"], 7)))

        serving = asyncio.create_task(lenders.serve(user.pw_name, offered(), send))
        await frames.put(encode_lending(Offer(user.pw_name, user.pw_uid, 10)))
        await until(lambda: not lenders.why_not(user.pw_name))
        job = PilotJob("n1", "bftrainer-x", "m", "c", "p", "60")
        for _ in range(3):
            await lenders.of(user.pw_name).submit(OwnedPilot(job, "0" * 16, {variables.SECRET: "bfj1." + "s" * 60}))
        assert "does not answer" in lenders.why_not(user.pw_name)
        clock[0] += module.BUSY_S
        assert lenders.why_not(user.pw_name) == ""
        serving.cancel()

    asyncio.run(whole())
