"""Unchanged scripts for torchrun in place, with eight joins, leaves and kills. `make soak-frameworks` runs them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.elastic.ddp_scripts import check_same, check_samples, disturbed, under_torchrun

pytest.importorskip("torch")

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(not sys.prefix.endswith("frameworks/ddp"), reason="takes minutes: make soak-frameworks"),
]

EVENTS = ["join"] * 3 + ["leave"] * 2 + ["kill"] * 3


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize(
    ("name", "ranks", "samples"),
    [
        ("features.py", 1, 240),
        ("tutorial_like.py", 2, 576),
        ("imagenet_like.py", 1, 600),
        ("imagenet_like.py", 2, 600),
        ("imagenet_like.py", 4, 600),
    ],
)
def test_an_unchanged_script_computes_what_it_does_under_torchrun(
    name: str, ranks: int, samples: int, seed: int, tmp_path: Path
) -> None:
    epochs = 16
    expected = under_torchrun(tmp_path / "torchrun", ranks, name, epochs)
    found = disturbed(tmp_path / "disturbed", ranks, EVENTS, name, epochs, seed=seed)
    check_samples(tmp_path / "disturbed", epochs, samples)
    check_same(found, expected)
