"""What the coordinator on one machine makes of newcomers that fail, groups that break and scripts that never speak."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bftrainer.elastic.breaks import LEAST_S, Breaks
from bftrainer.elastic.local.console import Story
from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings, Happening, Outcome
from bftrainer.processes.launch import ColdLauncher
from support.elastic import jobs
from support.elastic.jobs import script

pytestmark = pytest.mark.waits

SETTINGS = CoordinatorSettings()


def play(
    mode: str,
    folder: Path,
    scenario: Callable[[Coordinator], Awaitable[None]],
    settings: CoordinatorSettings = SETTINGS,
) -> tuple[Outcome, list[str]]:
    """Run a job of workers that only talk; its outcome, and what a person sees of it."""
    story, lines = Story(), list[str]()

    def watch(happening: Happening) -> None:
        if line := story.heard(happening):
            lines.append(line)

    async def main() -> Outcome:
        launcher = ColdLauncher()
        argv = [script("talking_worker.py"), mode, str(folder)]
        try:
            async with Coordinator(argv, launcher, folder=folder / "logs", settings=settings, watch=watch) as job:
                await scenario(job)
                return await asyncio.wait_for(job.wait(), 60)
        finally:
            await launcher.close()

    return asyncio.run(main()), lines


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("newcomer-raises", "Stale file handle"),
        ("newcomer-exits", "ended with status 1"),
        ("newcomer-silent", "elastic.init"),
    ],
)
def test_a_newcomer_that_fails_before_it_joins_is_told_of_and_the_others_go_on(
    mode: str, said: str, tmp_path: Path
) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(1)
        await job.until(lambda: job.trains("node-1"), 60, "the first one's training")
        (newcomer,) = await job.add(1)
        await job.until(lambda: newcomer not in job.nodes, 60, "the newcomer's end")
        assert job.members == ("node-1",)
        (tmp_path / "end").touch()

    outcome, lines = play(mode, tmp_path, scenario)
    assert outcome.status == "done"
    (line,) = [line for line in lines if "failed before it joined" in line]
    assert line.startswith("node-2 failed before it joined, the others go on: ")
    assert said in line


def test_a_newcomers_exception_while_nobody_trains_fails_the_job(tmp_path: Path) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(1)
        job.signal("node-1", 9)
        await job.until(lambda: not job.nodes, 60, "its end")
        await job.add(1)

    outcome, _ = play("newcomer-raises", tmp_path, scenario)
    assert outcome.status == "failed"
    assert "Stale file handle" in outcome.error


def test_a_script_that_ends_well_without_a_word_has_failed(tmp_path: Path) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(1)

    outcome, _ = play("silent", tmp_path, scenario)
    assert outcome.status == "failed"
    assert "never called `bftrainer.elastic.init`" in outcome.error


def test_of_workers_that_need_not_speak_a_good_end_is_the_end(tmp_path: Path) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(1)

    outcome, _ = play("silent", tmp_path, scenario, replace(SETTINGS, speaks=False))
    assert outcome.status == "done"


def test_a_group_that_breaks_again_and_again_fails_the_job_with_the_reason(tmp_path: Path) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(2)

    outcome, _ = play("breaks", tmp_path, scenario)
    assert outcome.status == "failed"
    assert "127.0.1.1 refused the connection" in outcome.error


def test_a_script_that_does_not_end_after_its_training_fails_after_the_time_it_is_given(tmp_path: Path) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(2)
        await job.until(lambda: job.trains("node-1") and job.trains("node-2"), 60, "training of both")
        job.signal("node-2", 19)  # it hangs
        (tmp_path / "end").touch()

    outcome, _ = play("", tmp_path, scenario, replace(SETTINGS, finish_grace_s=1.0, silence_s=60.0))
    assert outcome.status == "failed"
    assert "did not end within 1 s" in outcome.error


def test_breaks_count_generations_and_not_the_members_that_tell_of_them() -> None:
    breaks = Breaks(3)
    for generation in (4, 5):
        for _ in range(10):
            breaks.broke(generation, "no", 10.0 * generation)
    assert breaks.verdict(1000.0) == ""
    breaks.broke(6, "no", 1000.0)
    assert "3 times in a row (last in generation 6)" in breaks.verdict(1000.0)


def test_a_row_of_breaks_is_ended_by_a_step_and_by_a_loss_and_must_last_a_while() -> None:
    breaks = Breaks(2)
    breaks.reported(7)
    breaks.broke(1, "no", 0.0)
    breaks.reported(7)  # no new one
    breaks.broke(2, "no", LEAST_S - 0.1)
    assert breaks.verdict(LEAST_S - 0.1) == ""
    assert breaks.verdict(LEAST_S)
    breaks.reported(8)
    assert breaks.verdict(LEAST_S) == ""
    breaks.broke(3, "no", 10.0)
    breaks.lost()
    breaks.broke(4, "no", 20.0)
    assert breaks.verdict(30.0) == ""
    breaks.shift(-100.0)
    breaks.broke(5, "no", -70.0)
    assert "2 times" in breaks.verdict(-70.0)


def test_a_node_that_sees_other_data_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    lines: list[str] = []

    def watch(happening: Happening) -> None:
        lines.append(happening.what)

    async def scenario(job: Coordinator) -> None:
        await job.add(1)
        await job.until(lambda: job.trains("node-1"), 60, "the first one's training")
        (newcomer,) = await job.add(1)
        await job.until(lambda: newcomer not in job.nodes, 60, "the newcomer's end")
        (tmp_path / "end").touch()

    outcome = jobs.play(scenario, tmp_path, [script("short_data_worker.py"), str(tmp_path)], watch=watch)
    assert outcome.status == "done"
    (told,) = [line for line in lines if "failed before it joined" in line]
    assert "the ranks train on different data: rank 0 has 64 samples" in told
    assert (tmp_path / "final").read_text() == "64"
