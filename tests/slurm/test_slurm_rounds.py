"""Rounds of the `slurm` pool in virtual time, with its real constants and a Slurm that is a few lines long."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from bftrainer.cluster.pools.slurm import actions, pool
from bftrainer.cluster.pools.slurm.figures import AnswerTimes
from bftrainer.cluster.pools.slurm.hardware import JobRequest, NodeKind, SiteLayout
from bftrainer.cluster.pools.slurm.pool import SlurmPool
from bftrainer.cluster.pools.slurm.read import Jobs, Pilot, SlurmNode, WaitingJob
from bftrainer.cluster.pools.slurm.runner import SlurmCommandError
from bftrainer.cluster.pools.slurm.settings import SlurmSettings
from support.clocks import Clock
from support.cluster.fake_pool_host import FakePoolHost

CPU = NodeKind(frozenset({"main", "scav"}), 8)
GPU = NodeKind(frozenset({"main", "scav"}), 8, gres=(("gpu", "", 1),))
REFUSED = "sbatch: it failed with exit status 1: sbatch: error: Requested node configuration is not available"


class TinySlurm:
    """Stands in for `commands.Slurm`: nodes that refuse pilots or take them, and a queue."""

    mark = "m"
    name = "bftrainer-x"
    answers: ClassVar[dict[str, AnswerTimes]] = {}

    def __init__(self, clock: Clock, host: FakePoolHost, kinds: dict[str, NodeKind], took_s: float = 0.05) -> None:
        self.clock, self.host, self.kinds, self.took_s = clock, host, kinds, took_s
        self.refuses: Callable[[str], bool] = lambda node: False
        self.busy: set[str] = set()
        self.queue: Sequence[WaitingJob] = ()
        self.pilots: dict[str, Pilot] = {}
        self.submissions: list[tuple[float, str]] = []
        self.asked_for: dict[str, str] = {}
        """The GPUs that each node's last pilot asked for."""
        self.cancelled: list[str] = []
        self.questions: Counter[str] = Counter()
        self.asked_s = 0.0

    def _asked(self, what: str) -> None:
        self.questions[what] += 1
        self.asked_s += self.took_s
        self.clock.now += self.took_s

    async def nodes(self) -> dict[str, SlurmNode]:
        self._asked("nodes")
        taken = self.busy | self.pilots.keys()
        return {name: SlurmNode(name, ("allocated" if name in taken else "idle",)) for name in self.kinds}

    async def layout(self) -> SiteLayout:
        self._asked("layout")
        return SiteLayout(frozenset({"main", "scav"}), self.kinds)

    async def jobs(self) -> Jobs:
        self._asked("jobs")
        return Jobs(tuple(self.pilots.values()), tuple(self.queue))

    def reservations(self) -> dict[str, frozenset[str]]:
        return {"course": frozenset({"c002"})}

    async def submit(self, node: str, *, short: bool, gpus: str = "") -> int:
        self.clock.now += 0.05
        self.asked_for[node] = gpus
        self.submissions.append((self.clock.now, node))
        if self.refuses(node):
            raise SlurmCommandError(REFUSED)
        pilot = self.pilots[node] = Pilot(len(self.submissions), node, "running", 14_400.0, mark="m")
        self.host.agents[node] = None  # type: ignore[assignment]
        return pilot.job

    async def cancel(self, jobs: Sequence[int], *, only_waiting: bool = False) -> None:
        for node in [node for node, pilot in self.pilots.items() if pilot.job in jobs]:
            self.cancelled.append(node)
            self.end(node)

    def end(self, node: str) -> None:
        del self.pilots[node]
        self.host.agents.pop(node, None)


class Scene:
    """A pool, its Slurm and its host, and rounds that follow each other as the pool's timer says."""

    def __init__(self, folder: Path, clock: Clock, kinds: dict[str, NodeKind], took_s: float, **settings: Any) -> None:
        self.clock, self.host = clock, FakePoolHost()
        self.slurm = TinySlurm(clock, self.host, kinds, took_s)
        self.pool = SlurmPool(SlurmSettings(partition="scav", **settings), folder)
        self.pool._slurm = self.slurm  # type: ignore[assignment]
        self.pool._host_link.open(self.host)  # type: ignore[arg-type]
        self.pool._begin(self.host, self.slurm)  # type: ignore[arg-type]
        self.pool._act_on.layout = SiteLayout(frozenset({"main", "scav"}), kinds)

    async def rounds(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.pool._timer.begin(self.clock.now)
            next_at = self.pool._timer.at(*await self.pool._round())
            for said in [said for said in self.host.said if said[0] == "leaving" and said[1] in self.slurm.pilots]:
                self.slurm.end(said[1])
            self.clock.now = max(self.clock.now, next_at)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    def build(kinds: dict[str, NodeKind], took_s: float = 0.05, **settings: Any) -> Scene:
        clock = Clock(1000.0)
        for module in (pool, actions):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, time=clock))
        return Scene(tmp_path, clock, kinds, took_s, **settings)

    return build


