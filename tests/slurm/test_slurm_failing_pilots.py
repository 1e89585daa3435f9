"""Owners whose pilots end before their agents join: what is said of them, and that others do not suffer from it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bftrainer.cluster.doctor.doctor import examine
from bftrainer.cluster.pools.slurm.owned import PilotOwners
from bftrainer.cluster.pools.slurm.read import Pilot
from bftrainer.cluster.pools.slurm.submit.failing import PAUSES, SEVERAL, STORED
from bftrainer.cluster.store.events import PoolNote
from bftrainer.cluster.store.store import FILE, Store
from support.slurm.owned_host import OwnedPoolHost

WHY = "pilots of ann end before their agents join: see ~ann/pilots/n1.log"
NODES = ("n1", "n2", "n3")


class Scene:
    """Ann and Bob, of whose pilots Slurm lists what the test says."""

    def __init__(self, *, listed_before: bool = True) -> None:
        self.host = OwnedPoolHost({"ann": "ann", "bob": "bob"})
        self.now = 0.0
        self.jobs = 0
        submitters: Any = SimpleNamespace(
            why_not=lambda owner: "",
            most=lambda owner: None,
            log_of=lambda owner, node: f"~{owner}/pilots/{node}.log",
            describe=lambda: {"submit": "run-as"},
        )
        limits: Any = SimpleNamespace(of=lambda user: SimpleNamespace(minutes=None, pilots=None))
        self.owners = PilotOwners(self.host, submitters, limits)
        if listed_before:
            self.list()

    def list(self, *pilots: Pilot) -> None:
        self.owners.see(pilots, self.now)

    def fail(self, owner: str = "ann", node: str = "n1", *others: Pilot) -> None:
        """A pilot is listed, and then as failed."""
        self.jobs += 1
        self.list(*others, Pilot(self.jobs, node, "running", owner=owner, id=f"{self.jobs}"))
        self.list(*others, Pilot(self.jobs, node, "ended", how="FAILED", owner=owner, id=f"{self.jobs}"))

    def join(self, owner: str, node: str) -> Pilot:
        """A pilot's agent is connected."""
        self.jobs += 1
        self.host.invited[node] = (owner, "secret")
        self.host.agents[node] = None  # type: ignore[assignment]
        pilot = Pilot(self.jobs, node, "running", owner=owner, id=f"{self.jobs}")
        self.list(pilot)
        return pilot

    @property
    def why(self) -> str:
        return self.owners.why_not("ann", self.now)

    @property
    def said(self) -> list[tuple[str, ...]]:
        return [said for said in self.host.said if said[:2] == ("note", "pilots_failed")]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_after_a_few_such_pilots_of_an_owner_the_status_the_doctor_and_an_event_say_where_to_look(scene: Scene) -> None:
    for _ in range(SEVERAL - 1):
        scene.fail()
    assert (scene.why, scene.said, scene.owners.describe()) == ("", [], {"submit": "run-as"})
    scene.fail()
    assert scene.why == WHY
    assert scene.owners.describe() == {"submit": "run-as", "warning": WHY}
    assert scene.said == [("note", "pilots_failed", "ann", WHY)]
    assert PoolNote.tells_trouble("pool.pilots_failed")
    assert scene.host.recall(STORED) == WHY


def test_the_pause_of_an_owner_grows_one_pilot_is_tried_after_it_and_others_get_their_nodes(scene: Scene) -> None:
    scene.host.wishes = {"n1": "ann", "n2": "ann", "n3": "bob"}
    assert len(scene.owners.choose(NODES, {}, scene.now)) == 3
    for _ in range(SEVERAL):
        scene.fail()
    for pauses in range(1, 8):
        assert scene.owners.choose(NODES, {}, scene.now) == {"n3": "bob"}
        scene.fail()  # one that was submitted before
        scene.now += PAUSES.wait_s(pauses) - 0.1
        assert scene.why == WHY
        scene.now += 0.2
        assert scene.why == ""
        assert scene.owners.choose(NODES, {}, scene.now) == {"n1": "ann", "n3": "bob"}
        tried = Pilot(99, "n1", "running", owner="ann", id="99")
        assert scene.owners.choose(NODES[1:], {"n1": tried}, scene.now) == {"n3": "bob"}
        assert scene.owners.describe()["warning"] == WHY
        scene.fail()
    assert len(scene.said) == 8


def test_an_agent_that_joins_or_a_resume_ends_it(scene: Scene) -> None:
    for _ in range(SEVERAL):
        scene.fail()
    scene.join("bob", "n2")
    assert scene.why == WHY
    scene.join("ann", "n1")
    assert (scene.why, scene.host.recall(STORED)) == ("", "")
    for _ in range(SEVERAL):
        scene.fail(node="n3")
    assert scene.why
    scene.owners.forget()
    scene.list()
    assert (scene.why, scene.host.recall(STORED)) == ("", "")


def test_pilots_whose_agents_had_joined_or_that_slurm_ended_are_no_such_failures(scene: Scene) -> None:
    for how in ("CANCELLED", "PREEMPTED", "TIMEOUT", "COMPLETED", "NODE_FAIL"):
        for job in range(SEVERAL):
            scene.list(Pilot(1000 + job, "n1", "ended", how=how, owner="ann", id="x"))
            scene.list()
    for _ in range(SEVERAL):
        pilot = scene.join("ann", "n1")
        del scene.host.agents["n1"]
        scene.list(Pilot(pilot.job, "n1", "ending", how="COMPLETING", owner="ann", id=pilot.id))
        scene.list(Pilot(pilot.job, "n1", "ended", how="FAILED", owner="ann", id=pilot.id))
    assert (scene.why, scene.said) == ("", [])


def test_pilots_that_had_ended_before_the_first_list_do_not_count() -> None:
    scene = Scene(listed_before=False)
    scene.list(*(Pilot(job, "n1", "ended", how="FAILED", owner="ann", id=f"{job}") for job in range(5)))
    assert scene.why == ""


def test_one_bad_node_does_not_pause_an_owner_with_agents_elsewhere(scene: Scene) -> None:
    there = scene.join("ann", "n2")
    for _ in range(2 * SEVERAL):
        scene.fail("ann", "n1", there)
    assert scene.why == ""
    scene.fail("ann", "n3", there)
    assert scene.why == WHY.replace("n1", "n3")


def test_an_owner_of_whom_nothing_was_tried_for_long_is_forgotten(scene: Scene) -> None:
    for _ in range(SEVERAL):
        scene.fail()
    scene.now += PAUSES.first_s + PAUSES.longest_s
    scene.list()
    assert (scene.owners.describe(), scene.host.recall(STORED)) == ({"submit": "run-as"}, "")


def test_the_doctor_tells_of_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    told = []
    for sentence in (None, WHY, ""):
        with Store.open(tmp_path / FILE) as store:
            if sentence is not None:
                store.keep(f"pool.{STORED}", sentence)
        told.append([(found.level, found.what) for found in examine(tmp_path) if "pilots of" in found.what])
    assert told == [[], [("error", WHY)], []]
