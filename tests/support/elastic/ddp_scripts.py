"""What tests of the ddp launcher share: run an unchanged script under torchrun, or in place while nodes change."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bftrainer.elastic.local.coordinator import CoordinatorSettings
from support.elastic.churn import disturb
from support.elastic.jobs import SETTINGS, script
from support.elastic.ledger import committed

OBSERVED = script("prepared/observed.py")
TORCHRUN_S = 240.0


def settings(folder: Path, ranks: int) -> CoordinatorSettings:
    """The settings of a job whose output is in a folder, and whose script sees so many ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    return replace(SETTINGS, environment={"BFTRAINER_RANKS": str(ranks), "BFTRAINER_OUTPUT": str(folder)})


def command(folder: Path, pace_s: float, name: str, *arguments: object) -> list[str]:
    """The command line of a worker that is watched."""
    watched = [OBSERVED, str(folder), str(pace_s), script(f"ddp/{name}"), str(folder)]
    return ["-m", "bftrainer.elastic.ddp", *watched, *map(str, arguments)]


def under_torchrun(folder: Path, ranks: int, name: str, *arguments: object) -> dict[str, Any]:
    """What a script saves at its end under torchrun."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script("ddp/by_torchrun.py")]
    folder.mkdir(parents=True)
    argv = [sys.executable, *words, script(f"ddp/{name}"), str(folder), *map(str, arguments)]
    subprocess.run(argv, timeout=TORCHRUN_S, check=True)
    return loaded(folder)


def disturbed(
    folder: Path, ranks: int, events: Sequence[str], name: str, *arguments: object, seed: int = 3
) -> dict[str, Any]:
    """What a script saves at its end in place, while these events happen."""
    argv = command(folder, 0.12, name, *arguments)
    account = disturb(folder, seed, 0, list(events), argv=argv, settings=settings(folder.parent / "output", ranks))
    assert account.ended == [], account.ended
    assert len(account.worlds) >= 2
    return loaded(folder)


def loaded(folder: Path) -> dict[str, Any]:
    """What a script has saved at its end."""
    import torch

    final: dict[str, Any] = torch.load(folder / "model.pt")
    return final


def check_samples(folder: Path, epochs: int, samples: int) -> None:
    """Assert that each sample was used once per epoch."""
    counts = committed(folder)
    assert sorted(counts) == list(range(epochs))
    for epoch, counter in counts.items():
        assert counter == Counter(range(samples)), f"epoch {epoch}"


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that two runs have saved the same weights and the same numbers."""
    for name, weight in found["model"].items():
        assert (weight - expected["model"][name]).abs().max() < 1e-10 * max(1, weight.abs().max()), name
    for name in expected.keys() - {"model"}:
        assert found[name] == pytest.approx(expected[name], rel=1e-10), name
