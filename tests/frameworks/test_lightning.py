"""A Lightning Trainer with the elastic strategy, while nodes come and go."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.elastic.churn import disturb
from support.elastic.frameworks import needs
from support.elastic.jobs import SETTINGS, on, play, script
from support.elastic.ledger import committed

torch = pytest.importorskip("torch")
needs("lightning")

pytestmark = pytest.mark.waits

SCRIPT = str(Path(__file__).parent / "scripts" / "lightning_module.py")
EVENTS = ["join"] * 3 + ["leave"] * 2 + ["kill"] * 3
TRAINED = 90
PRELOAD = ("lightning.pytorch", "bftrainer.integrations.lightning")


def command(folder: Path, pace_s: float, options: dict[str, Any]) -> list[str]:
    return [script("prepared/observed.py"), str(folder), str(pace_s), SCRIPT, str(folder), json.dumps(options)]


def final(folder: Path) -> dict[str, Any]:
    """What the main rank had at the end; all ranks that got there must have the same."""
    finals = [torch.load(path, weights_only=False) for path in folder.glob("final-*.pt")]
    (main,) = (found for found in finals if found["main"])
    for found in finals:
        check_same(found, main)
    return main


def by_hand(folder: Path, **options: Any) -> dict[str, Any]:
    """The script as a user starts it, without BFTrainer."""
    folder.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, SCRIPT, str(folder), json.dumps(options)], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    return final(folder)


def undisturbed(folder: Path, **options: Any) -> dict[str, Any]:
    folder.mkdir(parents=True)
    assert play(on(1), folder, command(folder, 0, options), preload=PRELOAD).status == "done"
    return final(folder)


def disturbed(folder: Path, *, seed: int = 3, events: list[str] = EVENTS, **options: Any) -> dict[str, Any]:
    argv = command(folder, 0.12, options)
    account = disturb(folder, seed, 0, events, settings=SETTINGS, argv=argv, preload=PRELOAD, holders_only=True)
    assert account.ended == [], account.ended
    assert len(account.worlds) >= 2
    return final(folder)


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, weight in found["model"].items():
        assert (weight - expected["model"][name]).abs().max() < 1e-10 * max(1, weight.abs().max()), name
    for name in ("steps", "epoch", "best"):
        assert found[name] == expected[name], name
    for name in ("lr", "score"):
        assert found[name] == pytest.approx(expected[name], rel=1e-10), name


def check_samples(folder: Path, epochs: int) -> None:
    counts = committed(folder)
    assert sorted(counts) == list(range(epochs))
    for epoch, counter in counts.items():
        assert counter == Counter(range(TRAINED)), f"epoch {epoch}"


def check_values(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that the same values were logged, last and at every step."""
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)
    rows, others = logged(found["logs"]), logged(expected["logs"])
    assert [(row["step"], sorted(row)) for row in rows] == [(row["step"], sorted(row)) for row in others]
    for row, other in zip(rows, others, strict=True):
        assert row == pytest.approx(other, rel=1e-9), (row, other)


def logged(folder: str) -> list[dict[str, float]]:
    with Path(folder, "metrics.csv").open(newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [{name: value for name, value in row.items() if not math.isnan(value)} for row in rows]


@pytest.mark.short
def test_a_node_joins_and_one_is_killed(tmp_path: Path) -> None:
    options = {"max_epochs": 6}
    expected = undisturbed(tmp_path / "alone", **options)
    found = disturbed(tmp_path / "disturbed", events=["join", "kill"], **options)
    check_samples(tmp_path / "disturbed", 6)
    check_same(found, expected)
    check_values(found, expected)


def test_a_trainer_computes_what_it_does_undisturbed(tmp_path: Path) -> None:
    options = {"max_epochs": 4}
    expected = undisturbed(tmp_path / "alone", **options)
    found = disturbed(tmp_path / "disturbed", **options)
    check_samples(tmp_path / "disturbed", 4)
    check_same(found, expected)
    check_values(found, expected)


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({"max_epochs": 12, "accumulate_grad_batches": 3}, 12),
        ({"max_epochs": 12, "ranks": 3, "kind": "per epoch"}, 12),
        ({"max_epochs": 24, "ranks": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, 24),
        ({"max_epochs": 6, "kind": "plateau", "val_check_interval": 0.5, "package": "pytorch_lightning"}, 6),
        ({"max_epochs": 5, "workers": 1, "limit_val_batches": 2, "check_val_every_n_epoch": 2}, 5),
    ],
    ids=["accumulating", "submitted for 3 ranks", "both", "pytorch_lightning", "workers"],
)
def test_options_are_honoured(options: dict[str, Any], epochs: int, tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "alone", **options)
    found = disturbed(tmp_path / "disturbed", **options)
    check_samples(tmp_path / "disturbed", epochs)
    check_same(found, expected)
    check_values(found, expected)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"kind": "adversaries", "max_epochs": 4}, 4 * 23 * 2),
        ({"kind": "adversaries", "max_epochs": 10, "ranks": 3}, 10 * 8 * 2),
        ({"kind": "accumulating", "max_epochs": 12, "accumulate": 3}, 12 * 8),
    ],
    ids=["two optimizers", "two optimizers, submitted for 3 ranks", "accumulating"],
)
def test_manual_optimization(options: dict[str, Any], steps: int, tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "alone", **options)
    found = disturbed(tmp_path / "disturbed", **options)
    check_samples(tmp_path / "disturbed", options["max_epochs"])
    check_same(found, expected)
    assert found["steps"] == steps


