"""A script with Hugging Face Accelerate, made elastic, while nodes come and go."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bftrainer.elastic.local.coordinator import Coordinator
from support.elastic.churn import disturb
from support.elastic.frameworks import HUGGING_FACE, needs
from support.elastic.jobs import SETTINGS, on, play, run_alone, script
from support.elastic.ledger import committed
from support.waiting import until

torch = pytest.importorskip("torch")
needs("accelerate", "transformers")

from safetensors.torch import load_file  # noqa: E402

pytestmark = pytest.mark.waits

SCRIPT = str(Path(__file__).parent / "scripts" / "accelerate_loop.py")
SAVES = str(Path(__file__).parent / "scripts" / "accelerate_saves.py")
EVENTS = ["join"] * 3 + ["leave"] * 2 + ["kill"] * 3
TRAINED = 90


def command(folder: Path, pace_s: float, *arguments: object) -> list[str]:
    return [script("prepared/observed.py"), str(folder), str(pace_s), SCRIPT, str(folder), *map(str, arguments)]


def final(folder: Path) -> dict[str, Any]:
    """What the main rank had at the end; all ranks that got there must have the same."""
    finals = [torch.load(path) for path in folder.glob("final-*.pt")]
    (main,) = (found for found in finals if found["main"])
    for found in finals:
        check_same(found, main)
    return main


def undisturbed(folder: Path, *arguments: object) -> dict[str, Any]:
    folder.mkdir(parents=True)
    assert play(on(1), folder, command(folder, 0, *arguments), preload=HUGGING_FACE).status == "done"
    return final(folder)


def disturbed(folder: Path, *arguments: object, events: list[str] = EVENTS) -> dict[str, Any]:
    account = disturb(
        folder, 3, 0, events, settings=SETTINGS, argv=command(folder, 0.12, *arguments), preload=HUGGING_FACE
    )
    assert account.ended == [], account.ended
    assert len(account.worlds) >= 2
    return final(folder)


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, weight in found["model"].items():
        assert (weight - expected["model"][name]).abs().max() < 1e-10 * max(1, weight.abs().max()), name
    assert (found["lr"], found["steps"]) == (pytest.approx(expected["lr"]), expected["steps"])
    assert len(found["history"]) == len(expected["history"])
    for row, other in zip(found["history"], expected["history"], strict=True):
        assert row == pytest.approx(other, rel=1e-10)


def check_samples(folder: Path, epochs: int) -> None:
    counts = committed(folder)
    assert sorted(counts) == list(range(epochs))
    for epoch, counter in counts.items():
        assert counter == Counter(range(TRAINED)), f"epoch {epoch}"


@pytest.mark.short
def test_a_node_joins_and_one_is_killed(tmp_path: Path) -> None:
    # Enough epochs for a newcomer to start on a busy machine. After the kill they take no time.
    expected = undisturbed(tmp_path / "alone", 6, 1, 1)
    found = disturbed(tmp_path / "disturbed", 6, 1, 1, events=["join", "kill"])
    check_samples(tmp_path / "disturbed", 6)
    check_same(found, expected)


@pytest.mark.parametrize(
    ("epochs", "accumulate", "ranks", "way"),
    [(4, 1, 1, "epochs"), (10, 2, 1, "range"), (10, 1, 3, "epochs"), (20, 2, 3, "epochs")],
    ids=["plain", "accumulating, counted by range", "submitted for 3 ranks", "both"],
)
def test_a_loop_computes_what_it_does_undisturbed(
    epochs: int, accumulate: int, ranks: int, way: str, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path / "alone", epochs, accumulate, ranks, way)
    found = disturbed(tmp_path / "disturbed", epochs, accumulate, ranks, way)
    check_samples(tmp_path / "disturbed", epochs)
    check_same(found, expected)
    assert len(list((tmp_path / "disturbed").glob("epoch-*/model.safetensors"))) == epochs
    assert not list((tmp_path / "disturbed").glob(".unfinished*"))


@pytest.mark.short
def test_what_the_main_rank_should_have_saved_when_it_was_lost_is_saved_by_the_next(tmp_path: Path) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(3)
        await until(lambda: len(list(tmp_path.glob("expected-0-*"))) == 2 and list(tmp_path.glob("waits-*")))
        (main,) = tmp_path.glob("waits-*")
        job.signal(main.name.removeprefix("waits-"), signal.SIGKILL)
        await job.add(1)

    outcome = play(scenario, tmp_path, [SAVES, str(tmp_path)], preload=HUGGING_FACE, nodes=(3, 8))
    assert outcome.status == "done", outcome
    for epoch in range(2):
        expected = torch.load(next(tmp_path.glob(f"expected-{epoch}-*")))
        saved = [
            torch.load(tmp_path / f"plain-{epoch}.pt"),
            load_file(tmp_path / f"safe-{epoch}.safetensors"),
            load_file(tmp_path / f"model-{epoch}" / "model.safetensors"),
        ]
        for found in saved:
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected), epoch
    assert load_file(tmp_path / "begin" / "model.safetensors").keys() == torch.load(tmp_path / "begin.pt").keys()
    assert not list(tmp_path.rglob(".*"))


def test_alone_it_computes_what_accelerate_does(tmp_path: Path) -> None:
    finals = []
    for way in ("plain", "elastic"):
        (tmp_path / way).mkdir()
        run_alone(tmp_path, SCRIPT, tmp_path / way, 2, 2, 1, "ordered", "range", way)
        finals.append(final(tmp_path / way))
    check_same(finals[1], finals[0])
