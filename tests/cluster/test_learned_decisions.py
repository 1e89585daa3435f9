"""Decisions that follow from what was learned: when reports lead to one, and that the log can repeat all of them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.cluster.controller.active import ControllerSettings
from bftrainer.cluster.jobs.learning import Learned
from bftrainer.cluster.jobs.worker import JobSettings
from bftrainer.cluster.report.rerun import KINDS, check
from bftrainer.cluster.store.rows import EventRow
from bftrainer.core.trainer import Trainer
from bftrainer.learning.rates import Stay
from bftrainer.learning.trials import DECIDE_AT, ScriptBelief
from bftrainer.simulate.knowledge import LearnedTruth
from support.cluster.bench import Bench
from support.examples import examples

NODES = [f"n{i}" for i in range(5)]
QUICK = ControllerSettings(job=JobSettings(restart_backoff_s=0.0))


@dataclass
class Scene:
    """Trainers of three scripts on nodes that come and go, take time to start, and report what they measure."""

    bench: Bench
    trainers: list[str] = field(default_factory=list)
    windows: Counter[tuple[str, int]] = field(default_factory=Counter)
    """The windows that each trainer has measured in each generation."""
    reported: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.bench.slow = True
        self.trainers += [self.bench.submit("1-4", script=f"/{name}.py") for name in ("one", "one", "two")]

    @property
    def decisions(self) -> int:
        return self.bench.cluster.planner.decisions

    def begin(self, seconds: float) -> None:
        """Let time pass until the workers that start are ready."""
        self.bench.pass_time(seconds)
        for worker in list(self.bench.workers.values()):
            if worker.status is None and not worker.ready:
                self.bench.make_ready(worker.id)
        self.bench.settle()
        self.bench.pass_time(1.0)

    def report(self, number: int, noise: float) -> bool | None:
        """Let a trainer report one window more. Returns whether that may lead to a decision; None: it does not run."""
        trainer, bench = self.trainers[number], self.bench
        members = bench.members(trainer) if trainer in bench.cluster.trainers else []
        if not members or bench.workers[members[0]].formed == 0:
            return None
        bench.now += 1.0
        stay = trainer, bench.workers[members[0]].formed
        self.windows[stay] += 1
        size, windows = len(members), self.windows[stay]
        rate = 100 * (number + 1) * size**0.8 * noise
        measured = {"stay_windows": windows, "stay_rate": rate, "stay_scatter": 1e-4 * (windows - 1)}
        bench.report(trainer, samples=int(bench.now), rates={str(size): rate}, **measured)
        bench.settle()
        is_first = trainer not in self.reported
        self.reported.add(trainer)
        return is_first or windows == DECIDE_AT

    def do(self, what: str, value: object) -> None:
        """Let something happen."""
        bench = self.bench
        if what == "join" and value not in bench.agents:
            bench.join(str(value))
        elif what == "take" and value in bench.agents:
            bench.take(str(value))
        elif what == "begin":
            self.begin(float(str(value)))
        elif what == "restart":
            bench.restart()
        elif what == "report":
            number, noise = value  # type: ignore[misc]
            self.report(number, noise)


HAPPENS = (
    st.tuples(st.just("join"), st.sampled_from(NODES)),
    st.tuples(st.just("take"), st.sampled_from(NODES)),
    st.tuples(st.just("begin"), st.sampled_from([1.0, 9.0, 40.0])),
    st.tuples(st.just("report"), st.tuples(st.integers(0, 2), st.floats(0.8, 1.25))),
)
REPORTS = st.tuples(st.just("report"), st.tuples(st.integers(0, 2), st.floats(0.8, 1.25)))


@settings(max_examples=examples(300, 40))
@given(steps=st.lists(st.one_of(*HAPPENS, REPORTS, REPORTS), max_size=40))
def test_only_a_first_report_and_the_third_of_a_stay_lead_to_a_decision(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, object]]
) -> None:
    scene = Scene(Bench(tmp_path_factory.mktemp("scene"), QUICK))
    for what, value in steps:
        if what != "report":
            scene.do(what, value)
            continue
        before = scene.decisions
        number, noise = value  # type: ignore[misc]
        wanted = scene.report(number, noise)
        assert scene.decisions - before == bool(wanted), (what, value)
    before = scene.decisions
    for _ in range(30):  # and no timer does
        scene.bench.pass_time(10.0)
    assert scene.decisions == before
    scene.bench.store.close()


@settings(max_examples=examples(300, 40))
@given(steps=st.lists(st.one_of(*HAPPENS, st.tuples(st.just("restart"), st.none())), max_size=40))
def test_decisions_with_learned_curves_and_starts_can_be_made_again_from_the_log(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, object]]
) -> None:
    scene = Scene(Bench(tmp_path_factory.mktemp("scene"), QUICK))
    for what, value in (("join", "n0"), ("join", "n1"), ("begin", 9.0), ("report", (0, 1.0)), *steps):
        scene.do(what, value)
    again = check(scene.bench.store.all_events(KINDS), scene.bench.policy)
    assert again.decisions == len(scene.bench.store.events(kind="decision", limit=1000))
    assert again.mismatches == ()
    told = scene.bench.store.events(kind="trainer.learned", limit=1000)
    assert any(row.data.get("start_s", 0.0) > 0 for row in told)
    scene.bench.store.close()


def test_a_decision_that_depends_on_the_start_of_nodes_follows_from_the_log_and_from_nothing_less(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, QUICK, slow=True)
    slow, quick = (bench.submit("1-4", script=f"/{name}.py") for name in ("slow", "quick"))
    for node, trainer, seconds in (("n1", slow, 60.0), ("n2", quick, 1.0)):
        bench.join(node)
        bench.pass_time(seconds)
        for worker in list(bench.workers.values()):
            if not worker.ready:
                bench.make_ready(worker.id)
        bench.settle()
        bench.pass_time(1.0)
        assert bench.nodes_of(trainer) == {node}
    for trainer in (slow, quick):
        bench.now += 5
        bench.report(trainer, samples=int(bench.now), rates={"1": 100.0}, stay_windows=9, stay_rate=100.0)
        bench.settle()
    bench.join("n3")
    assert set(bench.cluster.trainers[quick].job.nodes) == {"n2", "n3"}
    rows = list(bench.store.all_events(KINDS))
    assert check(rows, bench.policy).mismatches == ()
    assert check([_without_starts(row) for row in rows], bench.policy).mismatches != ()
    bench.store.close()


def _without_starts(row: EventRow) -> EventRow:
    return replace(row, data={**row.data, "start_s": 0.0}) if row.kind == "trainer.learned" else row


def test_the_live_system_learns_as_the_simulator_does() -> None:
    dice, names = random.Random(7), ("a", "b")
    script = ScriptBelief()
    live = {name: Learned(None, 1.0, 1.0, name=name, script=script) for name in names}
    truth = [Trainer(name, Learned().curve(1, 8, 1.0), 1, 8, 1.0, 1.0, model="m") for name in names]
    simulated = LearnedTruth()
    simulated.submitted(truth)
    stays: dict[str, tuple[int, Stay]] = {}
    wanted = 0
    for _ in range(400):
        name = dice.choice(names)
        number, stay = stays.get(name, (0, Stay(1, 0, 0.0)))
        if not stay.windows or dice.random() < 0.15:
            number, size, stay = number + 1, dice.randint(1, 8), Stay(1, 0, 0.0)
        else:
            size = stay.size
        rate = 100 * size**0.8 * dice.uniform(0.9, 1.1)
        stay = stay.then(rate) if stay.windows else Stay.first(size, rate)
        stays[name] = number, stay
        both = (
            live[name].reported(number, {size: rate}, stay),
            simulated.reported(name, number, size, rate),
        )
        assert both[0] == both[1]
        wanted += both[0]
        if dice.random() < 0.1:
            live[name].rescaled("up", 0.1 * size, 0.0, 0.0)
            simulated.rescaled(name, "up", 0.1 * size)
            live[name].started(float(size))
            simulated.started(name, float(size))
    assert wanted > 10
    for name in names:
        told = simulated._describe(name, 1.0)
        assert told.curve == live[name].curve(1, 8, 1.0)
        assert (told.up_s, told.down_s, told.start_s) == (live[name].up_s, live[name].down_s, live[name].start_s)
