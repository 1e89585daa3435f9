"""Nodes vanish, hang and leave, scripts have bugs: what a job does then."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path

import pytest

from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings, Happening
from bftrainer.elastic.protocol import Done, Formed, Left, Report
from support.elastic.jobs import play, script

pytest.importorskip("torch")

pytestmark = pytest.mark.waits

WORKER = script("failing_worker.py")


async def trains(job: Coordinator, nodes: int) -> None:
    """Wait until so many nodes train and have made a few steps, which they write down."""

    def written() -> int:
        return sum(path.stat().st_size for path in job.folder.parent.glob("times-*"))

    await job.until(lambda: len(job.members) == nodes, 60, f"{nodes} members, not {job.members}")
    before = written()
    await job.until(lambda: written() > before + 100 * nodes, 60, "a few steps more")


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("raise", "ZeroDivisionError: the bug of the last rank"),
        ("exit", "ended with status 3"),
        ("abort", "was ended by SIGABRT"),
    ],
)
def test_a_bug_on_one_rank_ends_the_job_at_once_with_its_traceback(mode: str, said: str, tmp_path: Path) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(3)
        await trains(job, 3)
        culprit = job.members[-1]
        (tmp_path / "fail").touch()
        outcome = await asyncio.wait_for(job.wait(), 5)
        assert outcome.status == "failed"
        assert outcome.error.startswith(culprit)
        assert said in outcome.error
        if mode == "raise":
            assert 'raise ZeroDivisionError("the bug of the last rank")' in outcome.traceback
        await job.until(lambda: not job.nodes, 30, "the end of all workers")

    play(scenario, tmp_path, [WORKER, str(tmp_path), mode])


LIVES = 6


def test_killing_all_workers_again_and_again_costs_at_most_the_interval_of_snapshots(tmp_path: Path) -> None:
    saved: list[int] = []
    resumed: list[int] = []

    def newest() -> int:
        return max((int(path.stem.partition("-")[2]) for path in tmp_path.glob("snapshots/*.bft")), default=0)

    async def scenario(job: Coordinator) -> None:
        for life in range(LIVES):
            nodes = await job.add(1 + life % 2)
            before = newest()
            await job.until(lambda before=before: newest() > before, 60, "a new snapshot")
            saved.append(newest())
            for node in job.nodes:
                job.signal(node, signal.SIGKILL)
            await job.until(lambda: not job.nodes, 30, "the end of all workers")
            found = re.search(r"resumed from .* at step (\d+)", "".join(job.log(n) for n in nodes))
            resumed.append(int(found[1]) if found else 0)
        (tmp_path / "end").touch()
        await job.add(1)

    assert play(scenario, tmp_path, [WORKER, str(tmp_path), ""]).status == "done"
    assert len(resumed) == LIVES
    # Each life goes on from the newest snapshot there was, or from one that was being written at the kill.
    assert resumed[0] == 0
    for life in range(LIVES - 1):
        assert resumed[life + 1] >= saved[life] > resumed[life]


def test_sigterm_makes_a_worker_leave_at_a_step_boundary(tmp_path: Path) -> None:
    happened: list[Happening] = []
    told: list[str] = []

    async def scenario(job: Coordinator) -> None:
        await job.add(3)
        await trains(job, 3)
        first = job.members[0]
        told.append(first)
        job.signal(first, signal.SIGTERM)
        await job.until(lambda: first not in job.nodes, 30, "the leaver's end")
        await trains(job, 2)
        assert not job.roster.generation.cut
        assert "Traceback" not in job.log(first)
        (tmp_path / "end").touch()

    assert play(scenario, tmp_path, [WORKER, str(tmp_path), ""], watch=happened.append).status == "done"
    assert [h.node for h in happened if isinstance(h.message, Left)] == told


def test_a_newcomer_that_dies_before_it_joins_disturbs_nobody(tmp_path: Path) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(2)
        await trains(job, 2)
        before = job.roster.generation.id
        (newcomer,) = await job.add(1)
        await job.until(lambda: job.report(newcomer) is not None, 60, "the newcomer's first word")
        job.signal(newcomer, signal.SIGKILL)
        await job.until(lambda: newcomer not in job.nodes, 30, "its end")
        await trains(job, 2)
        assert job.roster.generation.id == before
        (tmp_path / "end").touch()

    assert play(scenario, tmp_path, [WORKER, str(tmp_path), "slow-start"]).status == "done"


def test_a_death_at_any_point_of_a_change_costs_a_generation_and_nothing_more(tmp_path: Path) -> None:
    """A third node joins; when the manager hears a certain word of it all, the newcomer or rank 0 is killed."""
    plan: list[tuple[str, int, str]] = [
        ("ready", 1, "newcomer"),
        ("arrived", 1, "newcomer"),
        ("arrived", 1, "first"),
        ("arrived", 3, "newcomer"),  # they form
        ("arrived", 3, "first"),
        ("formed", 1, "newcomer"),  # some are through
        ("formed", 1, "first"),
        ("formed", 3, "first"),
    ]
    armed: list[tuple[str, int, str]] = []
    heard: dict[str, int] = {}
    killed: list[str] = []
    jobs: list[Coordinator] = []

    def watch(happening: Happening) -> None:
        if not armed:
            return
        word, count, whom = armed[0]
        heard[happening.what] = heard.get(happening.what, 0) + 1
        if heard.get(word, 0) >= count:
            armed.clear()
            job = jobs[0]
            victim = job.nodes[-1] if whom == "newcomer" else job.members[0]
            killed.append(victim)
            job.signal(victim, signal.SIGKILL)

    async def scenario(job: Coordinator) -> None:
        jobs.append(job)
        await job.add(2)
        await trains(job, 2)
        for point in plan:
            heard.clear()
            armed.append(point)
            await job.add(1)
            await job.until(lambda: not armed, 60, f"{point}")
            await job.until(lambda: killed[-1] not in job.nodes, 30, "the end of it")
            await job.until(lambda: sorted(job.members) == sorted(job.nodes), 60, f"the others' group after {point}")
            await trains(job, 2)
        (tmp_path / "end").touch()

    assert play(scenario, tmp_path, [WORKER, str(tmp_path), ""], watch=watch).status == "done"
    assert len(killed) == len(plan)


def test_all_leave_in_good_order_and_the_next_life_goes_on_where_they_stopped(tmp_path: Path) -> None:
    left: list[int] = []

    def watch(happening: Happening) -> None:
        if isinstance(happening.message, Left):
            left.append(happening.message.step)

    async def until_stopped(job: Coordinator) -> None:
        await job.add(2)
        await trains(job, 2)
        await job.stop()

    assert play(until_stopped, tmp_path, [WORKER, str(tmp_path), ""], watch=watch).status == "stopped"
    assert len(left) == 2
    assert left[0] == left[1]

    async def next_life(job: Coordinator) -> None:
        (node,) = await job.add(1)
        await trains(job, 1)
        assert f"at step {left[0]}\n" in job.log(node)
        (tmp_path / "end").touch()

    assert play(next_life, tmp_path, [WORKER, str(tmp_path), ""]).status == "done"


def test_all_leave_one_after_the_other_and_the_state_is_kept(tmp_path: Path) -> None:
    left: list[int] = []

    def watch(happening: Happening) -> None:
        if isinstance(happening.message, Left):
            left.append(happening.message.step)

    async def one_by_one(job: Coordinator) -> None:
        await job.add(3)
        await trains(job, 3)
        for node in job.members:
            job.remove(node)
            await asyncio.sleep(0.004)  # while the one before is still on its way
        await job.until(lambda: not job.nodes, 30, "the end of all workers")
        await job.stop()

    assert play(one_by_one, tmp_path, [WORKER, str(tmp_path), ""], watch=watch).status == "stopped"
    steps = [int(path.stem.partition("-")[2]) for path in tmp_path.glob("snapshots/*.bft")]
    assert max(steps) == max(left)


def test_too_few_nodes_wait_with_their_state_for_more(tmp_path: Path) -> None:
    worlds: list[int] = []

    def watch(happening: Happening) -> None:
        if isinstance(happening.message, Formed):
            worlds.append(happening.message.world)

    async def scenario(job: Coordinator) -> None:
        await job.add(2)
        await trains(job, 2)
        job.signal("node-1", signal.SIGKILL)
        await job.until(lambda: job.nodes == ("node-2",), 30, "the end of one")
        await job.until(lambda: job.roster.generation.members == ("node-2",), 30, "the news of it")
        await job.add(1)
        await job.until(lambda: job.members == ("node-2", "node-3"), 60, "enough members")
        await trains(job, 2)
        assert "resumed" not in job.log("node-3")
        (tmp_path / "end").touch()

    assert play(scenario, tmp_path, [WORKER, str(tmp_path), ""], nodes=(2, 3), watch=watch).status == "done"
    assert set(worlds) == {2}


def test_a_script_that_leaves_its_loop_and_ends_has_finished(tmp_path: Path) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(2)
        await trains(job, 2)
        (tmp_path / "end").touch()

    assert play(scenario, tmp_path, [WORKER, str(tmp_path), ""]).status == "done"
    ends = [int(path.read_text().splitlines()[-1].split()[0]) for path in tmp_path.glob("times-*")]
    saved = [int(path.stem.partition("-")[2]) for path in tmp_path.glob("snapshots/*.bft")]
    assert ends == [max(saved)] * 2


def test_one_rank_that_ends_by_itself_is_refused_not_taken_for_the_end_of_the_training(tmp_path: Path) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(2)
        await trains(job, 2)
        (tmp_path / "fail").touch()

    outcome = play(scenario, tmp_path, [WORKER, str(tmp_path), "exit-well"])
    assert outcome.status == "failed"
    assert "at different points of the script" in outcome.error


def test_a_peer_lost_in_the_scripts_own_collective_means_a_fresh_start_not_a_failure(tmp_path: Path) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(3)
        await trains(job, 3)
        victim = job.members[1]
        job.signal(victim, signal.SIGKILL)
        await job.until(lambda: victim not in job.nodes, 30, "its end")
        await trains(job, 2)
        (tmp_path / "end").touch()

    assert play(scenario, tmp_path, [WORKER, str(tmp_path), "own-collective"]).status == "done"


def test_groups_of_the_scripts_own_work_within_a_generation(tmp_path: Path) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(3)
        await trains(job, 3)
        job.remove(job.members[0])
        await trains(job, 2)
        (tmp_path / "end").touch()

    assert play(scenario, tmp_path, [WORKER, str(tmp_path), "own-group"]).status == "done"


def test_a_stopped_worker_is_taken_for_lost(tmp_path: Path) -> None:
    silent: list[str] = []

    def watch(happening: Happening) -> None:
        if happening.what == "silent":
            silent.append(happening.node)

    async def scenario(job: Coordinator) -> None:
        await job.add(3)
        await trains(job, 3)
        job.signal(job.members[0], signal.SIGSTOP)
        await job.until(lambda: len(job.nodes) == 2, 30, "its end")
        await trains(job, 2)
        (tmp_path / "end").touch()

    settings = CoordinatorSettings(silence_s=3.0)
    outcome = play(scenario, tmp_path, [WORKER, str(tmp_path), ""], watch=watch, settings=settings)
    assert outcome.status == "done"
    assert len(silent) == 1


def test_a_worker_without_its_manager_ends(tmp_path: Path) -> None:
    pids: list[int] = []

    async def scenario(job: Coordinator) -> None:
        await job.add(2)
        await trains(job, 2)
        pids.extend(job.pid(node) for node in job.nodes)
        for worker in job._workers.running:  # the connection breaks, the processes are not told
            (rank,) = worker.ranks
            assert rank.writer is not None
            rank.writer.close()
        await job.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 30, "their end")
        (tmp_path / "end").touch()

    done = []
    play(scenario, tmp_path, [WORKER, str(tmp_path), ""], watch=lambda h: done.append(isinstance(h.message, Done)))
    assert pids


def test_the_last_evaluation_is_made_up_for_if_its_rank_0_is_lost(tmp_path: Path) -> None:
    reported: dict[str, float] = {}
    places: dict[str, tuple[int, ...]] = {}

    def watch(happening: Happening) -> None:
        if isinstance(happening.message, Report):
            reported.update(happening.message.metrics)
            places.update({name: tuple(at) for name, at in happening.message.metrics_at.items()})

    async def scenario(job: Coordinator) -> None:
        await job.add(2)
        for _ in range(2):
            done = {path.name for path in tmp_path.glob("evaluates-*")}
            await job.until(lambda done=done: len(set(tmp_path.glob("evaluates-*"))) > len(done), 60, "an evaluation")
            evaluates = next(path.name for path in tmp_path.glob("evaluates-*") if path.name not in done)
            node = evaluates.removeprefix("evaluates-")
            if done:
                (tmp_path / f"go-on-{node}").touch()
            else:
                job.signal(node, signal.SIGKILL)

    assert play(scenario, tmp_path, [script("evaluating_worker.py"), str(tmp_path)], watch=watch).status == "done"
    assert reported["score"] == 2
    assert places["score"] == (2, 8, 32)
    counted = [path.read_text() for path in tmp_path.glob("counted-*")]
    assert counted == ["2"]  # what the script's code did the first time is not done twice
