"""Steps of a fixed duration, and what a worker reports of how far it is."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bftrainer.elastic import pacing, protocol
from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings
from bftrainer.elastic.pacing import Pace, Pacer
from bftrainer.elastic.torch.rates import Course
from bftrainer.errors import InputError
from support.clocks import Clock

SCRIPT = """
import sys
import torch
from torch.utils.data import TensorDataset
from bftrainer import elastic

run = elastic.init()
model = torch.nn.Linear(3, 1)
run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
torch.manual_seed(0)
x = torch.randn(640, 3)
dataset = TensorDataset(x, x.sum(1, keepdim=True))
for _ in run.epochs(100_000):
    for a, b in run.batches(dataset, batch_size=4):
        torch.nn.functional.mse_loss(run.model(a), b).backward()
        run.step()
"""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pacing, "time", clock)
    return clock


@pytest.fixture
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_one_number_is_the_pace_of_every_world_size() -> None:
    pace = Pace.parse(" 0.05 ")
    assert [pace.step_s(world) for world in (1, 2, 1000)] == [0.05, 0.05, 0.05]


def test_a_pace_by_world_size_is_linear_between_and_constant_outside() -> None:
    pace = Pace.parse("8:0.08, 2:0.02")
    assert [pace.step_s(world) for world in (1, 2, 5, 8, 9)] == pytest.approx([0.02, 0.02, 0.05, 0.08, 0.08])


@pytest.mark.parametrize(
    "text", ["", "fast", "-1", "0", "nan", "inf", "1:0.1,1:0.2", "0:0.1", "1:", "1:0.1,", "1e9", ":"]
)
def test_a_pace_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="BFTRAINER_PACE must be the seconds of a step"):
        Pace.parse(text)


def test_without_the_variable_nothing_is_paced() -> None:
    assert Pacer.from_environment(environment={}) is None
    assert Pacer.from_environment(environment={protocol.PACE: " "}) is None
    assert Pacer.from_environment(environment={protocol.PACE: "0.1"}) is not None


def test_the_rhythm_is_kept_whatever_follows_the_wait(clock: Clock) -> None:
    pacer = Pacer(Pace.parse("0.5"), clock.wait)
    for _ in range(4):
        clock.now += 0.2  # summing, applying, computing
        pacer.hold(1)
    assert clock.now == pytest.approx(102.0)
    assert clock.waits == pytest.approx([0.3] * 4)


def test_a_late_step_is_not_made_up_for(clock: Clock) -> None:
    pacer = Pacer(Pace.parse("0.5"), clock.wait)
    clock.now += 7.0
    pacer.hold(1)
    assert clock.waits == []
    clock.now += 0.1
    pacer.hold(1)
    assert clock.waits == pytest.approx([0.4])


def test_after_a_rescale_the_first_step_is_counted_from_its_end(clock: Clock) -> None:
    pacer = Pacer(Pace.parse("1:0.5,2:0.7"), clock.wait)
    clock.now += 0.4  # the pause
    pacer.begin()
    pacer.hold(2)
    assert clock.waits == pytest.approx([0.7])


def test_a_wait_that_ends_early_does_not_shift_the_rhythm(clock: Clock) -> None:
    pacer = Pacer(Pace.parse("0.5"), lambda seconds: None)
    pacer.hold(1)
    assert pacer._from == pytest.approx(100.5)


def test_the_samples_of_a_training_are_known_beforehand() -> None:
    assert Course(epochs=3, length=100, drop_last=False).total(17, 0, 17, 8) == 300


def test_what_fills_no_batch_is_not_counted_when_it_is_dropped() -> None:
    course = Course(epochs=3, length=100, drop_last=True)
    assert course.total(0, 0, 0, 8) == 3 * 96
    assert course.total(96 + 48, 1, 48, 8) == 3 * 96
    assert course.total(96 + 48, 1, 48, 32) == 96 + 48 + 32 + 96  # it has grown: the rest is cut another way
    assert course.total(3 * 96, 3, 0, 8) == 3 * 96
    assert course.total(0, 0, 0, 128) == 300  # smaller than a batch: taken whole


@pytest.mark.usefixtures("_signals")
def test_a_report_says_how_much_there_is_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from bftrainer import elastic

    monkeypatch.setenv(protocol.PACE, "0.001")
    model = torch.nn.Linear(3, 1)
    run = elastic.init()
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert (run._reports.report().total, run._reports.report().epochs) == (None, None)
    dataset = torch.utils.data.TensorDataset(torch.randn(10, 3))
    for _ in run.epochs(2):
        for (x,) in run.batches(dataset, batch_size=4, drop_last=True):
            model(x).sum().backward()
            run.step()
            assert (run._reports.report().total, run._reports.report().epochs) == (16, 2)
    found = run._reports.report()
    assert (found.samples, found.total, found.redone) == (16, 16, 0)


@pytest.mark.usefixtures("_signals")
def test_a_loop_over_steps_does_not_know_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from bftrainer import elastic

    monkeypatch.delenv(protocol.PACE, raising=False)
    model = torch.nn.Linear(3, 1)
    run = elastic.init()
    assert run._member.pacer is None
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in run.steps(2):
        model(torch.ones(3)).sum().backward()
        run.step(samples=5)
    assert (run._reports.report().total, run._reports.report().epochs, run._reports.report().samples) == (
        None,
        None,
        10,
    )


@pytest.mark.usefixtures("_signals")
def test_a_script_with_a_bad_pace_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from bftrainer import elastic

    monkeypatch.setenv(protocol.PACE, "quick")
    with pytest.raises(InputError, match="BFTRAINER_PACE must be .* but got 'quick'"):
        elastic.init()


@pytest.mark.waits
def test_a_lost_peer_ends_the_wait_and_what_it_spoilt_is_counted(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from support.elastic.jobs import play

    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    # On two nodes a step takes so long that the survivor would not be heard of again within the deadline.
    settings = CoordinatorSettings(silence_s=10.0, grace_s=30.0, environment={protocol.PACE: "1:0.01,2:600"})

    async def scenario(job: Coordinator) -> None:
        (first,) = await job.add(1)
        await job.until(lambda: (r := job.report(first)) is not None and r.step > 0, 60, "the first step")
        (second,) = await job.add(1)
        await job.until(lambda: (r := job.report(first)) is not None and r.world == 2, 60, "two nodes")
        assert job.report(first).redone == 0  # type: ignore[union-attr]
        job.signal(second, signal.SIGKILL)
        await job.until(lambda: (r := job.report(first)) is not None and r.world == 1, 60, "one node again")
        found = job.report(first)
        assert found is not None
        assert found.redone == 4
        assert (found.total, found.epochs) == (64_000_000, 100_000)
        await job.stop()

    assert play(scenario, tmp_path, [str(script)], settings).status == "stopped"


@pytest.mark.waits
def test_nodes_that_are_paced_scale_as_they_are_told(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from bftrainer.profiling import profile
    from support.elastic.jobs import warm

    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    loop, launcher = warm()
    asked = profile([str(script)], (1, 2), seconds=0.1, pace="1:0.04,2:0.05", launcher=launcher)
    found = loop.run_until_complete(asyncio.wait_for(asked, 120))
    one, two = found.points
    # A busy machine may make them slower than that, never faster.
    assert 0 < one.rate < 4 / 0.04 * 1.05
    assert 0 < two.rate < 8 / 0.05 * 1.05
    assert one.pause_s is None
    assert two.pause_s is not None
    assert found.up_s == two.pause_s
    assert found.down_s is not None