def mixed(cpu: int, gpu: int) -> dict[str, NodeKind]:
    return {**{f"c{i:03}": CPU for i in range(cpu)}, **{f"g{i:03}": GPU for i in range(gpu)}}


# Refusals.


@pytest.mark.parametrize(("cpu", "gpu", "seconds"), [(6, 2, 2.0), (3, 100, 20.0), (50, 100, 20.0)])
def test_nodes_that_refuse_pilots_keep_none_from_the_others(
    make: Callable[..., Scene], cpu: int, gpu: int, seconds: float
) -> None:
    scene = make(mixed(cpu, gpu), max_pending=1000)
    scene.slurm.refuses = lambda node: node.startswith("c")
    asyncio.run(scene.rounds(seconds))
    assert {node for node in scene.slurm.pilots if node.startswith("g")} == {f"g{i:03}" for i in range(gpu)}
    asyncio.run(scene.rounds(3600.0))
    refused = [node for _, node in scene.slurm.submissions if node.startswith("c")]
    assert len(refused) <= 3600 / 60 + 20, "a kind of nodes that refuses is tried once a minute"
    assert len(scene.slurm.pilots) == gpu
    assert scene.pool.describe()["problem"] == "", "there are pilots"
    assert scene.pool.describe()["refusing"] > 0
    # A suitable node that becomes idle in the middle of this has its pilot at the next look.
    scene.slurm.end("g000")
    asyncio.run(scene.rounds(16.0))
    assert "g000" in scene.slurm.pilots


def test_nodes_of_one_kind_of_which_some_refuse_are_all_tried(make: Callable[..., Scene]) -> None:
    scene = make(mixed(8, 0))
    scene.slurm.refuses = lambda node: node < "c002"
    asyncio.run(scene.rounds(2.0))
    assert sorted(scene.slurm.pilots) == [f"c{i:03}" for i in range(2, 8)]


def test_an_account_that_no_node_accepts_is_a_problem_and_seldom_tried(make: Callable[..., Scene]) -> None:
    scene = make(mixed(20, 0))
    scene.slurm.refuses = lambda node: True
    asyncio.run(scene.rounds(600.0))
    assert len(scene.slurm.submissions) < 20
    assert scene.pool.describe()["problem"] == REFUSED
    assert scene.host.words("note").count("submit_failed") == 1
    scene.slurm.refuses = lambda node: False
    asyncio.run(scene.rounds(75.0))
    assert len(scene.slurm.pilots) == 20
    assert scene.pool.describe()["problem"] == ""


# GPUs.


def test_each_pilot_asks_for_the_gpus_of_its_node_also_if_the_node_is_new_or_was_changed(
    make: Callable[..., Scene],
) -> None:
    scene = make(mixed(1, 1))
    asyncio.run(scene.rounds(5.0))
    assert scene.slurm.asked_for == {"c000": "", "g000": "gpu:1"}
    four = NodeKind(frozenset({"main", "scav"}), 8, gres=(("gpu", "a100", 4),))
    scene.slurm.kinds = {**scene.slurm.kinds, "g001": four}
    asyncio.run(scene.rounds(16.0))
    assert scene.slurm.asked_for["g001"] == "gpu:a100:4"
    assert scene.slurm.questions["layout"] == 2
    scene.slurm.kinds = {**scene.slurm.kinds, "g000": four}
    asyncio.run(scene.rounds(300.0))
    scene.slurm.end("g000")
    asyncio.run(scene.rounds(16.0))
    assert scene.slurm.asked_for["g000"] == "gpu:a100:4"


# Waiting jobs.


def waiting(name: str, nodes: int, **facts: Any) -> WaitingJob:
    return WaitingJob(name, JobRequest(frozenset({"main"})), nodes, **facts)


def test_pilots_stay_on_nodes_that_arriving_jobs_cannot_get(make: Callable[..., Scene]) -> None:
    scene = make(mixed(10, 0))
    names = tuple(scene.slurm.kinds)
    scene.slurm.busy = set(names[:7])
    asyncio.run(scene.rounds(5.0))
    assert sorted(scene.slurm.pilots) == list(names[7:])
    wide = waiting("50", 10, priority=99, planned_on=frozenset(names), start=scene.clock.now + 7200)
    for number in range(60):
        arrived = [waiting(str(100 + i), 1, priority=5, limit_s=86_400.0) for i in range(number)]
        scene.slurm.queue = (wide, *arrived)
        asyncio.run(scene.rounds(2.0))
    assert not scene.slurm.cancelled
    assert sorted(scene.slurm.pilots) == list(names[7:])
    scene.slurm.queue = (wide, waiting("900", 1, priority=5, limit_s=600.0))
    asyncio.run(scene.rounds(2.0))
    assert len(scene.slurm.cancelled) == 1, "a short job may start before the wide one"
    assert scene.pool.figures().cancelled == {"a job waits": 1}


