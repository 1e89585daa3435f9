"""A Hugging Face Trainer, made elastic, while nodes come and go."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.elastic.churn import disturb
from support.elastic.frameworks import HUGGING_FACE, needs
from support.elastic.jobs import SETTINGS, on, play, script
from support.elastic.ledger import committed

torch = pytest.importorskip("torch")
needs("transformers")

pytestmark = pytest.mark.waits

SCRIPT = str(Path(__file__).parent / "scripts" / "hf_trainer.py")
EVENTS = ["join"] * 3 + ["leave"] * 2 + ["kill"] * 3
TRAINED = 90


def command(folder: Path, pace_s: float, options: dict[str, Any]) -> list[str]:
    return [script("prepared/observed.py"), str(folder), str(pace_s), SCRIPT, str(folder), json.dumps(options)]


def final(folder: Path) -> dict[str, Any]:
    """What the main rank had at the end; all ranks that got there must have the same."""
    finals = [torch.load(path, weights_only=False) for path in folder.glob("final-*.pt")]
    (main,) = (found for found in finals if found["main"])
    for found in finals:
        check_same(found, main)
    return main


def undisturbed(folder: Path, **options: Any) -> dict[str, Any]:
    folder.mkdir(parents=True)
    assert play(on(1), folder, command(folder, 0, options), preload=HUGGING_FACE).status == "done"
    return final(folder)


def disturbed(folder: Path, *, events: list[str] = EVENTS, **options: Any) -> dict[str, Any]:
    account = disturb(
        folder, 3, 0, events, settings=SETTINGS, argv=command(folder, 0.12, options), preload=HUGGING_FACE
    )
    assert account.ended == [], account.ended
    assert len(account.worlds) >= 2
    return final(folder)


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, weight in found["model"].items():
        assert (weight - expected["model"][name]).abs().max() < 1e-10 * max(1, weight.abs().max()), name
    for name in ("lr", "steps", "epoch"):
        assert found[name] == pytest.approx(expected[name], rel=1e-12), name
    assert found["best"] == (expected["best"] and pytest.approx(expected["best"], rel=1e-10))
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)  # added up in single precision
    assert found["evaluated"]["eval_loss"] == pytest.approx(expected["evaluated"]["eval_loss"], rel=1e-10)


def check_samples(folder: Path, epochs: int) -> None:
    counts = committed(folder)
    assert sorted(counts) == list(range(epochs))
    for epoch, counter in counts.items():
        assert counter == Counter(range(TRAINED)), f"epoch {epoch}"


def check_logs(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that the same was logged at the same steps."""
    assert [entry["step"] for entry in found["history"]] == [entry["step"] for entry in expected["history"]]
    for entry, other in zip(found["history"], expected["history"], strict=True):
        assert entry.keys() == other.keys()
        for name in entry.keys() & {"loss", "grad_norm", "learning_rate", "epoch", "eval_loss", "eval_accuracy"}:
            assert entry[name] == pytest.approx(other[name], rel=1e-6), (entry, other)


@pytest.mark.short
def test_a_node_joins_and_one_is_killed(tmp_path: Path) -> None:
    # Enough epochs for a newcomer to start on a busy machine. After the kill they take no time.
    options = {"num_train_epochs": 6, "eval_strategy": "epoch"}
    expected = undisturbed(tmp_path / "alone", **options)
    found = disturbed(tmp_path / "disturbed", events=["join", "kill"], **options)
    check_samples(tmp_path / "disturbed", 6)
    check_same(found, expected)
    check_logs(found, expected)


def test_a_trainer_computes_what_it_does_undisturbed(tmp_path: Path) -> None:
    options = {"num_train_epochs": 4, "eval_strategy": "epoch", "metrics": True}
    expected = undisturbed(tmp_path / "alone", **options)
    found = disturbed(tmp_path / "disturbed", **options)
    check_samples(tmp_path / "disturbed", 4)
    check_same(found, expected)
    check_logs(found, expected)


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({"num_train_epochs": 12, "gradient_accumulation_steps": 3}, 12),
        ({"num_train_epochs": 12, "ranks": 3, "lr_scheduler_type": "cosine", "warmup_steps": 4}, 12),
        ({"num_train_epochs": 24, "ranks": 3, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1}, 24),
        ({"num_train_epochs": 4, "kind": "mean", "dataloader_num_workers": 1, "dataloader_drop_last": True}, 4),
        ({"num_train_epochs": 8, "kind": "mixin", "ranks": 2}, 8),
    ],
    ids=["accumulating", "submitted for 3 ranks", "both", "mean", "mixin"],
)
def test_arguments_are_honoured(options: dict[str, Any], epochs: int, tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "alone", **options)
    found = disturbed(tmp_path / "disturbed", **options)
    if not options.get("dataloader_drop_last"):
        check_samples(tmp_path / "disturbed", epochs)
    check_same(found, expected)
    check_logs(found, expected)


def test_checkpoints_the_best_model_and_early_stopping(tmp_path: Path) -> None:
    options = {
        "max_steps": 90,
        "learning_rate": 3e-2,
        "eval_strategy": "steps",
        "eval_steps": 6,
        "save_strategy": "steps",
        "save_steps": 6,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
        "greater_is_better": True,
        "metrics": True,
        "patience": 6,
        "eval_on_start": True,
        "include_num_input_tokens_seen": "non_padding",
    }
    expected = undisturbed(tmp_path / "alone", **options)
    found = disturbed(tmp_path / "disturbed", **options)
    check_same(found, expected)
    check_logs(found, expected)
    assert found["tokens"] == expected["tokens"] > 0
    assert found["best"] == expected["best"]
    for folder in ("alone", "disturbed"):
        output = tmp_path / folder / "output"
        assert not list(output.glob(".unfinished*"))
        assert len(list(output.glob("checkpoint-*"))) == 2
