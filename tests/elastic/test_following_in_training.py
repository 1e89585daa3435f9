"""Newcomers of whole jobs follow the training before they join, and nothing of what is computed changes.

Donors and newcomers are killed while the state flows. It then costs the others nothing but the loss of the node.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from bftrainer.elastic import protocol
from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings, Happening
from bftrainer.elastic.protocol import Follow, Ready
from support.elastic.churn import WORKER, check, disturb, leaks
from support.elastic.jobs import SETTINGS, on, play
from support.elastic.ledger import News, committed, same_as_alone

pytestmark = pytest.mark.waits

WIDTH = "--width=24000"  # 14 MB of parameters and their states
EPOCHS = 4
FOLLOWING = replace(SETTINGS, background_start=False)  # on a busy machine a newcomer would take minutes
JOINED = re.compile(r"has followed the training for (\d+) steps; ([\d.]+) MB of ([\d.]+) MB were sent")


@dataclass(slots=True)
class Observed:
    """What was seen of a job."""

    asked: list[str] = field(default_factory=list)
    """Nodes that asked for the state before they joined."""
    ready: set[str] = field(default_factory=set)
    ended: list[str] = field(default_factory=list)

    def watch(self, happening: Happening) -> None:
        if isinstance(happening.message, Follow):
            self.asked.append(happening.node)
        if isinstance(happening.message, Ready):
            self.ready.add(happening.node)
        if happening.what.startswith("ended with status -"):
            self.ended.append(happening.node)


def followers(folder: Path) -> dict[str, bool]:
    """Nodes that followed until they joined, and whether only the rest of the state was sent to them then."""
    found = {}
    for log in (folder / "logs").glob("*.log"):
        if match := JOINED.search(log.read_text()):
            found[log.stem] = float(match[2]) < float(match[3]) / 10
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training on one node."""
    folder = tmp_path_factory.mktemp("alone")
    assert play(on(1), folder, [WORKER, str(folder), str(EPOCHS), "0", WIDTH]).status == "done"
    return folder


def train(
    folder: Path,
    scenario: Callable[[Coordinator, Observed], Awaitable[None]],
    settings: CoordinatorSettings = FOLLOWING,
) -> Observed:
    """Train on two nodes at first, in slow steps until the scenario is over."""
    seen = Observed()
    (folder / "limit").write_text("0")

    async def whole(job: Coordinator) -> None:
        await job.add(2)
        await job.until(lambda: len(job.members) == 2 and steps(folder) > 1, what="training on two nodes")
        await scenario(job, seen)
        (folder / "hurry").touch()

    argv = [WORKER, str(folder), str(EPOCHS), "0.1", WIDTH]
    outcome = play(whole, folder, argv, settings=settings, watch=seen.watch)
    assert outcome.status == "done", outcome
    return seen


def steps(folder: Path) -> int:
    """How many steps were committed."""
    return len({tuple(said["commit"]) for said in News(folder).read() if "commit" in said})


def exact(folder: Path, alone: Path) -> None:
    """Assert that every sample counted once and the result is that of one node, and that nothing is left."""
    counts = committed(folder)
    assert all(counts[epoch] == Counter(range(600)) for epoch in range(EPOCHS))
    same_as_alone(alone, folder)
    assert leaks(folder) == []


def test_a_newcomer_of_a_large_training_is_sent_only_the_rest_when_it_joins(tmp_path: Path, alone: Path) -> None:
    async def join(job: Coordinator, seen: Observed) -> None:
        (third,) = await job.add(1)
        await job.until(lambda: third in job.members, what="the third node")
        two = await job.add(2)
        await job.until(lambda: set(two) <= set(job.members), what="two more at once")

    train(tmp_path, join)
    found = followers(tmp_path)
    assert found["node-3"], found
    assert len(found) >= 3, found
    exact(tmp_path, alone)


SLOWLY = replace(FOLLOWING, environment={protocol.FOLLOW_RATE: "4"})
"""The state takes some seconds."""


@pytest.mark.parametrize("victims", [("node-1",), ("node-3",), ("node-2", "node-3")], ids="+".join)
def test_a_loss_while_the_state_flows_costs_nothing_else(victims: tuple[str, ...], tmp_path: Path, alone: Path) -> None:
    async def kill(job: Coordinator, seen: Observed) -> None:
        (third,) = await job.add(1)
        await job.until(lambda: third in seen.asked, what="a newcomer that follows")
        before = steps(tmp_path)
        await job.until(lambda: steps(tmp_path) > before + 2, what="some steps while the state flows")
        assert third not in seen.ready
        for victim in victims:
            job.signal(victim, signal.SIGKILL)
        await job.until(lambda: set(victims) <= set(seen.ended), what="the end of the victims")

    train(tmp_path, kill, SLOWLY)
    exact(tmp_path, alone)


@pytest.mark.parametrize("victims", [("node-1",), ("node-2", "node-3")], ids="+".join)
def test_a_loss_while_a_newcomer_joins_costs_nothing_else(
    victims: tuple[str, ...], tmp_path: Path, alone: Path
) -> None:
    async def kill(job: Coordinator, seen: Observed) -> None:
        (third,) = await job.add(1)
        await job.until(lambda: third in seen.ready, what="a newcomer that has caught up")
        for victim in victims:
            job.signal(victim, signal.SIGKILL)
        await job.until(lambda: set(victims) <= set(seen.ended), what="the end of the victims")
        (fourth,) = await job.add(1)
        await job.until(lambda: fourth in job.members, what="another newcomer")

    train(tmp_path, kill)
    exact(tmp_path, alone)


def test_newcomers_do_not_follow_where_the_manager_does_not_say_that_they_can(tmp_path: Path, alone: Path) -> None:
    async def join(job: Coordinator, seen: Observed) -> None:
        (third,) = await job.add(1)
        await job.until(lambda: third in job.members, what="the third node")

    seen = train(tmp_path, join, replace(FOLLOWING, environment={protocol.FOLLOW: "0"}))
    assert seen.asked == []
    assert followers(tmp_path) == {}
    exact(tmp_path, alone)


def test_newcomers_follow_while_nodes_come_and_go(tmp_path: Path, alone: Path) -> None:
    events = ["join"] * 4 + ["leave"] * 2 + ["kill"] * 2
    argv = [WORKER, str(tmp_path / "disturbed"), str(EPOCHS), "0.12", WIDTH]
    account = disturb(tmp_path / "disturbed", 3, EPOCHS, events, argv=argv, settings=FOLLOWING)
    assert any(followers(tmp_path / "disturbed").values())
    check(tmp_path / "disturbed", alone, EPOCHS, account)