def test_a_job_that_is_to_run_in_a_reservation_gets_a_node_of_it(make: Callable[..., Scene]) -> None:
    scene = make(mixed(3, 0))
    asyncio.run(scene.rounds(10.0))
    assert not scene.slurm.cancelled
    request = JobRequest(frozenset({"main"}), reservation="course")
    scene.slurm.queue = [WaitingJob("1", request, 1)]
    asyncio.run(scene.rounds(9.0))
    assert scene.slurm.cancelled == ["c002"]


# How often Slurm is asked.


def test_at_rest_slurm_is_asked_every_rest_s_and_every_interval_s_after_a_change(make: Callable[..., Scene]) -> None:
    scene = make(mixed(4, 0))
    scene.host.demand = 3
    asyncio.run(scene.rounds(120.0))
    scene.slurm.questions.clear()
    asyncio.run(scene.rounds(600.0))
    assert scene.slurm.questions == {"nodes": 40, "jobs": 40}, "every 15 s"
    scene.host.demand = 9
    asyncio.run(scene.rounds(60.0))
    scene.slurm.questions.clear()
    asyncio.run(scene.rounds(600.0))
    assert scene.slurm.questions == {"nodes": 60, "jobs": 60}, "every 10 s while trainers could use more"
    scene.slurm.busy = {"c000"}
    scene.slurm.end("c000")
    scene.slurm.questions.clear()
    asyncio.run(scene.rounds(10.0))
    assert scene.slurm.questions["jobs"] == 4, "after 0, 2, 5 and 9.5 s"


def test_a_slow_slurm_is_asked_for_at_most_a_third_of_the_time_even_while_jobs_arrive(
    make: Callable[..., Scene],
) -> None:
    scene = make(mixed(8, 0), took_s=1.0)
    asyncio.run(scene.rounds(30.0))
    began, asked_s = scene.clock.now, scene.slurm.asked_s
    for number in range(60):
        scene.slurm.queue = [waiting(str(number), 2)]
        asyncio.run(scene.rounds(1.0))
    assert scene.slurm.asked_s - asked_s <= (scene.clock.now - began) / 3 + 2.0


# Demand.


def test_no_more_nodes_are_held_than_trainers_can_use_and_a_reserve(make: Callable[..., Scene]) -> None:
    scene = make(mixed(8, 0), warm_pilots=2, linger_s=30.0)
    scene.host.demand = 0
    asyncio.run(scene.rounds(10.0))
    assert len(scene.slurm.pilots) == 2
    scene.host.demand = 4
    asyncio.run(scene.rounds(16.0))
    assert len(scene.slurm.pilots) == 6
    scene.host.demand, scene.host.used = 0, frozenset({"c004", "c005"})
    asyncio.run(scene.rounds(25.0))
    assert len(scene.slurm.pilots) == 6, "a trainer may come"
    asyncio.run(scene.rounds(30.0))
    assert sorted(scene.slurm.pilots) == ["c004", "c005"], "those in use stay until they are left"
    assert scene.pool.figures().cancelled == {"no demand": 4}
    assert "pilot_ended" not in scene.host.words("note")
    scene.host.used = frozenset()
    asyncio.run(scene.rounds(100.0))
    assert len(scene.slurm.pilots) == 2
    assert scene.pool.describe()["wanted"] == 2


def test_a_pool_at_rest_looks_again_at_once_when_a_trainer_is_submitted(
    make: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make(mixed(2, 0))
    scene.host.demand = 0
    asyncio.run(scene.rounds(120.0))

    async def rest() -> float:
        """The time at which the pool's rest ends, when a trainer comes after three glances."""
        glances = 0

        async def glance() -> None:
            nonlocal glances
            glances += 1
            scene.clock.now += 0.1
            scene.host.demand = 5 if glances >= 3 else 0
            raise TimeoutError

        monkeypatch.setattr(scene.pool, "_wake", SimpleNamespace(wait=glance, is_set=lambda: False))
        began = scene.clock.now
        await scene.pool._rest(began + 15.0)
        return scene.clock.now - began

    assert asyncio.run(rest()) <= 0.6
