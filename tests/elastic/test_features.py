"""What a user expects of PyTorch holds on several ranks: the result is that of one rank on the same global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.elastic.jobs import on, play, run_alone, script

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.waits

WORKER = script("features_worker.py")


def alone(folder: Path, *features: str) -> dict[str, Any]:
    folder.mkdir()
    run_alone(folder, WORKER, folder, *features)
    state: dict[str, Any] = torch.load(folder / "final-alone.pt")
    return state


def together(folder: Path, nodes: int, *features: str) -> list[dict[str, Any]]:
    folder.mkdir()
    outcome = play(on(nodes), folder, [WORKER, str(folder), *features], nodes=(nodes, nodes))
    assert outcome.status == "done", outcome
    return [torch.load(path) for path in sorted(folder.glob("final-*.pt"))]


@pytest.mark.parametrize(
    "features",
    [
        ("accumulate", "clip"),
        ("scaler", "clip", "twice"),
        ("channels_last", "workers", "buckets"),
        ("unequal", "buckets"),
    ],
    ids=lambda features: "+".join(features),
)
def test_three_ranks_compute_what_one_does(features: tuple[str, ...], tmp_path: Path) -> None:
    expected = alone(tmp_path / "one", *(set(features) - {"accumulate", "workers", "buckets", "unequal"}))
    found = together(tmp_path / "three", 3, *features)
    assert len(found) == 3
    for state in found:
        assert state["world"] == 3
        assert state["samples"] == 3 * 130
        assert state["loss"] == pytest.approx(expected["loss"], rel=1e-9)
        for name, value in state["model"].items():
            assert torch.equal(value, found[0]["model"][name]), name
            assert (value - expected["model"][name]).abs().max() < 1e-12, name


def test_ranks_that_use_different_layers_sum_what_belongs_together(tmp_path: Path) -> None:
    one_bucket = together(tmp_path / "one", 3, "skip")[0]["model"]
    for state in together(tmp_path / "many", 3, "skip", "buckets"):
        for name, value in state["model"].items():
            assert torch.allclose(value, one_bucket[name], rtol=1e-12, atol=1e-12), name


def test_a_gradient_of_zero_here_and_none_there_moves_all_ranks_alike(tmp_path: Path) -> None:
    found = together(tmp_path / "three", 3, "skip", "zero", "buckets")
    for state in found[1:]:
        for name, value in state["model"].items():
            assert torch.equal(value, found[0]["model"][name]), name


def test_ranks_agree_on_the_statistics_of_batch_norm(tmp_path: Path) -> None:
    found = together(tmp_path / "three", 3, "norm")
    for state in found[1:]:
        for name, value in state["model"].items():
            assert torch.equal(value, found[0]["model"][name]), name
    assert found[0]["model"]["norm.num_batches_tracked"] == 9
    assert (found[0]["model"]["norm.running_var"] != 1).all()
