"""The examples do what they say: alone, and one of them on nodes that keep coming and going."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bftrainer.elastic.local.coordinator import Coordinator, Happening, Outcome
from bftrainer.elastic.protocol import Formed, Report
from bftrainer.processes.warm import PRELOAD, WarmLauncher
from support.elastic.jobs import SETTINGS, run_alone

pytest.importorskip("torch")

pytestmark = pytest.mark.waits

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEADLINE_S = 240


def alone(example: str, *options: str) -> str:
    """What an example prints when it is run by hand."""
    return run_alone(Path.cwd(), EXAMPLES / example, *options)


@pytest.mark.parametrize("example", ["digits.py", "resnet.py", "chars.py"])
def test_an_example_is_short_enough_to_be_read_and_copied(example: str) -> None:
    assert len((EXAMPLES / example).read_text().splitlines()) <= 80


def test_digits_runs_alone_and_goes_on_from_its_snapshot(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    said = alone("digits.py", "--epochs", "1", "--batch-size", "256", "--snapshots", str(tmp_path))
    assert re.fullmatch(r"epoch 0: loss \d\.\d{4}, accuracy \d+\.\d\d% on 1 nodes\n", said)
    said = alone("digits.py", "--epochs", "2", "--batch-size", "256", "--snapshots", str(tmp_path))
    assert re.findall(r"^epoch (\d+):", said, re.MULTILINE) == ["1"]


def test_resnet_runs_alone_in_mixed_precision() -> None:
    sizes = ["--steps", "4", "--every", "2", "--batch", "2", "--size", "32", "--width", "4"]
    said = alone("resnet.py", *sizes, "--amp", "--channels-last", "--device", "cpu")
    assert re.findall(r"^step (\d+): \d+\.\d samples/s on 1 nodes, loss \d", said, re.MULTILINE) == ["2", "4"]


def test_chars_runs_alone_and_writes_a_line() -> None:
    sizes = ["--epochs", "2", "--width", "16", "--layers", "1", "--window", "64", "--modules", "bisect"]
    said = alone("chars.py", *sizes, "--global-batch", "8", "--max-batch", "4")
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss (\d\.\d+)", said, re.MULTILINE)]
    assert len(losses) == 2
    assert 1 < losses[1] < losses[0] < 5
    assert "\nsample: " in said


EPOCHS = 16
SIZES = (3, 6, 4, 1, 3, 5, 2, 6, 3, 1)
"""How many nodes there are to be, one after the other and from the beginning again."""


async def disturb(job: Coordinator, sizes: Iterator[int], over: asyncio.Event, formed: dict[str, Formed]) -> None:
    """Add nodes, and take them by turns with and without notice, until the last epoch has begun."""
    kinds = itertools.cycle(["leave", "kill"])

    def trains(size: int) -> bool:
        """Whether so many train together and have told how far they are."""
        generation = job.roster.going.id
        reports = [job.report(name) for name in job.members]
        return over.is_set() or (
            len(job.members) == size
            and all(name in formed and formed[name].generation == generation for name in job.members)
            and any(report is not None and report.generation == generation for report in reports)
        )

    for size in sizes:
        if size > len(job.members):
            await job.add(size - len(job.nodes))
        elif next(kinds) == "leave":
            for name in job.members[size:]:
                job.remove(name)
        else:
            for name in job.members[: len(job.members) - size]:  # rank 0 among them, where the rendezvous is
                job.signal(name, signal.SIGKILL)
        await job.until(lambda size=size: trains(size) and (over.is_set() or len(job.nodes) == size), DEADLINE_S)
        if over.is_set():
            return


def test_digits_are_learnt_while_the_world_keeps_changing(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    generations: dict[int, int] = {}
    formed: dict[str, Formed] = {}
    logs: list[str] = []

    async def main() -> Outcome:
        over = asyncio.Event()

        def watch(happening: Happening) -> None:
            if isinstance(happening.message, Formed):
                formed[happening.node] = happening.message
                generations[happening.message.generation] = happening.message.world
            if isinstance(happening.message, Report) and happening.message.epoch >= EPOCHS - 1:
                over.set()

        launcher = WarmLauncher(preload=(*PRELOAD, "sklearn.datasets", "sklearn.model_selection"))
        script = [str(EXAMPLES / "digits.py"), "--epochs", str(EPOCHS), "--pace", "0.06"]
        settings = replace(SETTINGS, silence_s=30.0, grace_s=60.0, environment={"BFTRAINER_SNAPSHOTS": ""})
        try:
            async with Coordinator(
                script, launcher, nodes=(1, 6), folder=tmp_path, settings=settings, watch=watch
            ) as job:
                await job.add(1)
                await disturb(job, itertools.chain([1], itertools.cycle(SIZES)), over, formed)
                outcome = await asyncio.wait_for(job.wait(), DEADLINE_S)
                logs.extend(job.log(name) for name in job.logs)
                return outcome
        finally:
            await launcher.close()

    outcome = asyncio.run(main())
    assert outcome.status == "done", outcome
    # How many changes fit into the training depends on how soon the machine starts a newcomer.
    assert {1, 3} <= set(generations.values())
    assert len(generations) - 1 >= 3, generations
    accuracies = {
        int(epoch): float(percent)
        for log in logs
        for epoch, percent in re.findall(r"epoch (\d+):.* accuracy (\S+)%", log)
    }
    assert accuracies[EPOCHS - 1] >= 97.0, accuracies
