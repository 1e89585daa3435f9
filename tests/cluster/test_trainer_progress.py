"""Reports of several workers cross: what is known of a trainer then."""

from __future__ import annotations

import pytest

from bftrainer.cluster.jobs.progress import TrainerProgress
from bftrainer.cluster.wire.worker_messages import parse_worker_message
from bftrainer.elastic.metrics import Position
from bftrainer.elastic.protocol import ProtocolError, Report


def report(samples: int, epoch: int = 0, generation: int = 1, **metrics: tuple[float, tuple[int, int, int]]) -> Report:
    values = {name: value for name, (value, _) in metrics.items()}
    places = {name: at for name, (_, at) in metrics.items()}
    return Report(generation, samples // 10, epoch, samples, metrics=values, metrics_at=places)


def test_an_evaluation_counts_though_the_others_are_ahead_of_rank_0() -> None:
    progress = TrainerProgress()
    progress.take(report(100, epoch=1))  # another rank has begun the next epoch
    progress.take(report(90, score=(0.5, (1, 9, 90))))
    assert (progress.samples, progress.epoch) == (100, 1)
    assert progress.metrics == {"score": 0.5}
    assert progress.reported.at == {"score": Position(1, 9, 90)}


def test_hearsay_does_not_replace_what_is_newer() -> None:
    progress = TrainerProgress()
    progress.take(report(90, score=(0.5, (1, 9, 90))))
    progress.take(report(100, epoch=1, score=(0.1, (0, 1, 10)), loss=(2.0, (1, 10, 100))))
    assert progress.metrics == {"score": 0.5, "loss": 2.0}
    progress.take(report(100, epoch=1, score=(0.6, (2, 10, 100))))
    assert progress.metrics["score"] == 0.6


def test_values_of_samples_that_are_to_be_made_again_are_forgotten() -> None:
    progress = TrainerProgress()
    progress.take(report(90, score=(0.5, (1, 9, 90)), first=(1.0, (0, 1, 10))))
    progress.take(report(40, generation=2, score=(0.3, (0, 4, 40))))
    assert (progress.redone, progress.metrics) == (50, {"score": 0.3, "first": 1.0})
    progress.take(report(95, generation=1, score=(0.9, (1, 9, 95))))  # somebody who is gone
    assert progress.metrics["score"] == 0.3


def test_a_worker_that_knows_no_places_is_believed() -> None:
    progress = TrainerProgress()
    progress.take(Report(1, 4, 0, 40, metrics={"score": 0.1}))
    progress.take(Report(1, 5, 0, 50, metrics={}))
    progress.take(Report(1, 4, 0, 45, metrics={"score": 0.2}))
    assert (progress.samples, progress.metrics, progress.reported.at) == (
        50,
        {"score": 0.2},
        {"score": Position(0, 4, 45)},
    )


@pytest.mark.parametrize("at", [[1, 2], [1, 2, -3], [1, 2, 0.5], "abc", 7])
def test_a_place_that_is_none_is_refused(at: object) -> None:
    said = {"type": "report", "generation": 1, "metrics": {"score": 1.0}}
    assert parse_worker_message({**said, "metrics_at": {"score": [1, 2, 3]}}) is not None
    with pytest.raises(ProtocolError):
        parse_worker_message({**said, "metrics_at": {"score": at}})


def test_how_often_snapshots_are_taken_is_said_by_the_one_who_takes_them() -> None:
    progress = TrainerProgress()
    progress.take(Report(1, 4, 0, 40, snapshot_every_s=240.0, snapshot_stall_s=2.4, snapshot_step=3))
    progress.take(Report(1, 5, 0, 50))  # another rank
    progress.take(Report(2, 6, 0, 60, snapshot_every_s=60.0, snapshot_stall_s=0.1))  # another rank 0: it wrote none yet
    assert (progress.snapshot_step, progress.snapshot_every_s, progress.snapshot_stall_s) == (3, 60.0, 0.1)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), "soon", [1.0], 1e300])
def test_a_time_between_snapshots_that_is_none_is_refused(seconds: object) -> None:
    assert parse_worker_message({"type": "report", "generation": 1, "snapshot_every_s": 1.5}) is not None
    with pytest.raises(ProtocolError):
        parse_worker_message({"type": "report", "generation": 1, "snapshot_every_s": seconds})
