"""The harness of `make soak-gpu`: it runs on a CPU too, and it notices what must not be."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soak_gpu import parse, soak
from soak_schedule import GPT2, KILLS, MIXTURE, START, after, mixed, possible
from soak_verdict import Commits, Ending, Event, Run, summary, timed, violations
from support.elastic.jobs import warm


def ledger(folder: Path, worker: str, *lines: dict[str, Any]) -> None:
    (folder / f"steps-{worker}-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def tried(step: int, samples: list[int], generation: int = 1) -> dict[str, Any]:
    return {"try": [0, step, step], "generation": generation, "samples": samples}


def commit(step: int, at: float, generation: int = 1) -> dict[str, Any]:
    return {"commit": [0, step, step], "generation": generation, "at": at, "world": 2}


def final(folder: Path, worker: str, **other: Any) -> None:
    state = {"worker": worker, "epoch": 1, "step": 2, "weights": "abc", "optimizer": "def"} | other
    (folder / f"final-{worker}.json").write_text(json.dumps(state))


@pytest.fixture
def sound(tmp_path: Path) -> Run:
    """Two workers took four samples in two steps and ended in the same state; a third was killed."""
    ledger(tmp_path, "a", tried(0, [0]), commit(0, 10.0), tried(1, [2], 2), commit(1, 10.5, 2))
    ledger(tmp_path, "b", tried(0, [1]), commit(0, 10.0), tried(1, [3], 2), commit(1, 10.5, 2))
    ledger(tmp_path, "c", tried(1, [3]))
    final(tmp_path, "a")
    final(tmp_path, "b")
    endings = [Ending("a", 0, ours=False), Ending("b", 0, ours=False), Ending("c", -signal.SIGKILL, ours=True)]
    return Run(tmp_path, 4, ("a", "b"), endings)


def test_a_sound_job_has_no_violations(sound: Run) -> None:
    assert violations(sound) == []


def test_a_sample_that_was_taken_twice_is_noticed(sound: Run) -> None:
    ledger(sound.folder, "b", tried(0, [0]), commit(0, 10.0), tried(1, [3], 2), commit(1, 10.5, 2))
    (found,) = violations(sound)
    assert found == "samples: epoch 0: taken too often {0: 1}, too seldom {1: 1}"


def test_an_epoch_without_commits_is_noticed(sound: Run) -> None:
    for worker in "ab":
        final(sound.folder, worker, epoch=2)
    (found,) = violations(sound)
    assert found.startswith("samples: epoch 1")


@pytest.mark.parametrize("what", ["weights", "optimizer", "step"])
def test_ranks_that_differ_at_the_end_are_noticed(sound: Run, what: str) -> None:
    final(sound.folder, "b", **{what: "other"})
    (found,) = violations(sound)
    assert found.startswith(f"{what}: differ")


def test_a_survivor_without_a_final_state_is_noticed(sound: Run) -> None:
    (found,) = violations(replace(sound, survivors=("a", "b", "d")))
    assert found == "weights: no final state of d"


@pytest.mark.parametrize(
    ("status", "ours", "words"),
    [
        (-signal.SIGABRT, False, "SIGABRT"),
        (-signal.SIGABRT, True, "SIGABRT"),
        (-signal.SIGKILL, False, "SIGKILL"),
        (75, False, "status 75"),
    ],
)
def test_a_worker_that_ended_by_anything_but_our_kill_is_noticed(
    sound: Run, status: int, ours: bool, words: str
) -> None:
    (found,) = violations(replace(sound, endings=[*sound.endings, Ending("d", status, ours=ours)]))
    assert f"d ended with {words}" in found


def test_a_healthy_worker_that_was_taken_for_silent_and_a_process_left_over_are_noticed(sound: Run) -> None:
    silent, left = violations(replace(sound, silent=["b"], left=[4711]))
    assert "heard nothing of b" in silent
    assert "4711" in left


def test_a_recovery_begins_with_the_kill_and_ends_with_a_commit_of_a_later_generation(sound: Run) -> None:
    commits = Commits(sound.folder)
    commits.look()
    kill = Event("kill", 9.9, ("c",), generation=1)
    row = timed(kill, commits, [kill])
    assert row["recovery_s"] == pytest.approx(0.6)  # the step that was under way at 10.0 is none of it
    assert row["pause_s"] == pytest.approx(0.5)
    assert summary([row])["kill"]["recovery_s_worst"] == row["recovery_s"]
    assert violations(replace(sound, rows=[row], limit_s=1.0)) == []
    (late,) = violations(replace(sound, rows=[row], limit_s=0.5))
    assert late.startswith("times: 0.6 s")


def test_a_recovery_from_a_hang_begins_when_the_silence_is_noticed(sound: Run) -> None:
    commits = Commits(sound.folder)
    commits.look()
    stop = Event("stop", 9.0, ("c",), generation=1, noticed=10.2)
    kill = Event("kill", 9.9, ("d",), generation=1)
    assert timed(stop, commits, [stop, kill])["recovery_s"] == pytest.approx(0.3)
    assert timed(kill, commits, [stop, kill])["recovery_s"] == pytest.approx(0.3)


def test_a_second_kill_before_the_commit_prolongs_the_first_recovery(sound: Run) -> None:
    commits = Commits(sound.folder)
    commits.look()
    first, second = Event("kill", 9.9, ("c",), generation=1), Event("rank0", 10.3, ("d",), generation=1)
    row = timed(first, commits, [first, second])
    assert row["recovery_s"] == pytest.approx(0.6)
    assert row["since_last_s"] == pytest.approx(0.2)
    assert violations(replace(sound, rows=[row], limit_s=0.3)) == []


def test_an_event_after_which_nothing_was_committed_is_noticed(sound: Run) -> None:
    commits = Commits(sound.folder)
    commits.look()
    kill = Event("kill", 11.0, ("b",), generation=2)
    (found,) = violations(replace(sound, rows=[timed(kill, commits, [kill])]))
    assert found.startswith("times: no commit after event 0")


@pytest.mark.parametrize("seed", range(5))
def test_a_schedule_has_events_of_all_kinds_and_always_leaves_a_worker(seed: int) -> None:
    events = mixed(100, seed, most=4)
    assert len(events) == 100
    assert set(events) == set(MIXTURE)
    assert events == mixed(100, seed, most=4)
    for kinds, most in ((events, 4), (GPT2, 3)):
        count = START
        for kind in kinds:
            assert possible(kind, count, most)
            count = after(kind, count)
            assert 1 <= count <= most


def test_the_schedule_for_gpt2_has_six_kills_two_leaves_and_two_stops() -> None:
    assert sum(kind in KILLS for kind in GPT2) == 6
    assert set(KILLS) <= set(GPT2)
    assert GPT2.count("leave") == GPT2.count("stop") == 2


@pytest.mark.waits
def test_the_harness_disturbs_a_small_job_on_a_cpu_and_finds_it_sound(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    kinds = ["join", "leave", "newcomer", "survivor", "rank0", "join"]
    options = ["--small", "--device", "cpu", "--backend", "gloo", "--seed", "21", "--silence", "20"]
    loop, launcher = warm()
    found = loop.run_until_complete(soak(parse(["--model", "cnn", "--events", "6", *options]), tmp_path, launcher))
    assert found["violations"] == []
    assert [row["kind"] for row in found["all"]] == kinds
    assert [row["in_join"] for row in found["all"] if "in_join" in row] == [True, True]
    assert found["epochs"] >= 2
    assert len(found["survivors"]) == 3


@pytest.mark.waits
def test_the_harness_disturbs_workers_with_two_ranks_as_units(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    options = ["--small", "--device", "cpu", "--backend", "gloo", "--ranks-per-node", "2", "--silence", "20"]
    loop, launcher = warm()
    args = parse(["--model", "cnn", "--events", "2", "--only", "kill", *options])
    found = loop.run_until_complete(soak(args, tmp_path, launcher))
    assert found["violations"] == []
    assert len(found["survivors"]) == 2  # the two ranks of the last worker
