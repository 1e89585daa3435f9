"""What is wrong on one rank is told to all ranks, in words that say what to do, and fails the job."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from bftrainer.elastic.local.coordinator import Outcome
from support.elastic.jobs import on, play, script

pytestmark = pytest.mark.waits

WORKER = script("refused_worker.py")
DIFFERENT = "InputError: the ranks step different optimizers in the same batch: run.step(optimizer=…) must be called"


def told(folder: Path, mode: str) -> tuple[Outcome, list[str]]:
    """How a job of two nodes ended, and what ranks 0 and 1 were told."""
    outcome = play(on(2), folder, [WORKER, str(folder), mode], nodes=(2, 2))
    assert outcome.status == "failed"
    return outcome, [(folder / f"told-rank-{rank}").read_text() for rank in range(2)]


@pytest.mark.parametrize("mode", ["optimizers", "order"])
def test_ranks_that_step_different_optimizers_are_all_told_so(mode: str, tmp_path: Path) -> None:
    outcome, words = told(tmp_path, mode)
    assert [word.startswith(DIFFERENT) for word in words] == [True, True], words
    assert DIFFERENT in outcome.error


def test_an_evaluation_that_raises_fails_on_rank_0_as_itself_and_elsewhere_with_its_name(tmp_path: Path) -> None:
    outcome, words = told(tmp_path, "evaluate")
    own = "ZeroDivisionError: the validation data are empty"
    assert words == [own, f"BFTrainerError: run.evaluate() failed on rank 0: {own}"]
    assert own in outcome.error


def test_a_value_too_large_to_share_is_refused_on_all_ranks(tmp_path: Path) -> None:
    outcome, words = told(tmp_path, "large")
    said = "run.share() gives at most 4 MiB to all ranks, but got 8.0 MiB"
    assert words[0].startswith(f"InputError: {said}")
    assert words[1].startswith(f"BFTrainerError: run.share() failed on rank 0: InputError: {said}")
    assert said in outcome.error


def test_a_split_without_a_seed_is_refused_with_the_remedy(tmp_path: Path) -> None:
    outcome, words = told(tmp_path, "split")
    said = "rank 0 and rank 1 have 8 samples each, but not the same ones"
    assert [said in word and "generator=torch.Generator().manual_seed(0)" in word for word in words] == [True, True]
    assert said in outcome.error


def test_a_second_init_in_a_worker_is_refused(tmp_path: Path) -> None:
    outcome = play(on(1), tmp_path, [WORKER, str(tmp_path), "second-init"])
    assert outcome.status == "failed"
    assert "elastic.init() was already called in this script: use the run that it returned" in outcome.error
    (log,) = (tmp_path / "logs").glob("*.log")
    line = next(number for number, text in enumerate(Path(WORKER).read_text().splitlines(), 1) if "second-init" in text)
    said = [text for text in log.read_text().splitlines() if "already called" in text]
    assert [text.startswith(f"bftrainer: {WORKER}:{line + 1}: ") for text in said] == [True], log.read_text()
    assert "Traceback" not in log.read_text()


def test_an_error_is_in_the_log_before_the_job_ends_for_it(tmp_path: Path) -> None:
    outcome = play(on(1), tmp_path, [WORKER, str(tmp_path), "own-hook"])
    assert (outcome.status, outcome.error) == ("failed", "node-1: ValueError: no data")
    (log,) = (tmp_path / "logs").glob("*.log")
    assert "shown late: ValueError: no data" in log.read_text()


def test_a_script_that_all_ranks_end_with_an_error_status_has_failed(tmp_path: Path) -> None:
    outcome = play(on(2), tmp_path, [WORKER, str(tmp_path), "status"], nodes=(2, 2))
    assert outcome.status == "failed"
    assert "ended with status 3" in outcome.error
