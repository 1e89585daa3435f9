"""What the messages and the ends of workers mean to any manager: who is lost, who left, and whose end is a surprise."""

from __future__ import annotations

import signal
from dataclasses import dataclass

import pytest

from bftrainer.elastic import protocol
from bftrainer.elastic.breaks import LEAST_S, Breaks
from bftrainer.elastic.manager.workers import ManagedWorkers, was_killed
from bftrainer.elastic.protocol import Arrived, Broken, Formed, Leaving, Left, Ready, Report
from bftrainer.elastic.roster import Roster


@dataclass
class Worker:
    id: str
    leave_by: float | None = None
    over: bool = False
    joined: bool = False
    failed: bool = False
    killed: bool = False


class Job:
    """Two workers that train."""

    def __init__(self, most_breaks: int = 2) -> None:
        self.workers = {name: Worker(name, joined=True) for name in ("a", "b")}
        self.roster = Roster(1)
        self.managed = ManagedWorkers(self.workers, self.roster, Breaks(most_breaks))
        for name, worker in self.workers.items():
            self.roster.start(name)
            self.managed.heard(worker, Ready(), 0.0, 10.0)
        self.form()

    def form(self) -> None:
        """Have all members of the newest generation train in it."""
        self.roster.settle()
        number = self.roster.generation.id
        for name in self.roster.generation.members:
            self.managed.heard(self.workers[name], Arrived(number, name), 0.0, 10.0)
        self.roster.settle()
        for name in self.roster.generation.members:
            self.managed.heard(self.workers[name], Formed(number, 2, 0.0, 0.0, 0.0), 0.0, 10.0)

    def end(self, name: str, *, left: bool = False) -> bool:
        return self.managed.gone(self.workers.pop(name), left=left)


def test_a_loss_cuts_the_group_and_a_leaver_does_not() -> None:
    job = Job()
    assert not job.end("a")
    job.roster.settle()
    assert job.roster.generation.cut
    job = Job()
    job.managed.heard(job.workers["a"], Left(3), 1.0, 10.0)
    assert job.workers["a"].over
    assert job.end("a", left=True)
    job.roster.settle()
    assert not job.roster.generation.cut
    assert job.roster.generation.members == ("b",)


@pytest.mark.parametrize("fact", ["over", "failed", "killed"])
def test_the_end_of_one_that_said_so_or_was_ended_is_no_surprise(fact: str) -> None:
    job = Job()
    setattr(job.workers["a"], fact, True)
    assert job.end("a")


def test_one_that_asks_to_leave_has_its_grace_and_is_expected_to_end() -> None:
    job = Job()
    worker = job.workers["a"]
    job.managed.heard(worker, Leaving(), 5.0, 10.0)
    assert job.managed.overdue(14.9) == []
    assert job.managed.overdue(15.0) == [worker]
    worker.killed = True
    assert job.managed.overdue(15.0) == []
    assert job.roster.is_leaving("a")
    assert job.end("a")


def test_one_that_was_told_to_leave_is_expected_to_end() -> None:
    job = Job()
    job.roster.remove("a")
    assert job.end("a")


def test_the_others_go_on_without_a_newcomer_and_not_without_one_that_trained() -> None:
    job = Job()
    newcomer = job.workers["c"] = Worker("c")
    assert job.managed.train_without(newcomer)
    assert not job.managed.train_without(job.workers["a"])
    assert job.managed.others_joined(job.workers["a"])
    job.workers = {"c": newcomer}
    assert not ManagedWorkers(job.workers, job.roster, Breaks(2)).train_without(newcomer)


def test_a_group_that_breaks_too_often_is_judged_once_a_generation_and_a_loss_or_a_step_forgives() -> None:
    def breaks(job: Job, now: float) -> str:
        number, verdicts = job.roster.going.id, []
        for name in job.workers:
            verdicts.append(job.managed.heard(job.workers[name], Broken(number, "no route"), now, 10.0))
        job.form()
        return "".join(verdicts)

    job = Job()
    assert breaks(job, 0.0) == ""
    assert "no route" in breaks(job, LEAST_S)
    for forgives in (
        lambda job: job.managed.heard(job.workers["a"], Report(1, step=5, samples=9), 1.0, 10.0),
        lambda job: job.managed.lost("a"),
    ):
        job = Job()
        assert breaks(job, 0.0) == ""
        forgives(job)
        assert breaks(job, LEAST_S) == ""


def test_a_silent_one_is_lost_once() -> None:
    job = Job()
    job.managed.lost("a")
    job.roster.settle()
    assert job.roster.generation.cut
    assert job.roster.generation.members == ("b",)
    before = job.roster.generation
    job.end("a")
    job.roster.settle()
    assert job.roster.generation == before


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_node_that_is_taken_away_kills_in_one_of_these_ways(signum: int) -> None:
    assert was_killed(-signum)
    assert was_killed(128 + signum)


@pytest.mark.parametrize("status", [0, 1, 3, protocol.RESTART, -signal.SIGABRT, -signal.SIGSEGV, 128 + signal.SIGSEGV])
def test_any_other_end_is_the_scripts_own(status: int) -> None:
    assert not was_killed(status)
