"""Figures of the Slurm pool in `/metrics`."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bftrainer.cluster.pools.slurm.figures import AnswerTimes, PilotCounters, SlurmFigures
from bftrainer.cluster.pools.slurm.pool import SlurmPool
from bftrainer.cluster.pools.slurm.settings import SlurmSettings
from support.cluster import api
from support.cluster.api import by, play
from support.cluster.bench import Bench


def figures() -> SlurmFigures:
    counters = PilotCounters(submitted=7, refused=2, rounds=30)
    counters.cancelled.update({"a job waits": 3})
    counters.ended.update({"preempted": 4, "failed": 1})
    answers = AnswerTimes()
    answers.add(0.5)
    answers.add(1.5, failed=True)
    return counters.figures(["running", "running", "waiting"], 5, {"squeue": answers})


def test_pilots_cancellations_and_answer_times_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SlurmPool(SlurmSettings(partition="scavenger"), tmp_path)
    monkeypatch.setattr(pool, "figures", figures)
    monkeypatch.setattr(api, "NoPool", lambda: pool)

    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        answer = await client.get("/metrics", headers=by(tokens, "root"))
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
            if sample.name.startswith("bftrainer_slurm_")
        }
        assert samples == {
            ("bftrainer_slurm_pilots", "running"): 2,
            ("bftrainer_slurm_pilots", "waiting"): 1,
            ("bftrainer_slurm_pilots_wanted",): 5,
            ("bftrainer_slurm_pilots_submitted_total",): 7,
            ("bftrainer_slurm_submissions_refused_total",): 2,
            ("bftrainer_slurm_pilots_cancelled_total", "a job waits"): 3,
            ("bftrainer_slurm_pilots_ended_total", "preempted"): 4,
            ("bftrainer_slurm_pilots_ended_total", "failed"): 1,
            ("bftrainer_slurm_rounds_total",): 30,
            ("bftrainer_slurm_command_seconds_count", "squeue"): 2,
            ("bftrainer_slurm_command_seconds_sum", "squeue"): 2.0,
            ("bftrainer_slurm_command_failures_total", "squeue"): 1,
            ("bftrainer_slurm_command_longest_seconds", "squeue"): 1.5,
        }

    play(tmp_path, scene)


def test_other_pools_have_no_figures_of_slurm(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        answer = await client.get("/metrics", headers=by(tokens, "root"))
        assert "bftrainer_slurm_" not in answer.text

    play(tmp_path, scene)
