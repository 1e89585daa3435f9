"""Newcomers of whole jobs follow the training before they join, and nothing of what is computed changes.

`test_following_chaos.py` kills donors and newcomers while the state flows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from bftrainer.elastic import protocol
from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings, Happening
from bftrainer.elastic.protocol import PAUSE_PARTS, Follow, Formed
from support.elastic.churn import WORKER, leaks
from support.elastic.jobs import SETTINGS, on, play
from support.elastic.ledger import News, committed, same_as_alone

pytestmark = pytest.mark.waits

WIDTH = "--width=24000"  # 14 MB of parameters and their states
EPOCHS = 4
JOINED = re.compile(r"has followed the training for (\d+) steps; ([\d.]+) MB of ([\d.]+) MB were sent")


@dataclass(slots=True)
class Observed:
    """What was seen of a job."""

    asked: list[str] = field(default_factory=list)
    """Nodes that asked for the state before they joined."""
    formed: list[Formed] = field(default_factory=list)

    def watch(self, happening: Happening) -> None:
        if isinstance(happening.message, Formed):
            self.formed.append(happening.message)
        if isinstance(happening.message, Follow):
            self.asked.append(happening.node)


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
    settings: CoordinatorSettings = SETTINGS,
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

    seen = train(tmp_path, join)
    for formed in seen.formed:
        assert tuple(formed.parts) == PAUSE_PARTS
        assert sum(formed.parts.values()) == pytest.approx(formed.pause_s, abs=1e-4)
    found = followers(tmp_path)
    assert found["node-3"], found
    assert len(found) >= 3, found
    exact(tmp_path, alone)


def test_newcomers_do_not_follow_where_the_manager_does_not_say_that_they_can(tmp_path: Path, alone: Path) -> None:
    async def join(job: Coordinator, seen: Observed) -> None:
        (third,) = await job.add(1)
        await job.until(lambda: third in job.members, what="the third node")

    seen = train(tmp_path, join, replace(SETTINGS, environment={protocol.FOLLOW: "0"}))
    assert seen.asked == []
    assert followers(tmp_path) == {}
    exact(tmp_path, alone)