def test_checkpoints_the_best_model_and_early_stopping(tmp_path: Path) -> None:
    options = {"max_steps": 200, "val_check_interval": 6, "best": 2, "patience": 4, "min_delta": 0.02}
    expected = undisturbed(tmp_path / "alone", **options)
    found = disturbed(tmp_path / "disturbed", **options)
    assert 20 < expected["steps"] < 200
    check_same(found, expected)
    check_values(found, expected)
    kept = [sorted(path.name for path in (tmp_path / one / "checkpoints").iterdir()) for one in ("alone", "disturbed")]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 3  # two of the best and the last
    best = torch.load(tmp_path / "disturbed" / "checkpoints" / found["best"][0], weights_only=False)
    other = torch.load(tmp_path / "alone" / "checkpoints" / found["best"][0], weights_only=False)
    assert best["global_step"] == other["global_step"]
    for name, weight in best["state_dict"].items():
        assert (weight - other["state_dict"][name]).abs().max() < 1e-10


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 3, "val_check_interval": 6},
        {"kind": "plateau", "limit_train_batches": 7, "package": "pytorch_lightning"},
        {"kind": "adversaries"},
        {"kind": "accumulating", "precision": "bf16-mixed"},
    ],
    ids=["accumulating", "pytorch_lightning", "two optimizers", "manual"],
)
def test_started_by_hand_it_computes_what_lightning_does_to_the_digit(options: dict[str, Any], tmp_path: Path) -> None:
    expected = by_hand(tmp_path / "plain", **options, max_epochs=2, shuffle=False, plain=True)
    found = by_hand(tmp_path / "elastic", **options, max_epochs=2, shuffle=False)
    assert all(torch.equal(weight, expected["model"][name]) for name, weight in found["model"].items())
    assert found["steps"] == expected["steps"]
    if options.get("kind") != "accumulating":  # its values are logged with the step, not with each batch
        assert found["metrics"] == expected["metrics"]
        assert logged(found["logs"]) == logged(expected["logs"])


def test_a_training_begins_with_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    options = {"best": 1, "shuffle": False, "kind": "per epoch"}
    by_hand(tmp_path / "first", **options, max_steps=30, plain=True)
    (checkpoint,) = (tmp_path / "first" / "checkpoints").glob("last*.ckpt")
    expected = by_hand(tmp_path / "plain", **options, max_epochs=10, plain=True)
    found = disturbed(tmp_path / "elastic", **options, max_epochs=10, ckpt_path=str(checkpoint))
    for name, weight in found["model"].items():
        assert (weight - expected["model"][name]).abs().max() < 1e-10, name
    assert (found["steps"], found["epoch"]) == (expected["steps"], expected["epoch"])


def test_a_training_that_was_ended_goes_on_where_it_was(tmp_path: Path) -> None:
    options = {"max_epochs": 6, "best": 1}
    expected = by_hand(tmp_path / "whole", **options)
    folder = tmp_path / "resumed"
    folder.mkdir()
    env = os.environ | {"BFTRAINER_SNAPSHOTS": str(folder / "snapshots")}
    begun = [sys.executable, SCRIPT, str(folder), json.dumps(options)]
    log = folder / "logs" / "version_0" / "metrics.csv"
    with subprocess.Popen(begun, stderr=subprocess.DEVNULL, env=env) as first:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and (not log.exists() or len(log.read_text().splitlines()) < 60):
            time.sleep(0.02)
        first.send_signal(signal.SIGTERM)
        first.wait(60)
    done = subprocess.run(begun, capture_output=True, text=True, env=env)
    assert "bftrainer: resumed from" in done.stderr
    found = final(folder)
    check_same(found, expected)
    check_values(found, expected)


REMEDIES = {
    "devices": "--ranks-per-node",
    "num_nodes": "--nodes 1-4",
    "reload": "Leave it out",
    "val_check_interval": "Give a multiple of that",
    "time": "Give it in batches",
    "averaging": "keep an average of the weights as a module",
    "finetuning": "put all parameters into the optimizer",
    "stream": "`__len__` and `__getitem__`",
    "batch sampler": "Use batch_size and a sampler",
    "several loaders": "ConcatDataset",
    "no loader": "must return a torch DataLoader",
    "lbfgs": "such as AdamW",
}
"""Words of what a Trainer says before the training begins, by the case."""


def said_to(*cases: str) -> dict[str, str]:
    refused = Path(SCRIPT).with_name("lightning_refused.py")
    done = subprocess.run([sys.executable, str(refused), *cases], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_what_cannot_work_is_refused_before_the_training_with_a_way_out() -> None:
    said = said_to(*REMEDIES)
    assert {case: words for case, words in REMEDIES.items() if words not in said[case]} == {}, said


@pytest.mark.parametrize(
    ("case", "remedy"),
    [
        ("gather", "Use self.log()"),
        ("metric", "an argument `thresholds`"),
        ("none", "Each batch needs one"),
    ],
)
def test_what_cannot_work_is_refused_in_the_first_step(case: str, remedy: str) -> None:
    assert remedy in said_to(case)[case]
